"""``ArrayOps``: the operations of ``dpsim.nn.ops.Ops`` over an array module; with NumPy it defines what they mean.

``NumpyOps`` is it with NumPy and its BLAS.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dpsim import rng
from dpsim.choices import Choices
from dpsim.dtypes import ComputeDtype
from dpsim.kernels.allreduce.reference import from_bfloat16, round_to_bfloat16, rounded
from dpsim.memory import HOST, LayerKernels, Memory
from dpsim.nn.ops import Ops, Workspace
from dpsim.nn.results import Results
from dpsim.replica import Array, BatchSums, CodeTable, DeferredSums, Leaves, Rounding

Side = Literal["left", "right"]
"""Where a matrix stands in a product."""
_GROUP_ELEMENTS = 4096  # elements of a row of `grouped`: long enough for SIMD loops, short enough for the L1 cache


@functools.lru_cache(maxsize=1024)
def _group(positions: int, channels: int) -> int:
    most = max(1, min(positions, _GROUP_ELEMENTS // max(channels, 1)))
    return next(t for t in range(most, 0, -1) if positions % t == 0)


def grouped(x: Array) -> tuple[Array, int]:
    """Return x as rows of t * C elements, t neighbouring positions of a sample, and t: NumPy needs long inner loops."""
    channels = x.shape[-1]
    t = _group(math.prod(x.shape[1:-1]), channels)
    return x.reshape(-1, t * channels), t


def _groups(rows: Sequence[Array], values_GC: Sequence[Array]) -> Iterator[tuple[Array, ...]]:
    """Yield for each group its rows [., C] of every array in ``rows``, and its [C] of every array in ``values_GC``."""
    channels = rows[0].shape[-1]
    values = [array.reshape(-1, channels) for array in values_GC]
    return zip(*(array.reshape(len(values[0]), -1, channels) for array in rows), *values, strict=True)


def _sample_rows(groups: int, *arrays_nPC: Array) -> tuple[int, int, list[Array]]:
    """Return elements of a group of channels, t of ``grouped``, and the arrays as rows by sample [n, R, t C]."""
    n, positions, channels = arrays_nPC[0].shape
    _, t = grouped(arrays_nPC[0])
    return positions * channels // groups, t, [array.reshape(n, -1, t * channels) for array in arrays_nPC]


class ArrayOps:
    """See ``Ops`` for what each operation computes. ``xp`` is an array module with NumPy's functions."""

    memory: Memory = HOST
    results: Results | None = None

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        self.compute_dtype: ComputeDtype = "float32"

    def layer_kernels(self, dtype: DTypeLike) -> LayerKernels | None:
        return None

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        zeros: Array = self.xp.zeros(shape, dtype)
        return zeros

    def tolerate_overflow(self) -> AbstractContextManager[Any]:
        tolerant: AbstractContextManager[Any] = self.xp.errstate(over="ignore", invalid="ignore", divide="ignore")
        return tolerant

    def upload(self, name: str, host: Array) -> Array:
        return host

    def sums(self, slot_losses: Sequence[Array], correct: Array, samples: int) -> BatchSums | DeferredSums:
        return BatchSums.of_slots(slot_losses, correct, samples)

    def in_leaves(self) -> Ops:
        return self

    def use(self, choices: Choices | None = None, table: CodeTable | None = None) -> None:
        """Do nothing: every operation has one implementation here."""

    def multiply_in(self, dtype: ComputeDtype) -> None:
        self.compute_dtype = dtype

    @property
    def work_bytes(self) -> int:
        return 0

    def operand(self, side: Side, x: Array) -> Any:
        """Return a matrix as ``matmul`` takes it on that side, until the next one there; x is as ``matmul`` says."""
        if self.compute_dtype == "float32":
            return x
        rows = x if x.flags.c_contiguous else x.T  # so that the result lies as x does
        nearest = from_bfloat16(round_to_bfloat16(rows, self.xp))
        return nearest if rows is x else nearest.T

    def matmul(self, a: Any, b: Any, out: Array) -> None:
        """out = a b, of operands: every product of the others. Matrices are contiguous or the transposed of such."""
        self.xp.matmul(a, b, out=out)

    def product(self, x: Array, weight: Array, leaves: Leaves, out: Array) -> None:
        right = self.operand("right", weight)
        for start, stop in itertools.pairwise(leaves):
            self.matmul(self.operand("left", x[start:stop]), right, out[start:stop])

    def product_with_transposed(self, grad: Array, weight: Array, leaves: Leaves, out: Array) -> None:
        self.product(grad, weight.T, leaves, out)

    def products_at_once(self, x: Array, grad: Array, leaves: Leaves) -> int:
        return 1

    def transposed_product(self, x: Array, grad: Array, leaves: Leaves, out: Array) -> None:
        start, stop = leaves
        self.matmul(self.operand("left", x[start:stop].T), self.operand("right", grad[start:stop]), out)

    def leaf_sums(self, x_bC: Array, leaves: Leaves, out_C: Array) -> None:
        start, stop = leaves
        self.channel_sum(x_bC[start:stop], out=out_C)

    def conv_at_once(self, x_bHWi: Array, weight_KKio: Array, stride: int, leaves: Leaves) -> int:
        return 1

    def add(self, a: Array, b: Array, out: Array) -> None:
        self.xp.add(a, b, out=out)

    def round(self, x: Array, to: Rounding, out: Array) -> None:
        out[...] = rounded(x, *to, self.xp)

    def add_rounded(self, a: Array, b: Array, to: Rounding, out: Array) -> None:
        out[...] = rounded(a + b, *to, self.xp)

    def channel_sum(self, x: Array, out: Array) -> None:
        rows, t = grouped(x)
        self.xp.add.reduce(self.xp.add.reduce(rows, axis=0).reshape(t, -1), axis=0, out=out)

    def channel_dot(self, x: Array, y: Array, out: Array) -> None:
        rows, t = grouped(x)
        self.xp.add.reduce(self.xp.einsum("ri,ri->i", rows, y.reshape(rows.shape)).reshape(t, -1), axis=0, out=out)

    def channel_add(self, x: Array, shift_C: Array, out: Array) -> None:
        rows, t = grouped(x)
        self.xp.add(rows, self.xp.tile(shift_C, t), out=out.reshape(rows.shape))

    def channel_multiply(self, x: Array, scale_C: Array, out: Array) -> None:
        rows, t = grouped(x)
        self.xp.multiply(rows, self.xp.tile(scale_C, t), out=out.reshape(rows.shape))

    def relu(self, x: Array, out: Array, mask: Array) -> None:
        self.xp.greater(x, 0, out=mask)
        self.xp.maximum(x, 0, out=out)

    def keep_where(self, x: Array, mask: Array) -> None:
        self.xp.multiply(x, mask, out=x)

    def channel_moments(self, x: Array, mean_GC: Array, squares_GC: Array) -> None:
        for rows, mean_C, squares_C in _groups([x], [mean_GC, squares_GC]):
            self.channel_sum(rows, out=mean_C)
            mean_C /= len(rows)
            centred = rows - mean_C
            self.channel_dot(centred, centred, out=squares_C)

    def channel_normalise(self, x: Array, mean_GC: Array, scale_GC: Array, shift_C: Array, out: Array) -> None:
        for rows, result, mean_C, scale_C in _groups([x, out], [mean_GC, scale_GC]):
            self.channel_add(rows, -mean_C, out=result)
            self.channel_multiply(result, scale_C, out=result)
        self.channel_add(out, shift_C, out=out)

    def channel_normalise_sums(self, grad: Array, x: Array, mean_GC: Array, dot_GC: Array, sum_GC: Array) -> None:
        for grad_rows, rows, mean_C, dot_C, sum_C in _groups([grad, x], [mean_GC, dot_GC, sum_GC]):
            self.channel_dot(grad_rows, rows - mean_C, out=dot_C)
            self.channel_sum(grad_rows, out=sum_C)

    def channel_normalise_backward(
        self, grad: Array, x: Array, mean_GC: Array, a_GC: Array, b_GC: Array, c_GC: Array
    ) -> None:
        for grad_rows, rows, mean_C, a_C, b_C, c_C in _groups([grad, x], [mean_GC, a_GC, b_GC, c_GC]):
            self.channel_multiply(grad_rows, a_C, out=grad_rows)
            self.xp.add(grad_rows, (rows - mean_C) * b_C + c_C, out=grad_rows)

    def conv2d(
        self, x_bHWi: Array, weight_KKio: Array, stride: int, leaves: Leaves, out_bhwo: Array, work: Workspace
    ) -> None:
        kernel, _, _, outputs = weight_KKio.shape
        right = self.operand("right", weight_KKio.reshape(-1, outputs))
        for start, stop in itertools.pairwise(leaves):
            columns = self._unfold("x", x_bHWi[start:stop], kernel, stride, work)
            self.matmul(self.operand("left", columns), right, out_bhwo[start:stop].reshape(-1, outputs))

    def conv2d_of_samples(
        self, x_bHWi: Array, weight_KKio: Array, stride: int, out_bhwo: Array, work: Workspace
    ) -> None:
        """Compute ``conv2d`` of one leaf."""
        self.conv2d(x_bHWi, weight_KKio, stride, (0, len(x_bHWi)), out_bhwo, work)

    def conv2d_weight_gradient(
        self, x_bHWi: Array, grad_bhwo: Array, leaves: Leaves, stride: int, out_KKio: Array, work: Workspace
    ) -> None:
        start, stop = leaves
        kernel, _, _, outputs = out_KKio.shape
        columns = self._unfold("x", x_bHWi[start:stop], kernel, stride, work)
        grad = grad_bhwo[start:stop].reshape(-1, outputs)
        self.matmul(self.operand("left", columns.T), self.operand("right", grad), out_KKio.reshape(-1, outputs))

    def conv2d_input_gradient(
        self, grad_bhwo: Array, weight_KKio: Array, stride: int, leaves: Leaves, out_bHWi: Array, work: Workspace
    ) -> None:
        """Convolve the output gradient, zero at the pixels left out, with the kernel flipped."""
        kernel, _, inputs, outputs = weight_KKio.shape
        flipped = weight_KKio[::-1, ::-1].transpose(0, 1, 3, 2).reshape(-1, inputs)
        right = self.operand("right", flipped)
        for start, stop in itertools.pairwise(leaves):
            grad, out = grad_bhwo[start:stop], out_bHWi[start:stop]
            if stride > 1:
                full = work.take("full gradient", (*out.shape[:3], outputs))
                full[:, ::stride, ::stride] = grad
                grad = full
            columns = self._unfold("gradient", grad, kernel, 1, work)
            self.matmul(self.operand("left", columns), right, out.reshape(-1, inputs))

    def conv2d_input_gradient_of_samples(
        self, grad_bhwo: Array, weight_KKio: Array, stride: int, out_bHWi: Array, work: Workspace
    ) -> None:
        """Compute ``conv2d_input_gradient`` of one leaf."""
        self.conv2d_input_gradient(grad_bhwo, weight_KKio, stride, (0, len(grad_bhwo)), out_bHWi, work)

    def max_pool(self, x_bHWC: Array, row_max: Array, pick_left: Array, pick_upper: Array, out: Array) -> None:
        height, width = 2 * out.shape[1], 2 * out.shape[2]
        left, right = x_bHWC[:, :height, 0:width:2], x_bHWC[:, :height, 1:width:2]
        self.xp.greater_equal(left, right, out=pick_left)
        self.xp.maximum(left, right, out=row_max)
        upper, lower = row_max[:, 0::2], row_max[:, 1::2]
        self.xp.greater_equal(upper, lower, out=pick_upper)
        self.xp.maximum(upper, lower, out=out)

    def max_pool_backward(self, grad: Array, pick_left: Array, pick_upper: Array, row_grad: Array, out: Array) -> None:
        height, width = 2 * grad.shape[1], 2 * grad.shape[2]
        upper, lower = row_grad[:, 0::2], row_grad[:, 1::2]
        self.xp.multiply(grad, pick_upper, out=upper)
        self.xp.subtract(grad, upper, out=lower)
        left, right = out[:, :height, 0:width:2], out[:, :height, 1:width:2]
        self.xp.multiply(row_grad, pick_left, out=left)
        self.xp.subtract(row_grad, left, out=right)
        out[:, height:] = 0
        out[:, :, width:] = 0

    def spatial_mean(self, x_bHWC: Array, out_bC: Array) -> None:
        self.xp.add.reduce(x_bHWC, axis=(1, 2), out=out_bC)
        self.xp.multiply(out_bC, 1.0 / (x_bHWC.shape[1] * x_bHWC.shape[2]), out=out_bC)

    def spatial_mean_backward(self, grad_bC: Array, out_bHWC: Array) -> None:
        self.xp.multiply(grad_bC[:, None, None], 1.0 / (out_bHWC.shape[1] * out_bHWC.shape[2]), out=out_bHWC)

    def softmax_cross_entropy(
        self, logits_bC: Array, labels_b: NDArray[np.int64], losses_b: Array, grad_bC: Array
    ) -> Array:
        rows = self.xp.arange(len(labels_b))
        self.xp.subtract(logits_bC, logits_bC.max(axis=1, keepdims=True), out=grad_bC)
        losses_b[:] = grad_bC[rows, labels_b]
        self.xp.exp(grad_bC, out=grad_bC)
        total = grad_bC.sum(axis=1, keepdims=True)
        self.xp.subtract(self.xp.log(total[:, 0]), losses_b, out=losses_b)
        self.xp.divide(grad_bC, total, out=grad_bC)
        grad_bC[rows, labels_b] -= 1
        correct: Array = self.xp.count_nonzero(logits_bC.argmax(axis=1) == labels_b)
        return correct

    def subsample(self, x_bHWC: Array, stride: int, out: Array) -> None:
        front = (out.shape[3] - x_bHWC.shape[3]) // 2
        out[...] = 0
        out[..., front : front + x_bHWC.shape[3]] = x_bHWC[:, ::stride, ::stride]

    def subsample_backward(self, grad: Array, stride: int, out: Array) -> None:
        front = (grad.shape[3] - out.shape[3]) // 2
        out[...] = 0
        out[:, ::stride, ::stride] = grad[..., front : front + out.shape[3]]

    def normalise(self, x_nPC: Array, epsilon: float, out: Array, inverse_std: Array) -> None:
        channels, groups = x_nPC.shape[2], inverse_std.shape[1]
        count, t, (rows, centred) = _sample_rows(groups, x_nPC, out)
        mean = self._group_sums(rows, None, channels, groups) / count
        self.xp.subtract(rows, self._spread(mean, channels, t), out=centred)
        var = self._group_sums(centred, centred, channels, groups) / count
        self.xp.power(var + epsilon, -0.5, out=inverse_std)
        self.xp.multiply(centred, self._spread(inverse_std, channels, t), out=centred)

    def normalise_backward(self, grad_nPC: Array, normalised: Array, inverse_std: Array) -> None:
        channels, groups = grad_nPC.shape[2], inverse_std.shape[1]
        count, t, (rows, others) = _sample_rows(groups, grad_nPC, normalised)
        mean = self._group_sums(rows, None, channels, groups) / count
        slope = self._group_sums(rows, others, channels, groups) / count
        self.xp.subtract(rows, self._spread(mean, channels, t), out=rows)
        self.xp.subtract(rows, others * self._spread(slope, channels, t), out=rows)
        self.xp.multiply(rows, self._spread(inverse_std, channels, t), out=rows)

    def random_mask(self, purpose: str, seed: int, step: int, first_sample: int, dropped: int, out: Array) -> None:
        flat = out.reshape(len(out), math.prod(out.shape[1:]))
        bits = rng.sample_bits(purpose, seed, flat.shape, stream=step, first_sample=first_sample, xp=self.xp)
        self.xp.greater_equal(bits, dropped, out=flat)

    def move_pictures(
        self, x_bHWC: Array, most: int, places_b2: Array, flipped_b: Array, out: Array, work: Workspace
    ) -> None:
        xp, (samples, height, width, _) = self.xp, x_bHWC.shape
        framed, places_b2 = self._framed(x_bHWC, most, work), xp.asarray(places_b2)
        rows_bH = places_b2[:, :1] + xp.arange(height)
        columns_bW = xp.where(xp.asarray(flipped_b)[:, None], xp.arange(width)[::-1], xp.arange(width))
        columns_bW = columns_bW + places_b2[:, 1:]
        out[...] = framed[xp.arange(samples)[:, None, None], rows_bH[:, :, None], columns_bW[:, None, :]]

    def _framed(self, x_bHWC: Array, most: int, work: Workspace) -> Array:
        """Return the pictures with a border of ``most`` zeros on every side."""
        samples, height, width, channels = x_bHWC.shape
        framed = work.take("framed", (samples, height + 2 * most, width + 2 * most, channels))
        framed[:, most : most + height, most : most + width] = x_bHWC
        return framed

    def scale_where(self, x: Array, mask: Array, scale: float, out: Array) -> None:
        self.xp.multiply(x, mask, out=out)
        self.xp.multiply(out, scale, out=out)

    def smooth_labels(
        self, logits_bC: Array, labels_b: NDArray[np.int64], smoothing: float, losses_b: Array, grad_bC: Array
    ) -> None:
        rows = self.xp.arange(len(labels_b))
        losses_b += smoothing * (logits_bC[rows, labels_b] - logits_bC.mean(axis=1))
        grad_bC[rows, labels_b] += smoothing
        grad_bC -= smoothing / logits_bC.shape[1]

    def _group_sums(self, rows_nRI: Array, others_nRI: Array | None, channels: int, groups: int) -> Array:
        """Return [n, G] sums of each row's elements (or products with the others' elements), from ``grouped`` rows."""
        xp, n = self.xp, len(rows_nRI)
        factors = [rows_nRI] if others_nRI is None else [rows_nRI, others_nRI]
        if groups == 1:
            flat = [factor.reshape(n, -1) for factor in factors]
            sums: Array = xp.einsum(",".join(["ni"] * len(flat)) + "->n", *flat)
            return sums[:, None]
        sums = xp.einsum(",".join(["nri"] * len(factors)) + "->ni", *factors)
        sums = xp.add.reduce(sums.reshape(n, -1, channels), axis=1)  # channel by channel first: short rows add slowly
        sums = xp.add.reduce(sums.reshape(n, groups, -1), axis=2)
        return sums

    def _spread(self, values_nG: Array, channels: int, t: int) -> Array:
        """Return [n, 1, t C] values to combine with rows of ``grouped``: each group's for its channels."""
        groups = values_nG.shape[1]
        if groups == 1:
            return values_nG[:, None]
        spread: Array = self.xp.tile(self.xp.repeat(values_nG, channels // groups, axis=1), t)
        return spread[:, None]

    def _unfold(self, name: str, x_bHWC: Array, kernel: int, stride: int, work: Workspace) -> Array:
        """Return the windows of x as rows of K * K * C elements, one an output pixel (im2col), zero outside."""
        samples, height, width, channels = x_bHWC.shape
        border, positions = kernel // 2, (samples, -(-height // stride), -(-width // stride))
        # Only ever written inside, so the border stays zero.
        padded = work.take(f"{name} padded", (samples, height + kernel - 1, width + kernel - 1, channels))
        self.xp.copyto(padded[:, border : border + height, border : border + width], x_bHWC)
        # The K pixels of a kernel row are neighbours in memory: one overlapping view copies runs of K * C elements.
        by_sample, by_row, by_pixel, by_channel = padded.strides
        windows = self._view(
            padded,
            (*positions, kernel, kernel * channels),
            (by_sample, stride * by_row, stride * by_pixel, by_row, by_channel),
        )
        columns = work.take(f"{name} columns", (math.prod(positions), kernel * kernel * channels))
        self.xp.copyto(columns.reshape(windows.shape), windows)
        return columns

    def _view(self, x: Array, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
        """Return a view of the same memory with another shape and other strides, which may overlap."""
        view: Array = self.xp.lib.stride_tricks.as_strided(x, shape, strides)
        return view
