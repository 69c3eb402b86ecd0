"""The optimizer's update on flat arrays."""

from __future__ import annotations

import numpy as np

from dpsim.plan import Sgd
from dpsim.replica import Array

_CHUNK = 16_384  # elements: four arrays of them stay in the L2 cache between the passes


def sgd_update(parameters: Array, gradients: Array, velocity: Array, sgd: Sgd, scale: float) -> None:
    """v = momentum v + (scale g + weight_decay w); w -= learning_rate v, in place (PyTorch's form, no dampening).

    Flat arrays of one dtype and length, which they keep; ``gradients`` are sums over samples and ``scale`` = 1/B.
    """
    step = np.empty(min(_CHUNK, len(parameters)), parameters.dtype)
    # Plain floats take the arrays' dtype; a NumPy float64 would widen everything (NEP 50).
    momentum, decay, rate, scale = sgd.momentum, sgd.weight_decay, sgd.learning_rate, float(scale)
    for start in range(0, len(parameters), _CHUNK):
        some = slice(start, start + _CHUNK)
        w, v = parameters[some], velocity[some]
        part = step[: len(w)]
        np.multiply(v, momentum, out=v)
        np.multiply(gradients[some], scale, out=part)
        np.add(v, part, out=v)
        if decay:
            np.multiply(w, decay, out=part)
            np.add(v, part, out=v)
        np.multiply(v, rate, out=part)
        np.subtract(w, part, out=w)
