"""Where a NaN or an infinity came from, asked after a loss turned out not to be finite."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpsim.nn.losses import softmax_cross_entropy
from dpsim.nn.network import Network
from dpsim.replica import Array


def first_nonfinite_layer(network: Network, x: Array, labels: NDArray[np.int64]) -> str | None:
    """The first place on the way of a batch where a value is not finite, or None; for the text of ``NotFiniteError``.

    Looked at in this order: the input; for each layer its parameters and its output in training mode; the loss; then
    the bound gradients, from the last layer to the first. Parameters, gradients and running statistics are kept. Random
    layers draw what they drew for the last batch that was trained on.
    """
    if not _finite(x):
        return "the input batch"
    kept = {name: array.copy() for name, array in network.state().items()}
    try:
        with network.without_other_ranks():
            place = _forward(network, x, labels) if len(x) else None
    finally:
        for name, array in network.state().items():
            array[...] = kept[name]
    return place or _gradients(network)


def _forward(network: Network, x: Array, labels: NDArray[np.int64]) -> str | None:
    leaves = (0, len(x))
    with network.ops.tolerate_overflow():
        for layer in network.chain:
            for role, value in layer.parameters.items():
                if not _finite(value):
                    return f"parameter {layer.name}.{role} of layer {layer.name!r}"
            x = layer.forward(x, leaves, training=True)
            if not _finite(x):
                return f"the output of layer {layer.name!r}"
        sums, _ = softmax_cross_entropy(network.ops, network.buffers, x, labels, leaves, network.label_smoothing)
    return None if np.isfinite(sums.loss) else "the loss"


def _gradients(network: Network) -> str | None:
    for layer in reversed(network.chain):
        for role, value in layer.gradients.items():
            if not _finite(value):
                return f"gradient {layer.name}.{role} of layer {layer.name!r}"
    return None


def _finite(value: Array) -> bool:
    return bool(np.isfinite(value).all())
