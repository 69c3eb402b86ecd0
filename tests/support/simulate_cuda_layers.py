"""Runs the CUDA kernels of layers beside their reference; in numba's simulator it prints what differs, as JSON.

``NUMBA_ENABLE_CUDASIM=1 python simulate_cuda_layers.py``
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from layer_reference import ReferenceKernels
from quick_simulator import short_turns

from dpsim.comm.cuda.memory import DeviceMemory

CONVOLUTIONS = (
    # samples, height, width, inputs, outputs, kernel, stride
    (2, 3, 4, 1, 2, 3, 1),
    (3, 5, 3, 3, 4, 3, 2),
    (1, 2, 3, 8, 4, 3, 1),
    (2, 3, 3, 4, 16, 3, 2),
    (1, 2, 3, 4, 20, 1, 1),
    (2, 1, 1, 2, 3, 1, 2),
    (1, 3, 2, 2, 1, 5, 1),
    (5, 3, 3, 4, 4, 3, 3),
    (0, 3, 4, 2, 4, 3, 1),  # the weight gradient is 0
)
NORMS = ((7, 1, 1), (9, 3, 1), (20, 4, 1), (34, 4, 2), (6, 20, 3), (1, 8, 1))
"""Rows, channels and groups."""


class Arrays:
    """Random arrays of the host, and the same in a memory; ``shift``: numbers after a multiple of 16 bytes."""

    def __init__(self, memory: Any, seed: tuple[int, ...], shift: int = 0) -> None:
        self.memory, self.random, self.shift = memory, np.random.default_rng(seed), shift
        self.pairs: list[tuple[Any, Any]] = []

    def __call__(self, *shape: int) -> tuple[Any, Any]:
        values = self.random.standard_normal(shape) * 10.0 ** self.random.integers(-6, 6, shape)
        host = np.where(self.random.random(shape) < 0.1, 0, values).astype(np.float32)
        whole = self.memory.zeros(4 * (host.size + self.shift)).view(np.float32)
        self.memory.write(whole[self.shift :], host.reshape(-1))
        self.pairs.append((host, whole[self.shift :].reshape(shape)))
        return self.pairs[-1]

    def differ(self) -> list[int]:
        """The numbers of the arrays that have other bits."""
        on_device = self.memory.fetch([device for _, device in self.pairs])
        hosts = [host for host, _ in self.pairs]
        return [n for n, (a, b) in enumerate(zip(hosts, on_device, strict=True)) if a.tobytes() != b.tobytes()]


def both(memory: Any) -> tuple[Any, Any]:
    return ReferenceKernels(), memory.layer_kernels()


def wrong_convolution(case: tuple[int, ...], shift: int, memory: Any) -> str | None:
    """What differs, if anything; ``shift`` is that of the weights, which lie anywhere."""
    samples, height, width, inputs, outputs, size, stride = case
    arrays, weights = Arrays(memory, case), Arrays(memory, (1, *case), shift)
    x, dx = arrays(samples, height, width, inputs), arrays(samples, height, width, inputs)
    y = arrays(samples, -(-height // stride), -(-width // stride), outputs)
    weight, flipped = weights(size, size, inputs, outputs), weights(size, size, outputs, inputs)
    grad, dw = arrays(*y[0].shape), weights(size, size, inputs, outputs)
    for place, kernels in enumerate(both(memory)):
        kernels.conv2d(x[place], weight[place], stride, y[place])
        kernels.conv2d_input_gradient(grad[place], flipped[place], stride, dx[place])
        kernels.conv2d_weight_gradient(x[place], grad[place], stride, dw[place])
    differ = (*arrays.differ(), *weights.differ())
    return f"arrays {differ} of convolution {case}, {shift}" if differ else None


def wrong_norm(case: tuple[int, int, int], rectified: bool, shift: int, memory: Any) -> str | None:
    """What differs, if anything; ``shift`` is that of the parameters, which lie anywhere."""
    rows, channels, groups = case
    arrays, parameters = Arrays(memory, case), Arrays(memory, (1, *case), shift)
    x, y, grad = (arrays(rows, channels) for _ in range(3))
    means, dots, totals, scales, slopes, shifts = (arrays(groups, channels) for _ in range(6))
    gamma, beta, d_gamma, d_beta, average, variance = (parameters(channels) for _ in range(6))
    local = [arrays(1, channels) for _ in range(5)]
    for place, kernels in enumerate(both(memory)):
        mean, inverse, scale, slope, offset = (each[place] for each in local)
        rectifier = (scales[place], beta[place]) if rectified else None
        kernels.moments(x[place], means[place], dots[place])
        kernels.normalise(x[place], means[place], scales[place], beta[place], y[place], rectified)
        kernels.sums(grad[place], x[place], means[place], dots[place], totals[place], rectifier)
        last = beta[place] if rectified else None
        kernels.normalise_backward(
            grad[place], x[place], means[place], scales[place], slopes[place], shifts[place], last
        )
        running = (average[place], variance[place])
        kernels.local_moments(x[place], gamma[place], running, 0.1, 1e-5, (mean, inverse, scale))
        results = (d_gamma[place], d_beta[place], slope, offset)
        rectifier = (scale, beta[place]) if rectified else None
        kernels.local_gradients(grad[place], x[place], (mean, inverse, scale), rectifier, results)
    differ = (*arrays.differ(), *parameters.differ())
    return f"arrays {differ} of norm {case}, {rectified}, {shift}" if differ else None


def wrong_sum(size: int, shift: int, memory: Any) -> str | None:
    """What differs, if anything, in the rectifier of a sum and its gradients."""
    arrays = Arrays(memory, (size,), shift)
    a, b, out, grad, copy = (arrays(size) for _ in range(5))
    for place, kernels in enumerate(both(memory)):
        kernels.rectified_sum(a[place], b[place], out[place])
        kernels.both_gradients(grad[place], out[place], copy[place])
    return f"arrays {arrays.differ()} of {size} elements from {shift}" if arrays.differ() else None


def wrong_tree_sum(count: int, size: int, shift: int, memory: Any) -> str | None:
    """What differs, if anything, in the sum of ``count`` arrays."""
    arrays = Arrays(memory, (count, size), shift)
    *parts, out = (arrays(size) for _ in range(count + 1))
    for place, kernels in enumerate(both(memory)):
        kernels.tree_sum([part[place] for part in parts], out[place])
    return f"arrays {arrays.differ()} of {count} times {size} elements from {shift}" if arrays.differ() else None


def checks(memory: Any) -> Iterator[Callable[[], str | None]]:
    """Every case, to be called."""
    for case, shift in itertools.product(CONVOLUTIONS, (0, 1)):
        yield lambda case=case, shift=shift: wrong_convolution(case, shift, memory)
    for norm, rectified, shift in itertools.product(NORMS, (False, True), (0, 1)):
        yield lambda norm=norm, rectified=rectified, shift=shift: wrong_norm(norm, rectified, shift, memory)
    for size, shift in itertools.product((1, 8, 35), (0, 1)):
        yield lambda size=size, shift=shift: wrong_sum(size, shift, memory)
    for count, size, shift in itertools.product((2, 3, 5, 8), (8, 35), (0, 1)):
        yield lambda count=count, size=size, shift=shift: wrong_tree_sum(count, size, shift, memory)


if __name__ == "__main__":
    from dpsim.comm.cuda.simulator import SimulatedDevice

    with short_turns():
        every = list(checks(DeviceMemory(SimulatedDevice())))
        wrong = [text for check in every if (text := check()) is not None]
    print(json.dumps({"cases": len(every), "wrong": wrong}))
