"""The commands of ``dpsim``: each module of this package that has ``EXAMPLES`` is one, and nothing else names it.

It has a function of its own name, which parses and prints, or a function ``group`` that makes several commands.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType


def names() -> tuple[str, ...]:
    """Return the names of all commands and groups of commands."""
    return tuple(module.__name__.rpartition(".")[2] for module in modules())


def modules() -> Iterator[ModuleType]:
    """Yield the module of each command and of each group of commands."""
    for found in pkgutil.iter_modules([str(Path(__file__).parent)]):
        module = importlib.import_module(f"{__package__}.{found.name}")
        if hasattr(module, "EXAMPLES"):
            yield module
