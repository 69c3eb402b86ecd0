"""``CpuOps``: the operations that take the time, in vector code; the rest, and other dtypes than two, in NumPy."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import DTypeLike

from dpsim.kernels import batch_norm, conv, elementwise, matmul
from dpsim.nn.numpy_ops import NumpyOps
from dpsim.nn.ops import Workspace
from dpsim.replica import Array

_LINE_BYTES = 64
_LARGE_WEIGHTS = 2**19  # elements: of smaller ones, BLAS is the faster by some microseconds


def _suit(first: Array, *others: Array) -> bool:
    """Whether kernels take these arrays: of one dtype they know, and dense in memory."""
    dtype = first.dtype
    return (
        dtype in (np.float32, np.float64)
        and first.flags.c_contiguous
        and all(other.dtype == dtype and other.flags.c_contiguous for other in others)
    )


class CpuOps(NumpyOps):
    """Stateless; see ``Ops`` for what each operation computes, and ``dpsim.kernels`` for how."""

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """At the beginning of a cache line, so that no vector lies across two."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        memory = np.zeros(size + _LINE_BYTES, np.uint8)
        first = -memory.ctypes.data % _LINE_BYTES
        return memory[first : first + size].view(dtype).reshape(shape)

    def relu(self, x: Array, out: Array, mask: Array) -> None:
        if not _suit(x, out):
            return super().relu(x, out, mask)
        elementwise.relu(x, out, mask)

    def keep_where(self, x: Array, mask: Array) -> None:
        if not _suit(x):
            return super().keep_where(x, mask)
        elementwise.keep_where(x, mask)

    def channel_moments(self, x: Array, mean_C: Array, squares_C: Array) -> None:
        if not _suit(x, mean_C, squares_C):
            return super().channel_moments(x, mean_C, squares_C)
        batch_norm.channel_moments(x, mean_C, squares_C)

    def channel_normalise(self, x: Array, mean_C: Array, scale_C: Array, shift_C: Array, out: Array) -> None:
        if not _suit(x, mean_C, scale_C, shift_C, out):
            return super().channel_normalise(x, mean_C, scale_C, shift_C, out)
        batch_norm.channel_normalise(x, mean_C, scale_C, shift_C, out)

    def channel_normalise_sums(self, grad: Array, x: Array, mean_C: Array, dot_C: Array, sum_C: Array) -> None:
        if not _suit(grad, x, mean_C, dot_C, sum_C):
            return super().channel_normalise_sums(grad, x, mean_C, dot_C, sum_C)
        batch_norm.channel_normalise_sums(grad, x, mean_C, dot_C, sum_C)

    def channel_normalise_backward(
        self, grad: Array, x: Array, mean_C: Array, a_C: Array, b_C: Array, c_C: Array
    ) -> None:
        if not _suit(grad, x, mean_C, a_C, b_C, c_C):
            return super().channel_normalise_backward(grad, x, mean_C, a_C, b_C, c_C)
        batch_norm.channel_normalise_backward(grad, x, mean_C, a_C, b_C, c_C)

    def dense(self, x_bi: Array, weight_io: Array, out_bo: Array, work: Workspace) -> None:
        if weight_io.size < _LARGE_WEIGHTS or not _suit(x_bi, weight_io, out_bo):
            return super().dense(x_bi, weight_io, out_bo, work)
        matmul.matmul(x_bi, weight_io, out_bo)

    def dense_weight_gradient(self, x_bi: Array, grad_bo: Array, out_io: Array, work: Workspace) -> None:
        if out_io.size < _LARGE_WEIGHTS or not _suit(x_bi, grad_bo, out_io):
            return super().dense_weight_gradient(x_bi, grad_bo, out_io, work)
        x_ib = work.take("transposed input", x_bi.shape[::-1])
        np.copyto(x_ib, x_bi.T)
        matmul.matmul(x_ib, grad_bo, out_io)

    def dense_input_gradient(self, grad_bo: Array, weight_io: Array, out_bi: Array, work: Workspace) -> None:
        """As the transposed gradient of the transposed input: then the weights are read as they lie, and once."""
        if weight_io.size < _LARGE_WEIGHTS or not _suit(grad_bo, weight_io, out_bi):
            return super().dense_input_gradient(grad_bo, weight_io, out_bi, work)
        grad_ob = work.take("transposed gradient", grad_bo.shape[::-1])
        out_ib = work.take("transposed input", out_bi.shape[::-1])
        np.copyto(grad_ob, grad_bo.T)
        matmul.matmul(weight_io, grad_ob, out_ib)
        np.copyto(out_bi, out_ib.T)

    def conv2d(self, x_bHWi: Array, weight_KKio: Array, stride: int, out_bhwo: Array, work: Workspace) -> None:
        if not _suit(x_bHWi, weight_KKio, out_bhwo):
            return super().conv2d(x_bHWi, weight_KKio, stride, out_bhwo, work)
        conv.conv2d(x_bHWi, weight_KKio, stride, out_bhwo)

    def conv2d_weight_gradient(
        self, x_bHWi: Array, grad_bhwo: Array, stride: int, out_KKio: Array, work: Workspace
    ) -> None:
        if not _suit(x_bHWi, grad_bhwo, out_KKio):
            return super().conv2d_weight_gradient(x_bHWi, grad_bhwo, stride, out_KKio, work)
        conv.conv2d_weight_gradient(x_bHWi, grad_bhwo, stride, out_KKio)

    def conv2d_input_gradient(
        self, grad_bhwo: Array, weight_KKio: Array, stride: int, out_bHWi: Array, work: Workspace
    ) -> None:
        if not _suit(grad_bhwo, weight_KKio, out_bHWi):
            return super().conv2d_input_gradient(grad_bhwo, weight_KKio, stride, out_bHWi, work)
        kernel, _, inputs, outputs = weight_KKio.shape
        exchanged_KKoi = work.take("exchanged weight", (kernel, kernel, outputs, inputs))
        np.copyto(exchanged_KKoi, weight_KKio.transpose(0, 1, 3, 2))
        conv.conv2d_input_gradient(grad_bhwo, exchanged_KKoi, stride, out_bHWi)
