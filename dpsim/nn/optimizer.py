"""The optimizer's update on flat arrays."""

from __future__ import annotations

from dpsim.kernels import update
from dpsim.plan import Sgd
from dpsim.replica import Array


def sgd_update(parameters: Array, gradients: Array, velocity: Array, sgd: Sgd, scale: float) -> None:
    """v = momentum v + (scale g + weight_decay w); w -= learning_rate v, in place (PyTorch's form, no dampening).

    Flat arrays of one dtype and length, which they keep; ``gradients`` are sums over samples and ``scale`` = 1/B.
    """
    update.sgd(
        parameters, gradients, velocity, float(scale), sgd.momentum, sgd.weight_decay, sgd.learning_rate, nesterov=False
    )
