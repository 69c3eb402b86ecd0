"""PYTHONPATH for the processes that tests start: their folders first, then whatever the caller has there."""

from __future__ import annotations

import os
from pathlib import Path


def extended_path(*folders: Path) -> str:
    """The value of PYTHONPATH with ``folders`` before what it has."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
