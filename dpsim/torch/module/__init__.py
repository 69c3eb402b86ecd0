"""A PyTorch module as a ``Replica`` of the runtime. Loads torch, so nothing else of dpsim imports this room."""

from __future__ import annotations

from dpsim.installation import check_torch

check_torch("dpsim.torch.module")

from dpsim.torch.module.replica import TorchReplica as TorchReplica  # noqa: E402
