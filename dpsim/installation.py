"""The version of dpsim, and the folder from which other processes import this copy of it."""

from __future__ import annotations

import sysconfig
from pathlib import Path

VERSION = "0.1.0"


def checkout() -> Path | None:
    """Return the root of the checkout that dpsim is imported from; other processes need it on PYTHONPATH.

    None where dpsim is installed in site-packages: there every process of this Python finds it.
    """
    root = Path(__file__).resolve().parents[1]
    return None if root == Path(sysconfig.get_path("purelib")).resolve() else root
