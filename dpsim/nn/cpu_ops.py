"""``CpuOps``: the operations on the CPU, by kernels, BLAS or NumPy, whichever was measured to be the fastest.

``LeafOps`` is the same for training in leaves, in which a committed table decides instead of a measurement.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from dpsim.choices import Choices, Operation, Problem
from dpsim.dtypes import ComputeDtype
from dpsim.kernels import batch_norm, elementwise, rounding, weight_gradient
from dpsim.kernels.scratch import aligned
from dpsim.nn.array_ops import Side
from dpsim.nn.implementations import CANDIDATES, INDEPENDENT_OF_THE_BATCH, committed, unmeasured
from dpsim.nn.layer import Buffers
from dpsim.nn.numpy_ops import NumpyOps
from dpsim.nn.ops import Ops, Workspace
from dpsim.replica import Array, CodeTable, Leaves, Rounding

_AT_ONCE = 512
"""Samples whose gradients are added before the sum is written; more would not stay in the second-level cache."""
_MOST_LEAVES = 1 << 10
"""Leaves that a kernel adds in one call: half of what its stack of sums has room for."""
_NEAREST = Rounding("bfloat16", 1.0)
_Run = tuple[int, int, str]
"""First sample, the one after the last, and the name of the candidate that computes them."""


def _suit(first: Array, *others: Array) -> bool:
    """Return whether kernels accept these arrays: all float32 or all float64, and C-contiguous."""
    dtype = first.dtype
    return (
        dtype in (np.float32, np.float64)
        and first.flags.c_contiguous
        and all(other.dtype == dtype and other.flags.c_contiguous for other in others)
    )


class CpuOps(NumpyOps):
    """See ``Ops`` for what each operation computes, and ``dpsim.kernels`` for the code."""

    def __init__(self) -> None:
        super().__init__()
        self._choices = Choices()
        self._in_leaves = LeafOps(committed())
        self._operands = Buffers(self, np.float32)
        self._runs = functools.lru_cache(maxsize=4096)(self._find_runs)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return zeros that begin at a cache line, so that no vector crosses two lines."""
        return aligned(math.prod(shape) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)

    def in_leaves(self) -> Ops:
        return self._in_leaves

    def use(self, choices: Choices | None = None, table: CodeTable | None = None) -> None:
        if choices is not None:
            self._choices = choices
            self._runs.cache_clear()
        if table is not None:
            self._in_leaves.use(table=table)

    def multiply_in(self, dtype: ComputeDtype) -> None:
        super().multiply_in(dtype)
        self._in_leaves.multiply_in(dtype)

    @property
    def work_bytes(self) -> int:
        return self._operands.size_bytes

    def operand(self, side: Side, x: Array) -> Array:
        """Round x before any code computes with it, element by element, whatever the batch."""
        if self.compute_dtype == "float32":
            return x
        operand = self._operands.take(side, x.shape)
        self.round(x, _NEAREST, operand)
        return operand

    def _leaf_operands(self, x: Array, grad: Array, leaves: Leaves) -> tuple[Array, Array, Leaves]:
        """Return the operands of a weight gradient: samples of these leaves alone, and the boundaries among them."""
        if self.compute_dtype == "float32":
            return x, grad, leaves
        first, last = leaves[0], leaves[-1]
        x, grad = self.operand("left", x[first:last]), self.operand("right", grad[first:last])
        return x, grad, tuple(edge - first for edge in leaves)

    def _find_runs(
        self, operation: Operation, dtype: np.dtype[Any], leaves: Leaves, sizes: tuple[int, ...]
    ) -> list[_Run]:
        """Return each leaf with the candidate that is the fastest, if that was measured."""
        return [
            (
                start,
                stop,
                self._candidate(Problem(operation=operation, dtype=dtype.name, rows=stop - start, sizes=sizes)),
            )
            for start, stop in itertools.pairwise(leaves)
        ]

    def _candidate(self, problem: Problem) -> str:
        measured = self._choices.choice(problem)
        return unmeasured(problem) if measured is None else measured.candidate

    def product(self, x: Array, weight: Array, leaves: Leaves, out: Array) -> None:
        x, weight = self.operand("left", x), self.operand("right", weight)
        for start, stop, name in self._runs("product", x.dtype, leaves, weight.shape):
            CANDIDATES["product"][name](x[start:stop], weight, out[start:stop])

    def product_with_transposed(self, grad: Array, weight: Array, leaves: Leaves, out: Array) -> None:
        grad, weight = self.operand("left", grad), self.operand("right", weight)
        for start, stop, name in self._runs("product_with_transposed", grad.dtype, leaves, weight.shape):
            CANDIDATES["product_with_transposed"][name](grad[start:stop], weight, out[start:stop])

    def transposed_product(self, x: Array, grad: Array, leaves: Leaves, out: Array) -> None:
        x, grad, leaves = self._leaf_operands(x, grad, leaves)
        ((start, stop, name),) = self._runs("transposed_product", x.dtype, leaves, out.shape)
        CANDIDATES["transposed_product"][name](x[start:stop], grad[start:stop], out)

    def conv2d(
        self, x_bHWi: Array, weight_KKio: Array, stride: int, leaves: Leaves, out_bhwo: Array, work: Workspace
    ) -> None:
        x_bHWi, weight_KKio = self.operand("left", x_bHWi), self.operand("right", weight_KKio)
        sizes = _conv_sizes(x_bHWi.shape, weight_KKio.shape, stride)
        for start, stop, name in self._runs("conv2d", x_bHWi.dtype, leaves, sizes):
            CANDIDATES["conv2d"][name](x_bHWi[start:stop], weight_KKio, stride, out_bhwo[start:stop], work)

    def conv2d_input_gradient(
        self, grad_bhwo: Array, weight_KKio: Array, stride: int, leaves: Leaves, out_bHWi: Array, work: Workspace
    ) -> None:
        grad_bhwo, weight_KKio = self.operand("left", grad_bhwo), self.operand("right", weight_KKio)
        sizes = _conv_sizes(out_bHWi.shape, weight_KKio.shape, stride)
        for start, stop, name in self._runs("conv2d_input_gradient", grad_bhwo.dtype, leaves, sizes):
            grad, out = grad_bhwo[start:stop], out_bHWi[start:stop]
            CANDIDATES["conv2d_input_gradient"][name](grad, weight_KKio, stride, out, work)

    def conv2d_weight_gradient(
        self, x_bHWi: Array, grad_bhwo: Array, leaves: Leaves, stride: int, out_KKio: Array, work: Workspace
    ) -> None:
        x_bHWi, grad_bhwo, leaves = self._leaf_operands(x_bHWi, grad_bhwo, leaves)
        sizes = _conv_sizes(x_bHWi.shape, out_KKio.shape, stride)
        _, _, name = self._runs("conv2d_weight_gradient", x_bHWi.dtype, leaves, sizes)[0]
        CANDIDATES["conv2d_weight_gradient"][name](x_bHWi, grad_bhwo, leaves, stride, out_KKio, work)

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


def _conv_sizes(x_shape: tuple[int, ...], weight_shape: tuple[int, ...], stride: int) -> tuple[int, ...]:
    """Return ``Problem.sizes`` of a convolution."""
    kernel, _, inputs, outputs = weight_shape
    return (*x_shape[1:3], inputs, outputs, kernel, stride)


class LeafOps(CpuOps):
    """Operations that compute each leaf with the table's candidate for its samples: the bits are those it has alone.

    Neighbouring leaves are computed together if their candidate gives a sample the same bits in every batch.
    """

    def __init__(self, table: CodeTable) -> None:
        NumpyOps.__init__(self)
        self._table = table
        self._operands = Buffers(self, np.float32)
        self._runs = functools.lru_cache(maxsize=4096)(self._find_runs)

    def in_leaves(self) -> Ops:
        return self

    def use(self, choices: Choices | None = None, table: CodeTable | None = None) -> None:
        """Take the table; measured choices are not used."""
        if table is not None:
            self._table = table
            self._runs.cache_clear()

    def multiply_in(self, dtype: ComputeDtype) -> None:
        self.compute_dtype = dtype

    def _candidate(self, problem: Problem) -> str:
        return self._table.candidate(problem)

    def _find_runs(
        self, operation: Operation, dtype: np.dtype[Any], leaves: Leaves, sizes: tuple[int, ...]
    ) -> list[_Run]:
        """Return neighbouring leaves that are computed together, with their candidate."""
        runs: list[_Run] = []
        for start, stop, name in super()._find_runs(operation, dtype, leaves, sizes):
            if runs and runs[-1][2] == name and name in INDEPENDENT_OF_THE_BATCH:
                runs[-1] = (runs[-1][0], stop, name)
            else:
                runs.append((start, stop, name))
        return runs

    def products_at_once(self, x: Array, grad: Array, leaves: Leaves) -> int:
        sizes = (x.shape[1], grad.shape[1])
        names = {name for *_, name in self._runs("transposed_product", x.dtype, leaves, sizes)}
        largest = max(stop - start for start, stop in itertools.pairwise(leaves))
        if names != {"packed"} or largest > _AT_ONCE:
            return 1
        return 1 << (_AT_ONCE // max(largest, 1)).bit_length() - 1

    def transposed_product(self, x: Array, grad: Array, leaves: Leaves, out: Array) -> None:
        if self._runs("transposed_product", x.dtype, leaves, out.shape)[0][2] == "packed":
            x, grad, leaves = self._leaf_operands(x, grad, leaves)
            return weight_gradient.transposed_products(x, grad, leaves, out)
        super().transposed_product(x, grad, leaves, out)

    def leaf_sums(self, x_bC: Array, leaves: Leaves, out_C: Array) -> None:
        if leaves[-1] - leaves[0] > _AT_ONCE or not _suit(x_bC, out_C):
            return super().leaf_sums(x_bC, leaves, out_C)
        weight_gradient.transposed_products(np.ones((len(x_bC), 1), x_bC.dtype), x_bC, leaves, out_C[None])

    def conv_at_once(self, x_bHWi: Array, weight_KKio: Array, stride: int, leaves: Leaves) -> int:
        sizes = _conv_sizes(x_bHWi.shape, weight_KKio.shape, stride)
        runs = self._runs("conv2d_weight_gradient", x_bHWi.dtype, leaves, sizes)
        return _MOST_LEAVES if {name for *_, name in runs} == {"vector"} else 1
