"""What the CUDA kernels of layers compute, to the bit, with NumPy: each operation and sum in the kernels' order.

Kept apart from them: nothing here knows of addresses, threads or tuples, only of the order of addition.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpsim.kernels import batch_norm_cuda, column_sums_cuda
from dpsim.kernels.allreduce.cuda.simulated import fused
from dpsim.kernels.allreduce.tree import fold, leaf_tree
from dpsim.kernels.conv_cuda import lanes_of, parts_of
from dpsim.memory import HostMemory

Array = Any


def padded(x: Array, border: int) -> Array:
    return np.pad(x, ((0, 0), (border, border), (border, border), (0, 0)))


def windows(x: Array, size: int, stride: int, rows: int, columns: int) -> Any:
    """(i, j, the pixels that weight i, j is multiplied with)."""
    whole = np.pad(padded(x, size // 2), ((0, 0), (0, stride), (0, stride), (0, 0)))
    for i, j in itertools.product(range(size), range(size)):
        yield i, j, whole[:, i : i + stride * rows : stride, j : j + stride * columns : stride]


def columns_added(x_RC: Array) -> Array:
    """The sum of the rows in the order of ``column_sums_cuda``."""
    shares = [np.zeros(x_RC.shape[1], x_RC.dtype) for _ in range(column_sums_cuda.SHARES)]
    for row, values in enumerate(x_RC):
        shares[row % len(shares)] += values
    return functools.reduce(np.add, shares)


def group_sums(x_RC: Array) -> Array:
    """The sum of the rows in float64 in the order of ``batch_norm_cuda``."""
    rows, channels = x_RC.shape
    vectors = channels // lanes_of(channels, True)
    at_once, blocks = batch_norm_cuda.rows_at_once(vectors), batch_norm_cuda.blocks_of(rows, vectors)
    threads = np.zeros((blocks * at_once, channels))
    for first in range(0, rows, blocks * at_once):
        some = x_RC[first : first + blocks * at_once]
        threads[: len(some)] += some
    of_blocks = list(threads.reshape(blocks, at_once, channels).transpose(1, 0, 2))
    while len(of_blocks) > 1:
        half = (len(of_blocks) + 1) // 2
        of_blocks = [
            of_blocks[i] + of_blocks[half + i] if half + i < len(of_blocks) else of_blocks[i] for i in range(half)
        ]
    return columns_added(of_blocks[0])


class ReferenceKernels:
    """``dpsim.memory.LayerKernels`` over NumPy."""

    size_bytes = 0

    def conv2d(self, x: Array, weight: Array, stride: int, out: Array) -> None:
        total = np.zeros(out.shape, np.float32)
        for i, j, pixels in windows(x, len(weight), stride, *out.shape[1:3]):
            for c in range(x.shape[3]):
                total = fused(pixels[..., c : c + 1], weight[i, j, c], total)
        out[...] = total

    def conv2d_input_gradient(self, grad: Array, flipped: Array, stride: int, out: Array) -> None:
        full = np.zeros((*out.shape[:3], grad.shape[3]), np.float32)
        full[:, ::stride, ::stride] = grad
        self.conv2d(full, flipped, 1, out)

    def conv2d_weight_gradient(self, x: Array, grad: Array, stride: int, out: Array) -> None:
        size = len(out)
        samples, rows, columns, _ = grad.shape
        parts = parts_of(samples, out.size)
        totals = np.zeros((parts, *out.shape), np.float32)
        inside = np.ones((1, *x.shape[1:3], 1), np.float32)
        taps = [(i, j, pixels) for i, j, pixels in windows(x, size, stride, rows, columns)]
        exist = [pixels[0, :, :, 0] for _, _, pixels in windows(inside, size, stride, rows, columns)]
        for part, (i, j, pixels), exists in (
            (part, tap, exists) for part in range(parts) for tap, exists in zip(taps, exist, strict=True)
        ):
            for sample in range(samples * part // parts, samples * (part + 1) // parts):
                for row, column in itertools.product(range(rows), range(columns)):
                    if exists[row, column]:
                        left, right = pixels[sample, row, column, :, None], grad[sample, row, column]
                        totals[part, i, j] = fused(left, right, totals[part, i, j])
        out[...] = columns_added(totals.reshape(parts, -1)).reshape(out.shape)

    def _moments(self, x: Array, groups: int) -> Any:
        """For each group: mean and sum of squared distances in float64, and its rows."""
        for rows in x.reshape(groups, -1, x.shape[-1]).astype(np.float64):
            total, mean = group_sums(rows), group_sums(rows) / len(rows)
            yield mean, np.maximum(group_sums(rows * rows) - mean * total, 0), len(rows)

    def moments(self, x: Array, mean_GC: Array, squares_GC: Array) -> None:
        channels = x.shape[-1]
        means, squares = mean_GC.reshape(-1, channels), squares_GC.reshape(-1, channels)
        for group, (mean, square, _) in enumerate(self._moments(x, len(means))):
            means[group], squares[group] = mean, square

    def local_moments(
        self, x: Array, gamma: Array, running: Any, momentum: float, epsilon: float, results_1C: Any
    ) -> None:
        ((exact, squares, rows),) = self._moments(x, 1)
        mean, inverse_std, scale = (each.reshape(-1) for each in results_1C)
        mean[:] = exact
        inverse_std[:] = np.float32(1) / np.sqrt((squares / rows).astype(np.float32) + np.float32(epsilon))
        scale[:] = gamma * inverse_std
        for average, value in zip(running, (mean, (squares / max(rows - 1, 1)).astype(np.float32)), strict=True):
            average[:] = average * np.float32(1 - momentum) + value * np.float32(momentum)

    def normalise(self, x: Array, mean_GC: Array, scale_GC: Array, shift_C: Array, out: Array, rectified: bool) -> None:
        channels = x.shape[-1]
        groups = mean_GC.size // channels
        rows = x.reshape(groups, -1, channels)
        result = (rows - mean_GC.reshape(groups, 1, -1)) * scale_GC.reshape(groups, 1, -1) + shift_C
        out[...] = (np.where(result <= 0, np.float32(0), result) if rectified else result).reshape(out.shape)

    def _kept(self, grad: Array, x: Array, mean_GC: Array, rectifier: Any) -> Array:
        """The gradient where the normalised x is > 0."""
        if rectifier is None:
            return grad
        normalised = np.empty_like(x)
        self.normalise(x, mean_GC, *rectifier, normalised, False)
        return np.where(normalised > 0, grad, np.float32(0))

    def sums(self, grad: Array, x: Array, mean_GC: Array, dot_GC: Array, sum_GC: Array, rectifier: Any) -> None:
        channels = x.shape[-1]
        kept = self._kept(grad, x, mean_GC, rectifier)
        means, dots, totals = (each.reshape(-1, channels) for each in (mean_GC, dot_GC, sum_GC))
        of_groups = [each.reshape(len(means), -1, channels).astype(np.float64) for each in (kept, x)]
        for group, (grads, rows) in enumerate(zip(*of_groups, strict=True)):
            total = group_sums(grads)
            dots[group] = group_sums(grads * rows) - means[group].astype(np.float64) * total
            totals[group] = total

    def local_gradients(self, grad: Array, x: Array, statistics_1C: Any, rectifier: Any, results_C: Any) -> None:
        mean, inverse_std, scale = (each.reshape(-1) for each in statistics_1C)
        d_gamma, d_beta, slope, shift = (each.reshape(-1) for each in results_C)
        self.sums(grad, x, mean, d_gamma, d_beta, rectifier)
        d_gamma *= inverse_std
        per_row = scale * -np.float32(1 / (x.size // x.shape[-1]))
        slope[:], shift[:] = per_row * inverse_std * d_gamma, per_row * d_beta

    def normalise_backward(
        self, grad: Array, x: Array, mean_GC: Array, a_GC: Array, b_GC: Array, c_GC: Array, shift_C: Any
    ) -> None:
        channels = x.shape[-1]
        groups = mean_GC.size // channels
        kept = self._kept(grad, x, mean_GC, None if shift_C is None else (a_GC, shift_C))
        mean, a, b, c = (each.reshape(groups, 1, channels) for each in (mean_GC, a_GC, b_GC, c_GC))
        rows, grads = x.reshape(groups, -1, channels), kept.reshape(groups, -1, channels)
        grad[...] = (grads * a + ((rows - mean) * b + c)).reshape(grad.shape)

    def rectified_sum(self, a: Array, b: Array, out: Array) -> None:
        total = a + b
        out[...] = np.where(total <= 0, np.float32(0), total)

    def both_gradients(self, grad: Array, y: Array, copy: Array) -> None:
        copy[...] = grad[...] = np.where(y > 0, grad, np.float32(0))

    def tree_sum(self, parts: Sequence[Array], out: Array) -> None:
        out[...] = fold(leaf_tree(len(parts)), parts.__getitem__, operator.add)


class TwinMemory(HostMemory):
    """The host's memory, where layers compute with what the kernels of a device compute."""

    def layer_kernels(self) -> Any:
        return ReferenceKernels()
