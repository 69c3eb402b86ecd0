"""A pass that leaves no trace, so that all kernels a network needs are compiled before its first step is timed."""

from __future__ import annotations

import numpy as np

from dpsim.nn.network import Network
from dpsim.replica import Batch


class _Silence:
    """Step events that nobody wants to know of."""

    def forward_done(self, layer: int) -> None: ...

    def loss_done(self) -> None: ...

    def gradients_ready(self, layer: int) -> None: ...

    def backward_done(self, layer: int) -> None: ...


def warm_up(network: Network) -> None:
    """Forward and backward of one sample of zeros; only the bound gradients are overwritten."""
    kept = {name: array.copy() for name, array in network.state().items()}
    x, labels = np.zeros((1, *network.input_shape), network.dtype), np.zeros(1, np.int64)
    leaves = (0, *[1] * network.least_leaves)
    with network.without_other_ranks():
        network.forward_backward(Batch(x=x, labels=labels, leaves=leaves), _Silence())
    for name, array in network.state().items():
        array[...] = kept[name]
