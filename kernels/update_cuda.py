"""Optimizer updates of flat arrays in the memory of a GPU, with the bits of ``dpsim.kernels.update`` on the CPU.

Every product, quotient, root and sum is rounded by itself, in the same order. Importing this loads numba-cuda; in its
simulator the kernels run on NumPy's arrays.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from numba import cuda

from dpsim.kernels.allreduce.cuda.arguments import address_of
from dpsim.kernels.allreduce.cuda.kernels import (
    SIZE,
    THREADS,
    arguments_on_all,
    blocks_for,
    flags,
    inline,
    kernel_of,
    lanes_of,
    memory,
    on_all,
    registers,
)
from dpsim.kernels.allreduce.cuda.prepare import on_device

_MOST_BLOCKS = 1 << 10
"""Blocks of a launch; each goes over as many elements as it must."""


def sgd(
    w: Any,
    g: Any,
    v: Any,
    scale: float,
    momentum: float,
    decay: float,
    rate: float,
    nesterov: bool,
    stream: Any = 0,
) -> None:
    """See ``dpsim.kernels.update.sgd``. Device arrays; ``stream`` is one of numba's."""
    _launch(_sgd(w.dtype.name, nesterov, decay != 0), (w, g, v), (scale, momentum, decay, -rate), stream)


def adamw(
    w: Any,
    g: Any,
    m: Any,
    v: Any,
    scale: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    decay: float,
    rate: float,
    correction1: float,
    correction2: float,
    stream: Any = 0,
) -> None:
    """See ``dpsim.kernels.update.adamw``. Device arrays; ``stream`` is one of numba's."""
    betas = (beta1, 1 - beta1, beta2, 1 - beta2)
    numbers = (scale, *betas, epsilon, 1 - rate * decay, -rate / correction1, 1 / math.sqrt(correction2))
    _launch(_adamw(w.dtype.name, decay != 0), (w, g, m, v), numbers, stream)


class Lars:
    """``dpsim.kernels.update.lars`` of parts of device arrays, all in one launch.

    Each of ``parts`` is the first element of w and g, where it ends, and the first one of v.
    """

    def __init__(self, w: Any, g: Any, v: Any, parts: Sequence[tuple[int, int, int]], stream: Any) -> None:
        self._table = on_device([number for part in parts for number in part])
        self._arrays, self._dtype, self._stream = (w, g, v), w.dtype, stream
        self._addresses = tuple(map(address_of, self._arrays))
        longest = max((stop - start for start, stop, _ in parts), default=0)
        self._grid = (blocks_for(longest, _MOST_BLOCKS), len(parts))

    def __call__(self, rates: Any, scale: float, momentum: float) -> None:
        """Launch. ``rates``: the rate and the weight decay of each part, on the device, in the arrays' dtype."""
        numbers = map(self._dtype.type, (scale, momentum, -1.0))
        arguments = (address_of(self._table), address_of(rates), self._addresses, tuple(numbers))
        if self._grid[1]:
            lars_parts(self._dtype.name)[self._grid, THREADS, self._stream](*arguments)


@functools.cache
def lars_parts(dtype: str) -> Any:
    """kernel(table, rates, (w, g, v), (scale, momentum, -1)); the grid is (blocks, parts)."""
    size, times, add, word = SIZE[dtype], registers.multiply, registers.add, flags.read_address
    load, store = memory.load(dtype, 1), memory.store(dtype, 1)

    @kernel_of()
    def kernel(table, rates, addresses, numbers):  # type: ignore[no-untyped-def]
        w, g, v = addresses
        scale, momentum, minus_one = numbers
        part = cuda.blockIdx.y
        start, stop = word(table + 24 * part), word(table + 24 * part + 8)
        shift = word(table + 24 * part + 16) - start
        rate, decay = load(rates + 2 * part * size)[0], load(rates + (2 * part + 1) * size)[0]
        at = start + cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        while at < stop:
            before = load(w + at * size)
            step = times(load(g + at * size), scale)
            if decay != 0:
                step = add(step, times(before, decay))
            velocity = add(times(load(v + (at + shift) * size), momentum), times(step, rate))
            store(v + (at + shift) * size, velocity)
            store(w + at * size, add(before, times(velocity, minus_one)))
            at += cuda.gridDim.x * THREADS

    return kernel


def arguments(arrays: Sequence[Any], numbers: Sequence[float]) -> tuple[Any, ...]:
    """Return the arguments of a kernel of this file: the addresses, and the numbers in the arrays' dtype."""
    dtype, length = arrays[0].dtype, int(arrays[0].shape[0])
    addresses = tuple(map(address_of, arrays))
    return arguments_on_all(addresses, length, lanes_of(dtype.name), tuple(map(dtype.type, numbers)))


def _launch(kernel: Any, arrays: Sequence[Any], numbers: Sequence[float], stream: Any) -> None:
    launched = arguments(arrays, numbers)
    kernel[(blocks_for(max(launched[4]), _MOST_BLOCKS), 1), THREADS, stream](*launched)


@functools.cache
def _sgd(dtype: str, nesterov: bool, decayed: bool) -> Any:
    size, times, add = SIZE[dtype], registers.multiply, registers.add

    def work(lanes: int) -> Any:
        load, store = memory.load(dtype, lanes), memory.store(dtype, lanes)

        @inline
        def update(element, args):  # type: ignore[no-untyped-def]
            w, g, v, scale, momentum, decay, minus_rate = args
            at = element * size
            before = load(w + at)
            step = times(load(g + at), scale)
            if decayed:
                step = add(step, times(before, decay))
            velocity = add(times(load(v + at), momentum), step)
            store(v + at, velocity)
            move = add(step, times(velocity, momentum)) if nesterov else velocity
            store(w + at, add(before, times(move, minus_rate)))

        return update

    return on_all(work, lanes_of(dtype))


@functools.cache
def _adamw(dtype: str, decayed: bool) -> Any:
    size, times, add = SIZE[dtype], registers.multiply, registers.add
    divide, root = registers.divide, registers.root

    def work(lanes: int) -> Any:
        load, store = memory.load(dtype, lanes), memory.store(dtype, lanes)

        @inline
        def update(element, args):  # type: ignore[no-untyped-def]
            w, g, m, v, scale, beta1, rest1, beta2, rest2, epsilon, keep, minus_rate, per_root = args
            at = element * size
            step = times(load(g + at), scale)
            first = add(times(load(m + at), beta1), times(step, rest1))
            second = add(times(load(v + at), beta2), times(times(step, step), rest2))
            store(m + at, first)
            store(v + at, second)
            before = times(load(w + at), keep) if decayed else load(w + at)
            minus_distance = divide(times(first, minus_rate), add(times(root(second), per_root), epsilon))
            store(w + at, add(before, minus_distance))

        return update

    return on_all(work, lanes_of(dtype))


class OnStream:
    """The updates as ``dpsim.nn.optimizer.update`` calls them, in one of numba's streams."""

    def __init__(self, stream: Any) -> None:
        self.sgd = functools.partial(sgd, stream=stream)
        self.adamw = functools.partial(adamw, stream=stream)
