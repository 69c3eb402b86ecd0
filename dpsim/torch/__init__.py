"""What a PyTorch script of one's own takes from dpsim. Loads torch, so only what has loaded it imports this room."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpsim.errors import ConfigError
from dpsim.installation import install

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ConfigError(
        "dpsim.torch without PyTorch, which is not installed",
        allowed="PyTorch 2.4 or newer; its CPU build is enough on processors",
        remedy=install("torch"),
    ) from error

from dpsim.torch.hook import allreduce_hook as allreduce_hook

if TYPE_CHECKING:
    from dpsim.torch.loop import ModuleTrainer as ModuleTrainer


def __getattr__(name: str) -> Any:
    """Load what needs MPI when it is first used: to load MPI starts it."""
    if name != "ModuleTrainer":
        raise AttributeError(f"module 'dpsim.torch' has no attribute {name!r}")
    from dpsim.torch.loop import ModuleTrainer

    return ModuleTrainer
