"""What a network does between products and convolutions, in passes over memory: a kernel and NumPy, in turns.

Shapes are those of ResNet-20, local batch 64, float32. Each kernel is checked against NumPy before it is timed. Times
are the core time of one thread, which other processes disturb least.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from dpsim.kernels import update
from dpsim.nn.array_ops import NumpyOps
from dpsim.nn.cpu_ops import CpuOps
from dpsim.replica import Array

CPU, NUMPY = CpuOps(), NumpyOps()
BATCH = 64
REPEATS = 15
ACTIVATIONS = ((32, 16), (16, 32), (8, 64))
PARAMETERS = 272_474


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operation on some arrays, by a kernel and by NumPy, which must leave the same in ``outputs``.

    ``amount`` counts floating-point operations (GFLOP/s) or, of operations bound by memory, bytes (GB/s).
    """

    name: str
    shape: str
    amount: float
    unit: str
    outputs: tuple[Array, ...]
    kernel: Callable[[], object]
    numpy: Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Medians of one case, in core time; ``rate`` is in ``unit`` a second."""

    operation: str
    shape: str
    time_s: float
    numpy_s: float
    rate: float
    unit: str


def normal(seed: int, *shape: int) -> Array:
    """Random numbers in memory as layers have it."""
    array = CPU.zeros(shape, np.float32)
    array[...] = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return array


def case(operation: str, shape: str, amount: float, unit: str, outputs: tuple[Array, ...], *arguments: object) -> Case:
    """An operation of ``Ops``."""
    kernel, numpy = (partial(getattr(ops, operation), *arguments) for ops in (CPU, NUMPY))
    return Case(name=operation, shape=shape, amount=amount, unit=unit, outputs=outputs, kernel=kernel, numpy=numpy)


def activations() -> Iterator[Case]:
    """What is done to each activation between two convolutions, in passes over memory."""
    for side, channels in ACTIVATIONS:
        x, grad = normal(0, BATCH, side, side, channels), normal(1, BATCH, side, side, channels)
        y, mask = CPU.zeros(x.shape, np.float32), CPU.zeros(x.shape, bool)
        mean, scale, shift, dot, total = normal(2, 5, channels)
        slope, half = scale * np.float32(1e-3), np.full_like(scale, 0.5)  # what is applied again should not grow
        shape, size = f"{side}x{side}x{channels}", x.nbytes
        yield case("channel_moments", shape, size, "GB", (dot, total), x, dot, total)
        yield case("channel_normalise", shape, 2 * size, "GB", (y,), x, mean, scale, shift, y)
        yield case("channel_normalise_sums", shape, 2 * size, "GB", (dot, total), grad, x, mean, dot, total)
        yield case("channel_normalise_backward", shape, 3 * size, "GB", (grad,), grad, x, mean, half, slope, slope)
        yield case("relu", shape, 2.25 * size, "GB", (y,), x, y, mask)
        yield case("keep_where", shape, 2.25 * size, "GB", (grad,), grad, mask)


def updates() -> Iterator[Case]:
    """The optimizer's update of all parameters."""
    w, g, v = normal(0, 3, PARAMETERS)
    numbers = (1 / BATCH, 0.9, 1e-4, 0.1)

    def numpy() -> None:
        scale, momentum, decay, rate = map(np.float32, numbers)
        np.copyto(v, v * momentum + (g * scale + w * decay))
        np.subtract(w, v * rate, out=w)

    yield Case(
        name="sgd",
        shape=str(PARAMETERS),
        amount=5 * w.nbytes,
        unit="GB",
        outputs=(w, v),
        numpy=numpy,
        kernel=partial(update.sgd, w, g, v, *numbers, nesterov=False),
    )


def measure(case: Case) -> Row:
    """Times of kernel and NumPy in turns. Raises ``AssertionError`` where they do not compute the same."""
    before = [output.copy() for output in case.outputs]
    results = []
    for run in (case.kernel, case.numpy):
        for output, value in zip(case.outputs, before, strict=True):
            output[...] = value
        run()
        results.append([output.copy() for output in case.outputs])
    for result, expected in zip(*results, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-4 * float(np.abs(expected).max()))
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(REPEATS):
        for run, samples in zip((case.kernel, case.numpy), times, strict=True):
            begin = time.thread_time()
            run()
            samples.append(time.thread_time() - begin)
    time_s, numpy_s = map(statistics.median, times)
    rate = case.amount / time_s / 1e9
    return Row(operation=case.name, shape=case.shape, time_s=time_s, numpy_s=numpy_s, rate=rate, unit=case.unit)
