"""The optimizers' updates on flat arrays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from dpsim.optimizer import Optimizer, Sgd
from dpsim.replica import Array

_CHUNK = 16_384  # elements: the arrays' chunks stay in the L2 cache between the passes


def update(
    parameters: Array,
    gradients: Array,
    state: Mapping[str, Array],
    optimizer: Optimizer,
    learning_rate: float,
    scale: float,
    step: int,
) -> None:
    """One step of ``optimizer`` (whose formula its docstring has) with g = scale * ``gradients``, in place.

    All arrays are flat, of one dtype and length, which they keep; ``state`` has one for each of the optimizer's
    ``slots``, zero before the first step. ``gradients`` are sums over samples and ``scale`` = 1/B. ``learning_rate``
    is that of this step, in place of the optimizer's own; ``step`` counts from 1. Each element's result depends on
    nothing but that element.
    """
    # Plain floats take the arrays' dtype; a NumPy float64 would widen everything (NEP 50).
    rate, scale = float(learning_rate), float(scale)
    if isinstance(optimizer, Sgd):
        momentum, decay, nesterov = optimizer.momentum, optimizer.weight_decay, optimizer.nesterov
        _sgd(parameters, gradients, state["velocity"], scale, momentum, decay, rate, nesterov)
        return
    first, second = state["first_moment"], state["second_moment"]
    beta1, beta2 = optimizer.beta1, optimizer.beta2
    corrections = 1 - beta1**step, 1 - beta2**step
    epsilon, decay = optimizer.epsilon, optimizer.weight_decay
    _adamw(parameters, gradients, first, second, scale, beta1, beta2, epsilon, decay, rate, *corrections)


def _sgd(
    w: Array, g: Array, v: Array, scale: float, momentum: float, decay: float, rate: float, nesterov: bool
) -> None:
    for w_c, g_c, v_c, a, b in _chunks(w, g, v):
        np.multiply(g_c, scale, out=a)
        if decay:
            np.multiply(w_c, decay, out=b)
            np.add(a, b, out=a)
        np.multiply(v_c, momentum, out=v_c)
        np.add(v_c, a, out=v_c)
        if nesterov:
            np.multiply(v_c, momentum, out=b)
            np.add(a, b, out=a)
            np.multiply(a, rate, out=a)
        else:
            np.multiply(v_c, rate, out=a)
        np.subtract(w_c, a, out=w_c)


def _adamw(
    w: Array, g: Array, m: Array, v: Array, scale: float, beta1: float, beta2: float, epsilon: float, decay: float,
    rate: float, correction1: float, correction2: float,
) -> None:  # fmt: skip
    for w_c, g_c, m_c, v_c, a, b in _chunks(w, g, m, v):
        np.multiply(g_c, scale, out=a)
        np.multiply(m_c, beta1, out=m_c)
        np.multiply(a, 1 - beta1, out=b)
        np.add(m_c, b, out=m_c)
        np.multiply(a, a, out=a)
        np.multiply(a, 1 - beta2, out=a)
        np.multiply(v_c, beta2, out=v_c)
        np.add(v_c, a, out=v_c)
        np.sqrt(v_c, out=a)
        np.multiply(a, 1 / math.sqrt(correction2), out=a)
        np.add(a, epsilon, out=a)
        np.multiply(m_c, rate / correction1, out=b)
        np.divide(b, a, out=b)
        if decay:
            np.multiply(w_c, 1 - rate * decay, out=w_c)
        np.subtract(w_c, b, out=w_c)


def _chunks(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """The arrays, chunk after chunk, and two chunks to work in."""
    size = len(arrays[0])
    scratch = np.empty((2, min(_CHUNK, size)), arrays[0].dtype)
    for start in range(0, size, _CHUNK):
        some = slice(start, start + _CHUNK)
        yield (*(array[some] for array in arrays), *scratch[:, : min(_CHUNK, size - start)])
