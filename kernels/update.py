"""Optimizer updates on flat arrays, in one pass: each array is read once, the parameters and the state written once.

Every product and sum is rounded by itself, so an element's result does not depend on where it lies.
"""

from __future__ import annotations

import math
from typing import Any

from numpy.typing import NDArray

from dpsim.kernels.cache import compiled
from dpsim.kernels.vector import Element, Kernel

Array = NDArray[Any]


def sgd(w: Array, g: Array, v: Array, scale: float, momentum: float, decay: float, rate: float, nesterov: bool) -> None:
    """d = scale g + decay w; v = momentum v + d; w -= rate v, or rate (d + momentum v) with Nesterov's momentum.

    PyTorch's form, without dampening. Reads w, g and v, writes w and v.
    """
    _sgd(w.dtype.name, nesterov, decay != 0)(w, g, v, len(w), scale, momentum, decay, rate)


def adamw(
    w: Array,
    g: Array,
    m: Array,
    v: Array,
    scale: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    decay: float,
    rate: float,
    correction1: float,
    correction2: float,
) -> None:
    """Do Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101), in PyTorch's form.

    d = scale g; m = beta1 m + (1 - beta1) d; v = beta2 v + (1 - beta2) d d;
    w = (1 - rate decay) w - rate / correction1 * m / (sqrt(v) / sqrt(correction2) + epsilon), where
    correction = 1 - beta**steps. Reads w, g, m and v, writes w, m and v.
    """
    numbers = (scale, beta1, 1 - beta1, beta2, 1 - beta2, epsilon, 1 - rate * decay, rate / correction1)
    _adamw(w.dtype.name, decay != 0)(w, g, m, v, len(w), *numbers, 1 / math.sqrt(correction2))


def lars(w: Array, g: Array, v: Array, scale: float, momentum: float, decay: float, rate: float) -> None:
    """v = momentum v + rate (scale g + decay w); w -= v (You, Gitman and Ginsburg, arXiv:1708.03888).

    ``rate`` contains the trust of the tensor that the elements belong to. Reads w, g and v, writes w and v.
    """
    _lars(w.dtype.name, decay != 0)(w, g, v, len(w), scale, momentum, decay, rate)


@compiled
def _sgd(dtype: str, nesterov: bool, decayed: bool) -> Kernel:
    kernel = Kernel(dtype, ("w", "g", "v"), ("size",), ("scale", "momentum", "decay", "rate"))

    def body(e: Element) -> None:
        w, step = e["w"], e["g"] * e.number("scale")
        if decayed:
            step = step + w * e.number("decay")
        v = e["v"] * e.number("momentum") + step
        e["v"] = v
        e["w"] = w - (step + v * e.number("momentum") if nesterov else v) * e.number("rate")

    kernel.elementwise(kernel["size"], body)
    return kernel


@compiled
def _lars(dtype: str, decayed: bool) -> Kernel:
    kernel = Kernel(dtype, ("w", "g", "v"), ("size",), ("scale", "momentum", "decay", "rate"))

    def body(e: Element) -> None:
        w, step = e["w"], e["g"] * e.number("scale")
        if decayed:
            step = step + w * e.number("decay")
        v = e["v"] * e.number("momentum") + step * e.number("rate")
        e["v"] = v
        e["w"] = w - v

    kernel.elementwise(kernel["size"], body)
    return kernel


@compiled
def _adamw(dtype: str, decayed: bool) -> Kernel:
    numbers = ("scale", "beta1", "rest1", "beta2", "rest2", "epsilon", "keep", "rate", "per_root2")
    kernel = Kernel(dtype, ("w", "g", "m", "v"), ("size",), numbers)

    def body(e: Element) -> None:
        step, w = e["g"] * e.number("scale"), e["w"]
        m = e["m"] * e.number("beta1") + step * e.number("rest1")
        v = e["v"] * e.number("beta2") + step * step * e.number("rest2")
        e["m"], e["v"] = m, v
        distance = m * e.number("rate") / (v.sqrt() * e.number("per_root2") + e.number("epsilon"))
        e["w"] = (w * e.number("keep") if decayed else w) - distance

    kernel.elementwise(kernel["size"], body)
    return kernel
