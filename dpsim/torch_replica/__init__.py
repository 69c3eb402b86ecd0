"""A PyTorch module as a ``Replica`` of the runtime. Loads torch, so nothing else of dpsim imports this room."""

from __future__ import annotations

from dpsim.errors import ConfigError
from dpsim.installation import install

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ConfigError(
        "dpsim.torch_replica without PyTorch, which is not installed",
        allowed="PyTorch 2.4 or newer; its CPU build is enough on processors",
        remedy=install("torch"),
    ) from error

from dpsim.torch_replica.replica import TorchReplica as TorchReplica
