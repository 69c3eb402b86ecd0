"""Python loads this at the start of every process of a watched job: it waits for the job's import of DDP.

It then lets the module of that name which the job would have loaded without it do its work. Whatever goes wrong here is
no concern of the job: nothing is raised and nothing is printed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_AWAITED = "torch.nn.parallel.distributed"
_NEVER_COMPILED = "<frozen importlib>"
"""How the names of files begin that TorchDynamo skips (PyTorch, torch/_dynamo/trace_rules.py, SKIP_DIRS)."""


class _Awaiting(MetaPathFinder):
    """Finds no module, but sees the first import of DDP's, and has it watched once it is executed."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _AWAITED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_and_watch(module: ModuleType) -> None:
                execute(module)
                with contextlib.suppress(Exception):
                    _watch(module)

            spec.loader.exec_module = exec_and_watch  # type: ignore[method-assign]
        return spec


def _watch(module: ModuleType) -> None:
    """Load what watches, as a package that the job cannot import by its files, and let it await a model of DDP.

    Its code bears the names of files that ``torch.compile`` never looks into, or it would compile what watches too.
    """
    package = ModuleType("_dpsim")
    package.__path__ = []
    sys.modules[package.__name__] = package
    for name in ("around", "rank_record", "watched"):
        path = os.path.join(os.path.dirname(_FOLDER), f"{name}.py")
        with open(path, encoding="utf-8") as file:
            code = compile(file.read(), f"{_NEVER_COMPILED} {path}", "exec")
        loaded = ModuleType(f"_dpsim.{name}")
        loaded.__package__ = package.__name__
        sys.modules[loaded.__name__] = loaded
        exec(code, vars(loaded))
    sys.modules["_dpsim.watched"].await_model(module.DistributedDataParallel)


def _load_the_jobs_own() -> None:
    """Import the ``sitecustomize`` that is next on the path, in place of this one. Raises what it raises."""
    this = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        if this is not None:
            sys.modules["sitecustomize"] = this


if __name__ == "sitecustomize":
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or os.curdir) != _FOLDER]
    if "DPSIM_WATCH" in os.environ:
        sys.meta_path.insert(0, _Awaiting())
    _load_the_jobs_own()
