"""Where a NaN or an infinity comes from, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpsim.nn.layer import Layer
from dpsim.replica import Array


def nonfinite_forward(layers: Sequence[Layer], x: Array) -> tuple[str | None, Array]:
    """Forward in training mode up to the first parameter or output that is not finite.

    Returns its description and the last output; None if all are finite.
    """
    for layer in layers:
        for role, value in layer.parameters.items():
            if not is_finite(value):
                return f"parameter {layer.name}.{role} of layer {layer.name!r}", x
        x = layer.forward(x, (0, len(x)), training=True)
        if not is_finite(x):
            return f"the output of layer {layer.name!r}", x
    return None, x


def nonfinite_gradient(layers: Sequence[Layer]) -> str | None:
    """The first bound gradient that is not finite, from the last layer to the first; None if all are finite."""
    for layer in reversed(layers):
        for role, value in layer.gradients.items():
            if not is_finite(value):
                return f"gradient {layer.name}.{role} of layer {layer.name!r}"
    return None


def is_finite(value: Array) -> bool:
    return bool(np.isfinite(value).all())
