"""The commands of ``dpsim``: each module of this package that has ``EXAMPLES`` is one, and nothing else names it.

It has a function of its own name, which parses and prints, or a function ``group`` that makes several commands.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from types import ModuleType


def modules() -> dict[str, ModuleType]:
    """Return the module of each command and of each group of commands, by its name."""
    names = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
    imported = {name: importlib.import_module(f"{__package__}.{name}") for name in names}
    return {name: module for name, module in imported.items() if hasattr(module, "EXAMPLES")}
