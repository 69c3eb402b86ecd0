"""``CpuOps``: the operations that take the time, in vector code; the rest, and other dtypes than two, in NumPy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import DTypeLike

from dpsim.kernels import batch_norm, conv, elementwise, matmul, rounding
from dpsim.nn.numpy_ops import NumpyOps
from dpsim.nn.ops import Ops, Workspace
from dpsim.replica import Array, Leaves, Rounding

_Product = Callable[[Array, Array, Array], None]
_LINE_BYTES = 64

_FEW_SAMPLES = 256
_AT_ONCE = 512  # samples whose gradients are added before they are written
_MOST_LEAVES = 1 << 10
_LARGE_WEIGHTS = 1 << 17  # elements
_LONG = 64  # elements of a sum that lies along the rows of both matrices


def _suit(first: Array, *others: Array) -> bool:
    """Whether kernels take these arrays: of one dtype they know, and dense in memory."""
    dtype = first.dtype
    return (
        dtype in (np.float32, np.float64)
        and first.flags.c_contiguous
        and all(other.dtype == dtype and other.flags.c_contiguous for other in others)
    )


def _by_rows(a: Array, b: Array) -> _Product | None:
    """The kernel for a b, in which the bits of a row depend on it and b alone."""
    if _suit(a, b):
        return matmul.product
    return _with_transposed if len(b) >= _LONG and _suit(a, b.T) else None


def _product_by_rows(a: Array, b: Array) -> _Product | None:
    """``_by_rows`` for large weights; made for few rows."""
    return _by_rows(a, b) if b.size >= _LARGE_WEIGHTS else None


def _with_transposed(a: Array, b: Array, out: Array) -> None:
    matmul.product_with_transposed(a, b.T, out)


def _small_product_by_rows(a: Array, b: Array) -> _Product | None:
    """``_by_rows`` for small weights, of which it may make a copy, and any number of rows."""
    if b.size >= _LARGE_WEIGHTS:
        return None
    return _by_rows(a, b) or (_with_copied if _suit(a, b.T) else None)


def _with_copied(a: Array, b: Array, out: Array) -> None:
    matmul.product(a, np.ascontiguousarray(b), out)


def _joined(parts: list[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """Neighbouring parts as one, up to ``most`` samples."""
    joined = [parts[0]]
    for start, stop in parts[1:]:
        if stop - joined[-1][0] <= most:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


class CpuOps(NumpyOps):
    """See ``Ops`` for what each operation computes, and ``dpsim.kernels`` for how."""

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """At the beginning of a cache line, so that no vector lies across two."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        memory = np.zeros(size + _LINE_BYTES, np.uint8)
        first = -memory.ctypes.data % _LINE_BYTES
        return memory[first : first + size].view(dtype).reshape(shape)

    def matmul(self, a: Array, b: Array, out: Array) -> None:
        """BLAS but for the products with large weights and few samples, of which it copies the weights first."""
        (rows, inner), columns = a.shape, b.shape[1]
        if rows <= _FEW_SAMPLES and (product := _product_by_rows(a, b)) and _suit(out):
            product(a, b, out)
        elif inner <= _FEW_SAMPLES and rows * columns >= _LARGE_WEIGHTS and _suit(a.T, b, out):
            matmul.transposed_product(a.T, b, out)
        else:
            super().matmul(a, b, out)

    def in_leaves(self) -> Ops:
        return _IN_LEAVES

    def conv_parts(self, x: Array, weight: Array, leaves: Leaves) -> Iterable[tuple[int, int]]:
        """All at once: the kernels take one sample after another."""
        return [(0, leaves[-1])] if _suit(x, weight) else itertools.pairwise(leaves)

    def round(self, x: Array, to: Rounding, out: Array) -> None:
        if not _suit(x, out):
            return super().round(x, to, out)
        rounding.round_array(x, *to, out)

    def add_rounded(self, a: Array, b: Array, to: Rounding, out: Array) -> None:
        if not _suit(a, b, out):
            return super().add_rounded(a, b, to, out)
        rounding.round_sum(a, b, *to, out)

    def relu(self, x: Array, out: Array, mask: Array) -> None:
        if not _suit(x, out):
            return super().relu(x, out, mask)
        elementwise.relu(x, out, mask)

    def keep_where(self, x: Array, mask: Array) -> None:
        if not _suit(x):
            return super().keep_where(x, mask)
        elementwise.keep_where(x, mask)

    def channel_moments(self, x: Array, mean_GC: Array, squares_GC: Array) -> None:
        if not _suit(x, mean_GC, squares_GC):
            return super().channel_moments(x, mean_GC, squares_GC)
        batch_norm.channel_moments(x, mean_GC, squares_GC)

    def channel_normalise(self, x: Array, mean_GC: Array, scale_GC: Array, shift_C: Array, out: Array) -> None:
        if not _suit(x, mean_GC, scale_GC, shift_C, out):
            return super().channel_normalise(x, mean_GC, scale_GC, shift_C, out)
        batch_norm.channel_normalise(x, mean_GC, scale_GC, shift_C, out)

    def channel_normalise_sums(self, grad: Array, x: Array, mean_GC: Array, dot_GC: Array, sum_GC: Array) -> None:
        if not _suit(grad, x, mean_GC, dot_GC, sum_GC):
            return super().channel_normalise_sums(grad, x, mean_GC, dot_GC, sum_GC)
        batch_norm.channel_normalise_sums(grad, x, mean_GC, dot_GC, sum_GC)

    def channel_normalise_backward(
        self, grad: Array, x: Array, mean_GC: Array, a_GC: Array, b_GC: Array, c_GC: Array
    ) -> None:
        if not _suit(grad, x, mean_GC, a_GC, b_GC, c_GC):
            return super().channel_normalise_backward(grad, x, mean_GC, a_GC, b_GC, c_GC)
        batch_norm.channel_normalise_backward(grad, x, mean_GC, a_GC, b_GC, c_GC)

    def conv2d(self, x_bHWi: Array, weight_KKio: Array, stride: int, out_bhwo: Array, work: Workspace) -> None:
        if not _suit(x_bHWi, weight_KKio, out_bhwo):
            return super().conv2d(x_bHWi, weight_KKio, stride, out_bhwo, work)
        conv.conv2d(x_bHWi, weight_KKio, stride, out_bhwo)

    def conv_at_once(self, x: Array, grad: Array) -> int:
        return _MOST_LEAVES if _suit(x, grad) else 1

    def conv2d_weight_gradient(
        self, x_bHWi: Array, grad_bhwo: Array, leaves: Leaves, stride: int, out_KKio: Array, work: Workspace
    ) -> None:
        if not _suit(x_bHWi, grad_bhwo, out_KKio):
            return super().conv2d_weight_gradient(x_bHWi, grad_bhwo, leaves, stride, out_KKio, work)
        waiting = work.take("waiting sums", (conv.waiting_sums(leaves), *out_KKio.shape))
        conv.conv2d_weight_gradient(x_bHWi, grad_bhwo, leaves, stride, out_KKio, waiting)

    def conv2d_input_gradient(
        self, grad_bhwo: Array, weight_KKio: Array, stride: int, out_bHWi: Array, work: Workspace
    ) -> None:
        if not _suit(grad_bhwo, weight_KKio, out_bHWi):
            return super().conv2d_input_gradient(grad_bhwo, weight_KKio, stride, out_bHWi, work)
        kernel, _, inputs, outputs = weight_KKio.shape
        exchanged_KKoi = work.take("exchanged weight", (kernel, kernel, outputs, inputs))
        np.copyto(exchanged_KKoi, weight_KKio.transpose(0, 1, 3, 2))
        conv.conv2d_input_gradient(grad_bhwo, exchanged_KKoi, stride, out_bHWi)


class _LeafOps(CpuOps):
    """Kernels for all products but the largest, since BLAS would have to be called leaf by leaf."""

    def in_leaves(self) -> Ops:
        return self

    def matmul(self, a: Array, b: Array, out: Array) -> None:
        if (product := _small_product_by_rows(a, b)) and _suit(out):
            product(a, b, out)
        else:
            super().matmul(a, b, out)

    def product_parts(self, rows: Array, weight: Array, leaves: Leaves) -> Iterable[tuple[int, int]]:
        if _small_product_by_rows(rows, weight):
            return [(0, leaves[-1])]
        parts = list(itertools.pairwise(leaves))
        if max(b - a for a, b in parts) <= _FEW_SAMPLES and _product_by_rows(rows, weight):
            return _joined(parts, _FEW_SAMPLES)
        return parts

    def products_at_once(self, x_bi: Array, grad_bo: Array, leaves: Leaves) -> int:
        most = max(b - a for a, b in itertools.pairwise(leaves))
        return 1 << (_AT_ONCE // max(most, 1)).bit_length() - 1 if most <= _AT_ONCE and _suit(x_bi, grad_bo) else 1

    def leaf_products(self, x_bi: Array, grad_bo: Array, leaves: Leaves, out_io: Array) -> None:
        if leaves[-1] - leaves[0] > _AT_ONCE or not _suit(x_bi, grad_bo, out_io):
            return super().leaf_products(x_bi, grad_bo, leaves, out_io)
        matmul.transposed_products(x_bi, grad_bo, leaves, out_io)

    def leaf_sums(self, x_bC: Array, leaves: Leaves, out_C: Array) -> None:
        if leaves[-1] - leaves[0] > _AT_ONCE or not _suit(x_bC, out_C):
            return super().leaf_sums(x_bC, leaves, out_C)
        matmul.transposed_products(np.ones((len(x_bC), 1), x_bC.dtype), x_bC, leaves, out_C[None])


_IN_LEAVES = _LeafOps()
