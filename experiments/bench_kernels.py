"""``python -m dpsim.experiments.bench_kernels`` times kernels that have one implementation besides NumPy's, beside it.

It decides whether such a kernel is worth having; run it again after a change of one. Both take turns in one thread, and
a time is that thread's core time, which other processes disturb least. The shapes are those of ResNet-20, local batch
64, float32. ``dpsim doctor --tune`` times what has several implementations; tests compare all of them with NumPy.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from dpsim.experiments import command
from dpsim.kernels import update
from dpsim.nn.cpu_ops import CpuOps
from dpsim.nn.numpy_ops import NumpyOps
from dpsim.replica import Array
from dpsim.study.loop import StopRule, in_turns

CPU, NUMPY = CpuOps(), NumpyOps()
BATCH, PARAMETERS = 64, 272_474
ACTIVATIONS = ((32, 16), (16, 32), (8, 64))
"""Sides and channels of the pictures between the layers of ResNet-20."""
Run = Callable[[], object]


def array(seed: int, *shape: int) -> Array:
    """Return random numbers in memory as layers have it."""
    filled = CPU.zeros(shape, np.float32)
    filled[...] = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return filled


def passes() -> Iterator[tuple[str, float, Run, Run]]:
    """Yield a name, the bytes that are moved, the kernel and NumPy: between two convolutions, and the update."""
    for side, channels in ACTIVATIONS:
        x, grad = array(0, BATCH, side, side, channels), array(1, BATCH, side, side, channels)
        y, mask = CPU.zeros(x.shape, np.float32), CPU.zeros(x.shape, bool)
        mean, scale, shift, dot, total = array(2, 5, channels)
        slope, half = scale * np.float32(1e-3), np.full_like(scale, 0.5)  # what is applied again should not grow
        operations: dict[str, tuple[float, tuple[Array, ...]]] = {
            "channel_moments": (1, (x, dot, total)),
            "channel_normalise": (2, (x, mean, scale, shift, y)),
            "channel_normalise_sums": (2, (grad, x, mean, dot, total)),
            "channel_normalise_backward": (3, (grad, x, mean, half, slope, slope)),
            "relu": (2.25, (x, y, mask)),
            "keep_where": (2.25, (grad, mask)),
        }
        for name, (times, arguments) in operations.items():
            kernel, numpy = (partial(getattr(ops, name), *arguments) for ops in (CPU, NUMPY))
            yield f"{name} {side}x{side}x{channels}", times * x.nbytes, kernel, numpy
    w, g, v = array(0, 3, PARAMETERS)

    def sgd() -> None:
        np.copyto(v, v * np.float32(0.9) + (g * np.float32(1 / BATCH) + w * np.float32(1e-4)))
        np.subtract(w, v * np.float32(0.1), out=w)

    yield "sgd", 5 * w.nbytes, partial(update.sgd, w, g, v, 1 / BATCH, 0.9, 1e-4, 0.1, nesterov=False), sgd


def core_s(run: Run) -> float:
    """Return the core time that a run takes."""
    begin_s = time.thread_time()
    run()
    return time.thread_time() - begin_s


if __name__ == "__main__":
    command.parser("bench_kernels", __doc__).parse_args()
    for name, size_bytes, *runs in passes():
        taken_s = in_turns({run: partial(core_s, run) for run in runs}, StopRule(least_rounds=15, most_rounds=15))
        time_s, numpy_s = (statistics.median(taken_s[run]) for run in runs)
        rate = f"{size_bytes / time_s / 1e9:7.1f} GB/s"
        print(f"{name:38} {time_s * 1e3:8.3f} ms {rate}   numpy {numpy_s * 1e3:8.3f} ms", flush=True)
