"""PyTorch: what a script of one's own takes from dpsim, modules as replicas, and scripts that run as they are.

The room itself loads nothing: ``dpsim.torch.allreduce_hook`` and ``dpsim.torch.ModuleTrainer`` load torch, and the
second one MPI as well, when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dpsim.installation import check_torch

if TYPE_CHECKING:
    from dpsim.torch.hook import allreduce_hook as allreduce_hook
    from dpsim.torch.loop import ModuleTrainer as ModuleTrainer

_HOMES = {"allreduce_hook": "dpsim.torch.hook", "ModuleTrainer": "dpsim.torch.loop"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dpsim.torch' has no attribute {name!r}")
    check_torch("dpsim.torch")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value
