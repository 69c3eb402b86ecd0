"""``DeviceOps``: the operations in a device's memory, where they are written otherwise than for NumPy.

With CuPy's arrays products are cuBLAS's in float32 (TF32 where CUPY_TF32=1 asks for it) or of bfloat16 operands, added
in float32. Convolutions and batch norm in float32 are kernels of this project (``dpsim.memory.LayerKernels``), which
copy no windows and round nothing to bfloat16; all else is CuPy's own code. Without kernels everything is written with
functions of the array module: in float64, in bfloat16 a convolution, and on NumPy's arrays, where that is tested.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from dpsim.kernels.allreduce.tree import fold, leaf_tree
from dpsim.memory import LayerKernels, Memory
from dpsim.nn.array_ops import ArrayOps, Side, grouped
from dpsim.nn.ops import Ops, Workspace
from dpsim.nn.results import Results
from dpsim.replica import Array, BatchSums, DeferredSums, Leaves

_ALIGNMENT_BYTES = 256
"""cuBLAS chooses its code by how operands are aligned, up to this many bytes."""

_MOST_AT_ONCE = 8
_MOST_SUMMED_BYTES = 512 << 20
"""Leaves whose gradients of one weight are added at once, and bytes of these: their memory is free again afterwards."""


class DeviceOps(ArrayOps):
    """See ``Ops`` for what each operation computes. Nothing waits for the device."""

    def __init__(self, memory: Memory, results: Results | None = None) -> None:
        super().__init__(memory.xp)
        self.memory = memory
        self.results: Results = Results(self.zeros) if results is None else results
        self._coded = memory.coded_products()
        self._kernels = memory.layer_kernels()

    def layer_kernels(self, dtype: DTypeLike) -> LayerKernels | None:
        return self._kernels if dtype == np.float32 else None

    def tolerate_overflow(self) -> AbstractContextManager[Any]:
        """Return a device warns of nothing; NumPy in its place would."""
        return np.errstate(over="ignore", invalid="ignore", divide="ignore")

    def in_leaves(self) -> Ops:
        ops = DeviceLeafOps(self.memory, self.results)
        ops.multiply_in(self.compute_dtype)
        return ops

    @property
    def work_bytes(self) -> int:
        return sum(held.size_bytes for held in (self._coded, self._kernels, self.results) if held is not None)

    def operand(self, side: Side, x: Array) -> Any:
        if self._coded is None or self.compute_dtype == "float32":
            return super().operand(side, x)
        return self._coded.encode(side, x)

    def matmul(self, a: Any, b: Any, out: Array) -> None:
        if self._coded is None or self.compute_dtype == "float32":
            return super().matmul(a, b, out)
        self._coded.multiply(a, b, out)

    def upload(self, name: str, host: Array) -> Array:
        return self.memory.upload(name, host)

    def sums(self, slot_losses: Sequence[Array], correct: Array, samples: int) -> BatchSums | DeferredSums:
        values = self.xp.empty(len(slot_losses) + 1, np.float64)
        for slot, loss in enumerate(slot_losses):
            values[slot] = loss
        values[len(slot_losses)] = correct
        return DeferredSums(values=values, samples=samples, memory=self.memory)

    def channel_dot(self, x: Array, y: Array, out: Array) -> None:
        """Reduce by a kernel: CuPy's einsum would multiply many small matrices."""
        rows, t = grouped(x)
        products = rows * y.reshape(rows.shape)
        self.xp.add.reduce(self.xp.add.reduce(products, axis=0).reshape(t, -1), axis=0, out=out)

    def conv2d(
        self, x_bHWi: Array, weight_KKio: Array, stride: int, leaves: Leaves, out_bhwo: Array, work: Workspace
    ) -> None:
        if (kernels := self._conv_kernels(x_bHWi)) is None:
            return super().conv2d(x_bHWi, weight_KKio, stride, leaves, out_bhwo, work)
        kernels.conv2d(x_bHWi, weight_KKio, stride, out_bhwo)

    def conv2d_weight_gradient(
        self, x_bHWi: Array, grad_bhwo: Array, leaves: Leaves, stride: int, out_KKio: Array, work: Workspace
    ) -> None:
        if (kernels := self._conv_kernels(x_bHWi)) is None:
            return super().conv2d_weight_gradient(x_bHWi, grad_bhwo, leaves, stride, out_KKio, work)
        start, stop = leaves
        kernels.conv2d_weight_gradient(x_bHWi[start:stop], grad_bhwo[start:stop], stride, out_KKio)

    def conv2d_input_gradient(
        self, grad_bhwo: Array, weight_KKio: Array, stride: int, leaves: Leaves, out_bHWi: Array, work: Workspace
    ) -> None:
        if (kernels := self._conv_kernels(grad_bhwo)) is None:
            return super().conv2d_input_gradient(grad_bhwo, weight_KKio, stride, leaves, out_bHWi, work)
        flipped = weight_KKio[::-1, ::-1].transpose(0, 1, 3, 2).copy()
        kernels.conv2d_input_gradient(grad_bhwo, flipped, stride, out_bHWi)

    def _conv_kernels(self, x: Array) -> LayerKernels | None:
        return self.layer_kernels(x.dtype) if self.compute_dtype == "float32" else None

    def channel_moments(self, x: Array, mean_GC: Array, squares_GC: Array) -> None:
        if (kernels := self.layer_kernels(x.dtype)) is None:
            return super().channel_moments(x, mean_GC, squares_GC)
        kernels.moments(x, mean_GC, squares_GC)

    def channel_normalise(self, x: Array, mean_GC: Array, scale_GC: Array, shift_C: Array, out: Array) -> None:
        if (kernels := self.layer_kernels(x.dtype)) is None:
            return super().channel_normalise(x, mean_GC, scale_GC, shift_C, out)
        kernels.normalise(x, mean_GC, scale_GC, shift_C, out, rectified=False)

    def channel_normalise_sums(self, grad: Array, x: Array, mean_GC: Array, dot_GC: Array, sum_GC: Array) -> None:
        if (kernels := self.layer_kernels(x.dtype)) is None:
            return super().channel_normalise_sums(grad, x, mean_GC, dot_GC, sum_GC)
        kernels.sums(grad, x, mean_GC, dot_GC, sum_GC, rectifier=None)

    def channel_normalise_backward(
        self, grad: Array, x: Array, mean_GC: Array, a_GC: Array, b_GC: Array, c_GC: Array
    ) -> None:
        if (kernels := self.layer_kernels(x.dtype)) is None:
            return super().channel_normalise_backward(grad, x, mean_GC, a_GC, b_GC, c_GC)
        kernels.normalise_backward(grad, x, mean_GC, a_GC, b_GC, c_GC, shift_C=None)

    def _group_sums(self, rows_nRI: Array, others_nRI: Array | None, channels: int, groups: int) -> Array:
        xp, n = self.xp, len(rows_nRI)
        terms = rows_nRI if others_nRI is None else rows_nRI * others_nRI
        if groups == 1:
            sums: Array = xp.add.reduce(terms.reshape(n, -1), axis=1)
            return sums[:, None]
        sums = xp.add.reduce(terms, axis=1)
        sums = xp.add.reduce(sums.reshape(n, -1, channels), axis=1)
        sums = xp.add.reduce(sums.reshape(n, groups, -1), axis=2)
        return sums


class DeviceLeafOps(DeviceOps):
    """The same for training in leaves: every leaf has products of its own, whose operands lie at aligned addresses.

    An operand that lies elsewhere is copied. What CuPy allocates begins at a multiple of 512 bytes.
    """

    def in_leaves(self) -> Ops:
        return self

    def operand(self, side: Side, x: Array) -> Any:
        """Return the codes: they are at an aligned address already."""
        codes = super().operand(side, x)
        return self._aligned(codes) if self._coded is None or self.compute_dtype == "float32" else codes

    def matmul(self, a: Any, b: Any, out: Array) -> None:
        target = out if self._is_aligned(out) else self.xp.empty(out.shape, out.dtype)
        super().matmul(a, b, target)
        if target is not out:
            out[...] = target

    def product_with_transposed(self, grad: Array, weight: Array, leaves: Leaves, out: Array) -> None:
        """Copy the transpose in float32: cuBLAS takes longer for leaves of few rows where it lies otherwise."""
        turned = weight.T if self._coded is not None and self.compute_dtype != "float32" else weight.T.copy()
        self.product(grad, turned, leaves, out)

    def products_at_once(self, x: Array, grad: Array, leaves: Leaves) -> int:
        of_a_leaf = x.shape[-1] * grad.shape[-1] * x.dtype.itemsize
        most = max(1, _MOST_SUMMED_BYTES // max(of_a_leaf, 1))
        return int(min(_MOST_AT_ONCE, 1 << most.bit_length() - 1))

    def transposed_product(self, x: Array, grad: Array, leaves: Leaves, out: Array) -> None:
        product = super().transposed_product
        self._tree_sum(leaves, out, lambda leaf, of_leaf: product(x, grad, leaf, of_leaf))

    def leaf_sums(self, x_bC: Array, leaves: Leaves, out_C: Array) -> None:
        leaf_sums = super().leaf_sums
        self._tree_sum(leaves, out_C, lambda leaf, of_leaf: leaf_sums(x_bC, leaf, of_leaf))

    def _tree_sum(self, leaves: Leaves, out: Array, write: Callable[[Leaves, Array], None]) -> None:
        """Add what ``write`` computes of each leaf, along their tree: all are read once, and the sum written once."""
        if len(leaves) == 2:
            return write(leaves, out)
        parts = [self.results.lend(("leaf", number), out.shape, out.dtype) for number in range(len(leaves) - 1)]
        for leaf, part in zip(itertools.pairwise(leaves), parts, strict=True):
            write(leaf, part)
        if (kernels := self.layer_kernels(out.dtype)) is not None:
            kernels.tree_sum(parts, out)
        else:
            out[...] = fold(leaf_tree(len(parts)), parts.__getitem__, operator.add)

    def _is_aligned(self, array: Array) -> bool:
        return self.memory.address(array) % _ALIGNMENT_BYTES == 0

    def _aligned(self, array: Array) -> Array:
        """Return the array, contiguous or the transposed of one that is, at an aligned address."""
        if self._is_aligned(array):
            return array
        return array.copy() if array.flags.c_contiguous else array.T.copy().T
