"""``WorkloadReplica``: the tensors of a workload, without anything that could compute them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from dpsim.errors import ConfigError
from dpsim.replica import Array, Batch, BatchSums, LayerSpec, StepEvents
from dpsim.workload import Workload

_PARAMETER = 1e-3


class WorkloadReplica:
    """Has the layers of ``workload``; for an ``EmulatedReplica``, which waits for as long as they compute.

    Raises ``ConfigError`` for tensors that are not of float32.
    """

    def __init__(self, workload: Workload) -> None:
        check_tensors(workload)
        self.layers = tuple(
            LayerSpec(
                name=layer.name,
                kind=layer.kind,
                tensors=layer.tensors,
                activation_bytes_per_sample=layer.activation_bytes_per_sample,
                batch_norm_channels=layer.batch_norm_channels,
            )
            for layer in workload.layers
        )

    def initial_parameters(self, seed: int) -> dict[str, Array]:
        """Parameters that are all the same: nothing is learnt from them."""
        tensors = [tensor for layer in self.layers for tensor in layer.tensors]
        return {tensor.name: np.full(tensor.shape, _PARAMETER, np.float32) for tensor in tensors}

    def bind(self, parameters: Mapping[str, Array], gradients: Mapping[str, Array]) -> None:
        """Nothing reads them."""

    def state(self) -> dict[str, Array]:
        return {}

    def forward_backward(self, batch: Batch, events: StepEvents) -> BatchSums:
        raise NotImplementedError("a workload says how long its layers compute, not what")

    def evaluate(self, x: Array, labels: NDArray[np.int64]) -> BatchSums:
        raise NotImplementedError("a workload says how long its layers compute, not what")


def check_tensors(workload: Workload) -> None:
    """Raises ``ConfigError`` unless all gradients are of float32, in which dpsim's runtime trains."""
    others = sorted({tensor.dtype for layer in workload.layers for tensor in layer.tensors} - {"float32"})
    if others:
        raise ConfigError(
            f"dpsim's own runtime with gradients of {', '.join(others)}",
            allowed="float32",
            remedy="measure this script with --runtime torch-ddp alone",
        )
