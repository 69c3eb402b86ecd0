"""The implementations of each operation that has several: BLAS, the project's kernels and their variants.

A candidate is identified by operation and name. The candidates of an operation take the same arguments and compute the
same up to rounding. NumPy's is the first: it takes every dtype, the others float32 and float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dpsim.choices import CONVOLUTIONS, Operation, Problem
from dpsim.kernels import conv, matmul, weight_gradient
from dpsim.nn.array_ops import NumpyOps
from dpsim.nn.ops import Workspace
from dpsim.replica import Array, Leaves

Candidate = Callable[..., None]
_NUMPY = NumpyOps()
_KERNEL_DTYPES = ("f", "d")


def _blas_product(x: Array, weight: Array, out: Array) -> None:
    np.matmul(x, weight, out=out)


def _blas_with_transposed(grad: Array, weight: Array, out: Array) -> None:
    np.matmul(grad, weight.T, out=out)


def _blas_transposed(x: Array, grad: Array, out: Array) -> None:
    np.matmul(x.T, grad, out=out)


def _copied(grad: Array, weight: Array, out: Array) -> None:
    matmul.streamed_product(grad, np.ascontiguousarray(weight.T), out)


def _outer(x: Array, grad: Array, out: Array) -> None:
    np.multiply(x.T, grad, out=out)


def _kernel_conv2d(x: Array, weight: Array, stride: int, out: Array, work: Workspace) -> None:
    conv.conv2d(x, weight, stride, out)


def _kernel_input_gradient(grad: Array, weight_KKio: Array, stride: int, out: Array, work: Workspace) -> None:
    kernel, _, inputs, outputs = weight_KKio.shape
    exchanged_KKoi = work.take("exchanged weight", (kernel, kernel, outputs, inputs))
    np.copyto(exchanged_KKoi, weight_KKio.transpose(0, 1, 3, 2))
    conv.conv2d_input_gradient(grad, exchanged_KKoi, stride, out)


def _kernel_weight_gradient(x: Array, grad: Array, leaves: Leaves, stride: int, out: Array, work: Workspace) -> None:
    waiting = work.take("waiting sums", (conv.waiting_sums(leaves), *out.shape))
    conv.conv2d_weight_gradient(x, grad, leaves, stride, out, waiting)


CANDIDATES: Mapping[Operation, Mapping[str, Candidate]] = {
    "product": {
        "blas": _blas_product,
        "rows": matmul.product,
        "streamed": matmul.streamed_product,
        "packed": matmul.packed_product,
    },
    "product_with_transposed": {
        "blas": _blas_with_transposed,
        "dot": matmul.product_with_transposed,
        "packed": matmul.packed_with_transposed,
        "copied": _copied,
    },
    "transposed_product": {
        "blas": _blas_transposed,
        "packed": weight_gradient.transposed_product,
        "blocked": weight_gradient.blocked_transposed_product,
        "outer": _outer,
    },
    "conv2d": {"im2col": _NUMPY.conv2d_of_samples, "vector": _kernel_conv2d},
    "conv2d_input_gradient": {"im2col": _NUMPY.conv2d_input_gradient_of_samples, "vector": _kernel_input_gradient},
    "conv2d_weight_gradient": {"im2col": _NUMPY.conv2d_weight_gradient, "vector": _kernel_weight_gradient},
}

INDEPENDENT_OF_THE_BATCH = frozenset({"rows", "streamed", "packed", "dot", "copied", "vector"})
"""Candidates with which a sample's result has the same bits in every batch."""
MOST_COPIED_WEIGHTS = 1 << 17
"""The most elements of weights that a candidate may copy for a product: half a MiB in float32."""
_LEAST_FLOPS = 1 << 18
"""The smallest product for which kernels are compiled and measured: below, their call takes longer than BLAS."""
_FEW_ROWS = 8


def has_kernels(dtype: str) -> bool:
    """Whether kernels exist for this dtype."""
    return np.dtype(dtype).char in _KERNEL_DTYPES


def candidates(problem: Problem) -> dict[str, Candidate]:
    """The implementations worth measuring for a problem, by name; NumPy's is the first."""
    every = dict(CANDIDATES[problem.operation])
    first = next(iter(every))
    if not has_kernels(problem.dtype):
        return {first: every[first]}
    if _too_small_for_kernels(problem):
        every = {name: candidate for name, candidate in every.items() if name in (first, "outer")}
    if problem.rows != 1:
        every.pop("outer", None)
    if problem.rows <= matmul.BLOCK[0]:  # with one block of rows nothing is read twice
        every.pop("blocked", None)
        if problem.operation != "transposed_product":
            every.pop("packed", None)
    if np.prod(problem.sizes[:2]) >= MOST_COPIED_WEIGHTS:
        every.pop("copied", None)
    return every


def _too_small_for_kernels(problem: Problem) -> bool:
    """Whether BLAS takes less time than calling a kernel. For the weight gradient of few samples it may not."""
    few = problem.operation == "transposed_product" and problem.rows < _FEW_ROWS
    return problem.operation not in CONVOLUTIONS and problem.flops < _LEAST_FLOPS and not few


def unmeasured(problem: Problem) -> str:
    """The candidate to use without a measurement: BLAS for products, vector code for convolutions."""
    names = list(candidates(problem))
    return "vector" if "vector" in names else names[0]


def arguments(problem: Problem, arrays: Callable[..., Array]) -> tuple[Any, ...]:
    """The arguments of a problem's candidates, without ``work``; ``arrays(role, *shape)`` makes each array.

    The roles are ``input`` (a layer's input), ``weight`` and ``out``.
    """
    rows = problem.rows
    if problem.operation.startswith("conv2d"):
        height, width, inputs, outputs, kernel, stride = problem.sizes
        pictures = (rows, height, width, inputs)
        results = (rows, -(-height // stride), -(-width // stride), outputs)
        weights = (kernel, kernel, inputs, outputs)
        if problem.operation == "conv2d":
            return arrays("input", *pictures), arrays("weight", *weights), stride, arrays("out", *results)
        if problem.operation == "conv2d_input_gradient":
            return arrays("input", *results), arrays("weight", *weights), stride, arrays("out", *pictures)
        x, grad = arrays("input", *pictures), arrays("input", *results)
        return x, grad, (0, rows), stride, arrays("out", *weights)
    inputs, outputs = problem.sizes
    if problem.operation == "product":
        return arrays("input", rows, inputs), arrays("weight", inputs, outputs), arrays("out", rows, outputs)
    if problem.operation == "product_with_transposed":
        return arrays("input", rows, outputs), arrays("weight", inputs, outputs), arrays("out", rows, inputs)
    return arrays("input", rows, inputs), arrays("input", rows, outputs), arrays("out", inputs, outputs)
