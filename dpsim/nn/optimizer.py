"""The update on flat arrays, of optimizers that treat every element alike (``dpsim.nn.lars`` does not)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from dpsim.kernels import update as on_host
from dpsim.optimizer import AdamW, Sgd
from dpsim.replica import Array


class UpdateKernels(Protocol):
    """The functions of ``dpsim.kernels.update``, for arrays that lie there or elsewhere."""

    @property
    def sgd(self) -> Any: ...

    @property
    def adamw(self) -> Any: ...


def update(
    parameters: Array,
    gradients: Array,
    state: Mapping[str, Array],
    optimizer: Sgd | AdamW,
    learning_rate: float,
    scale: float,
    step: int,
    kernels: UpdateKernels = on_host,
) -> None:
    """One step of ``optimizer`` (whose formula its docstring has) with g = scale * ``gradients``, in place.

    All arrays are flat, of one dtype and length, which they keep; ``state`` has one for each of the optimizer's
    ``slots``, zero before the first step. ``gradients`` are sums over samples and ``scale`` = 1/B. ``learning_rate``
    is that of this step, in place of the optimizer's own; ``step`` counts from 1. Each element's result depends on
    nothing but that element.
    """
    w, g, rate, scale = parameters, gradients, float(learning_rate), float(scale)
    if isinstance(optimizer, Sgd):
        momentum, decay = optimizer.momentum, optimizer.weight_decay
        kernels.sgd(w, g, state["velocity"], scale, momentum, decay, rate, optimizer.nesterov)
        return
    beta1, beta2 = optimizer.beta1, optimizer.beta2
    kernels.adamw(
        w,
        g,
        state["first_moment"],
        state["second_moment"],
        scale,
        beta1,
        beta2,
        optimizer.epsilon,
        optimizer.weight_decay,
        rate,
        1 - beta1**step,
        1 - beta2**step,
    )
