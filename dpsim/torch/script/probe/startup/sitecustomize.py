"""Python loads this at the start of every process of a watched job: it waits for the job's import of DDP and of FSDP.

It also offers the module ``dpsim_callbacks`` to a job that imports it. It then lets the module of that name which the
job would have loaded without it do its work. Whatever goes wrong here is no concern of the job: nothing is raised and
nothing is printed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_AWAITED = {
    "torch.nn.parallel.distributed": ("await_model", "DistributedDataParallel"),
    "torch.distributed.fsdp._fully_shard._fsdp_state": ("await_root", "FSDPState"),
}
"""The modules whose import is awaited, what then awaits a model, and the class that it needs."""
_NEVER_COMPILED = "<frozen importlib>"
"""How the names of files begin that TorchDynamo skips (PyTorch, torch/_dynamo/trace_rules.py, SKIP_DIRS)."""
_CALLBACKS = {"LightningCallback": "lightning_callback", "HuggingFaceCallback": "hugging_face_callback"}
"""What the job can import of ``dpsim_callbacks``, and the file that has it."""


class _Awaiting(MetaPathFinder):
    """Finds no module, but sees the first import of what is awaited, and has it watched once it is executed."""

    def __init__(self, awaited: str) -> None:
        self._awaited = awaited

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._awaited:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_and_watch(module: ModuleType) -> None:
                execute(module)
                with contextlib.suppress(Exception):
                    _watch(module, *_AWAITED[name])

            spec.loader.exec_module = exec_and_watch  # type: ignore[method-assign]
        return spec


class _Callbacks(MetaPathFinder, Loader):
    """Finds the module ``dpsim_callbacks``, which loads a callback when that is imported from it."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == "dpsim_callbacks" else None

    def exec_module(self, module: ModuleType) -> None:
        def callback(name: str) -> Any:
            if name not in _CALLBACKS:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            found = getattr(_load("answer", _CALLBACKS[name]), name)
            found.__module__ = module.__name__  # from where a spawned process imports it
            return vars(module).setdefault(name, found)

        vars(module)["__getattr__"] = callback


def _watch(module: ModuleType, awaits: str, class_name: str) -> None:
    """Let what watches await a model of DDP or of FSDP."""
    watched = sys.modules.get("_dpsim.watched") or _load("around", "rank_record", "waited", "watched")
    getattr(watched, awaits)(getattr(module, class_name))


def _load(*names: str) -> Any:
    """Load files of the probe, as modules of a package that the job cannot import by its files; return the last.

    Their code bears the names of files that ``torch.compile`` never looks into, or it would compile what watches too.
    """
    package = sys.modules.setdefault("_dpsim", ModuleType("_dpsim"))
    package.__path__ = []
    for name in names:
        path = os.path.join(os.path.dirname(_FOLDER), f"{name}.py")
        with open(path, encoding="utf-8") as file:
            code = compile(file.read(), f"{_NEVER_COMPILED} {path}", "exec")
        loaded = ModuleType(f"_dpsim.{name}")
        loaded.__package__ = package.__name__
        sys.modules[loaded.__name__] = loaded
        exec(code, vars(loaded))
    return loaded


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
        sys.meta_path[:0] = map(_Awaiting, _AWAITED)
        sys.meta_path.append(_Callbacks())
    _load_the_jobs_own()
