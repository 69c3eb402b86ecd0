"""The implementations of each operation that has several: which there are, how they are timed, which one is taken.

A candidate (BLAS, one of the project's kernels, a variant of it) is identified by operation and name. The candidates of
an operation take the same arguments and compute the same up to rounding. NumPy's is the first: it takes every dtype,
the others float32 and float64.

Plain training takes the fastest by measurement (``Timing``, ``dpsim.choices``). Candidates differ in bits, and two
measurements on one machine may choose differently, so reproducible training takes a committed table (``KernelTable``),
which decides by properties that are the same on every device: operation, dtype, samples of one leaf, size of the
weights, processor family and BLAS architecture. All ranks use rank 0's table.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any, get_args

import numpy as np

from dpsim import codec, processor
from dpsim.choices import CONVOLUTIONS, Choices, Operation, Problem
from dpsim.codec import Noun
from dpsim.errors import ConfigError, unknown
from dpsim.kernels import conv, matmul, weight_gradient
from dpsim.kernels.scratch import aligned
from dpsim.nn.layer import Buffers
from dpsim.nn.numpy_ops import NumpyOps
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
    """Return whether kernels exist for this dtype."""
    return np.dtype(dtype).char in _KERNEL_DTYPES


def candidates(problem: Problem) -> dict[str, Candidate]:
    """Return the implementations worth measuring for a problem, by name; NumPy's is the first."""
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
    """Return whether BLAS takes less time than calling a kernel. For the weight gradient of few samples it may not."""
    few = problem.operation == "transposed_product" and problem.rows < _FEW_ROWS
    return problem.operation not in CONVOLUTIONS and problem.flops < _LEAST_FLOPS and not few


def unmeasured(problem: Problem) -> str:
    """Return the candidate to use without a measurement: BLAS for products, vector code for convolutions."""
    names = list(candidates(problem))
    return "vector" if "vector" in names else names[0]


def arguments(problem: Problem, arrays: Callable[..., Array]) -> tuple[Any, ...]:
    """Return the arguments of a problem's candidates, without ``work``; ``arrays(role, *shape)`` makes each array.

    The roles are ``input`` (a layer's input), ``weight`` and ``out``.
    """
    rows = problem.rows
    if problem.operation not in CONVOLUTIONS:
        inputs, outputs = problem.sizes
        if problem.operation == "product":
            return arrays("input", rows, inputs), arrays("weight", inputs, outputs), arrays("out", rows, outputs)
        if problem.operation == "product_with_transposed":
            return arrays("input", rows, outputs), arrays("weight", inputs, outputs), arrays("out", rows, inputs)
        return arrays("input", rows, inputs), arrays("input", rows, outputs), arrays("out", inputs, outputs)
    height, width, inputs, outputs, kernel, stride = problem.sizes
    pictures, results = (rows, height, width, inputs), (rows, -(-height // stride), -(-width // stride), outputs)
    weights = (kernel, kernel, inputs, outputs)
    if problem.operation == "conv2d_weight_gradient":
        x, grad = arrays("input", *pictures), arrays("input", *results)
        return x, grad, (0, rows), stride, arrays("out", *weights)
    inputs_shape, out = (pictures, results) if problem.operation == "conv2d" else (results, pictures)
    return arrays("input", *inputs_shape), arrays("weight", *weights), stride, arrays("out", *out)


TABLE_SCHEMA = "dpsim.kernel-table/1"
_WORTH_PROPOSING = 1.1
"""A candidate is proposed if the table's takes more than this multiple of its time."""


def _weight_sizes(problem: Problem) -> tuple[int, int, int]:
    """Return inputs, outputs and kernel size of the weights of a problem."""
    inputs, outputs, kernel, *_ = (*problem.sizes, 1) if problem.operation not in CONVOLUTIONS else problem.sizes[2:]
    return inputs, outputs, kernel


class Rule(Noun, frozen=True):
    """The candidate for a class of problems.

    ``dtype``, ``processor`` (``dpsim.processor.family``) and ``blas`` (the architecture): empty for any. Bounds, None
    for none: samples of one leaf, inputs, outputs, and weights (inputs times outputs, of a convolution also times the
    kernel's pixels).
    """

    operation: Operation
    candidate: str
    dtype: str = ""
    processor: str = ""
    blas: str = ""
    least_rows: int | None = None
    most_rows: int | None = None
    least_inputs: int | None = None
    most_inputs: int | None = None
    least_outputs: int | None = None
    most_outputs: int | None = None
    least_weights: int | None = None
    most_weights: int | None = None

    def __post_init__(self) -> None:
        if self.candidate not in CANDIDATES[self.operation]:
            raise unknown(f"candidate for {self.operation}", self.candidate, list(CANDIDATES[self.operation]))

    def fits(self, problem: Problem) -> bool:
        """Return whether this rule applies to a problem, apart from processor and BLAS."""
        inputs, outputs, kernel = _weight_sizes(problem)
        bounds = (
            (problem.rows, self.least_rows, self.most_rows),
            (inputs, self.least_inputs, self.most_inputs),
            (outputs, self.least_outputs, self.most_outputs),
            (inputs * outputs * kernel * kernel, self.least_weights, self.most_weights),
        )
        return (
            self.operation == problem.operation
            and self.dtype in ("", problem.dtype)
            and all((least or 0) <= value <= (math.inf if most is None else most) for value, least, most in bounds)
        )


class KernelTable(Noun, frozen=True, dict=True):
    """Rules, of which the first that fits a problem decides. One must fit every problem."""

    version: int
    rules: tuple[Rule, ...]
    schema: str = TABLE_SCHEMA

    def __post_init__(self) -> None:
        if self.version < 1:
            raise ConfigError(f"a kernel table of version {self.version}", allowed="1 or more")
        for operation in get_args(Operation):
            own = [rule for rule in self.rules if rule.operation == operation]
            if not own or own[-1] != Rule(operation=operation, candidate=own[-1].candidate):
                raise ConfigError(f"a kernel table without a last rule for {operation}", allowed="one without bounds")

    def candidate(self, problem: Problem) -> str:
        """Return the candidate for a problem on this processor; NumPy's if the dtype has no kernels."""
        if not has_kernels(problem.dtype):
            return next(iter(CANDIDATES[problem.operation]))
        return next(rule.candidate for rule in self._local_rules if rule.fits(problem))

    @functools.cached_property
    def _local_rules(self) -> list[Rule]:
        """The rules for this processor and its BLAS."""
        family, blas = processor.family(), processor.blas_architecture()
        return [rule for rule in self.rules if rule.processor in ("", family) and rule.blas in ("", blas)]

    @property
    def digest(self) -> str:
        """The first 16 hexadecimal digits of the SHA-256 of its rules and version."""
        return codec.digest(self)[:16]


@functools.cache
def committed() -> KernelTable:
    """Return the table that comes with this version of dpsim."""
    with resources.as_file(resources.files("dpsim.nn") / "kernel_table.toml") as path:
        return codec.read(path, KernelTable, "kernel table", TABLE_SCHEMA)


def proposal(table: KernelTable, measured: Choices) -> KernelTable | None:
    """Return the next kernel table, with a rule for each problem class where another candidate was much faster.

    None without such problems. The proposal is not used: committing it changes the bits of reproducible training.
    """
    family, blas = processor.family(), processor.blas_architecture()
    rules = []
    for choice in measured.kernels:
        problem = choice.problem
        current = table.candidate(problem)
        if choice.time_ratios.get(current, 1.0) <= _WORTH_PROPOSING:
            continue
        inputs, outputs, _ = _weight_sizes(problem)
        rules.append(
            Rule(
                operation=problem.operation,
                candidate=choice.candidate,
                dtype=problem.dtype,
                processor=family,
                blas=blas,
                least_rows=problem.rows,
                most_rows=problem.rows,
                least_inputs=inputs,
                most_inputs=inputs,
                least_outputs=outputs,
                most_outputs=outputs,
            )
        )
    return KernelTable(version=table.version + 1, rules=(*rules, *table.rules)) if rules else None


_POOL_BYTES = 1 << 26
_MOST_COPIES = 4
_LEAST_S = 50e-6
_SLOW = 1.6


class Timing:
    """Times of each candidate for one problem, a round at a time.

    Weights and their gradients alternate among several arrays, as many as the layers of a network might have: in
    training they come from memory, not from a cache. The arrays between layers are one each. A candidate that takes
    ``_SLOW`` times as long as the best is dropped after two rounds. ``others`` are more candidates, by name.
    """

    def __init__(self, problem: Problem, others: dict[str, Candidate] | None = None) -> None:
        self.candidates = candidates(problem) | (others or {})
        self.times: dict[str, list[float]] = {name: [] for name in self.candidates}
        self._rounds = 0
        self._calls = 1
        self._copies = itertools.cycle(argument_sets(problem))

    def warm_ups(self) -> list[Callable[[], None]]:
        """Return functions that run each candidate once, so that it is compiled."""
        arrays = next(self._copies)
        return [functools.partial(candidate, *arrays) for candidate in self.candidates.values()]

    def round(self) -> None:
        """Time every candidate once, in an order that changes from round to round."""
        names = list(self.candidates)
        if not self._rounds:
            self._calls = max(1, math.ceil(_LEAST_S / max(self._timed(names[0], 1), 1e-7)))
        first = self._rounds % len(names)
        for name in names[first:] + names[:first]:
            self.times[name].append(self._timed(name, self._calls))
        self._rounds += 1
        if self._rounds == 2:
            slow_s = _SLOW * min(min(times) for times in self.times.values())
            self.candidates = {name: f for name, f in self.candidates.items() if min(self.times[name]) <= slow_s}

    def run(self, seconds: float, least: int = 4, most: int = 40) -> None:
        """Time rounds for ``seconds``, but at least ``least`` and at most ``most`` of them."""
        end_s = time.perf_counter() + seconds
        while self._rounds < most and (self._rounds < least or time.perf_counter() < end_s):
            self.round()

    def ratios(self) -> dict[str, float]:
        """Return each candidate's time over that of the fastest: the median over rounds in which both ran."""
        fastest = min(self.times, key=lambda name: float(np.median(self.times[name])))
        return {
            name: float(np.median([a / b for a, b in zip(times, self.times[fastest], strict=False)]))
            for name, times in self.times.items()
        }

    def _timed(self, name: str, calls: int) -> float:
        candidate = self.candidates[name]
        begin_s = time.perf_counter()
        for _ in range(calls):
            candidate(*next(self._copies))
        return (time.perf_counter() - begin_s) / calls


def argument_sets(problem: Problem) -> list[tuple[Any, ...]]:
    """Return sets of a problem's arguments, one for each copy of its weights or their gradients."""
    dtype = np.dtype(problem.dtype)
    between_layers: list[Array] = []

    def one_set() -> tuple[Any, ...]:
        shared = iter(list(between_layers))

        def array(role: str, *shape: int) -> Array:
            if role == "input" and (first_array := next(shared, None)) is not None:
                return first_array
            data = _filled(shape, dtype)
            if role == "input":
                between_layers.append(data)
            return data

        arrays = arguments(problem, array)
        return (*arrays, Buffers(NumpyOps(), dtype)) if problem.operation in CONVOLUTIONS else arrays

    first = one_set()
    copied_bytes = sum(array.nbytes for array in first if isinstance(array, np.ndarray)) - sum(
        array.nbytes for array in between_layers
    )
    copies = min(_MOST_COPIES, _POOL_BYTES // max(copied_bytes, 1))
    return [first, *(one_set() for _ in range(copies - 1))]


def _filled(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an array that begins at a cache line, with standard normal numbers."""
    data = aligned(math.prod(shape) * dtype.itemsize).view(dtype)
    pattern = np.random.default_rng(0).standard_normal(4096).astype(dtype)
    for start in range(0, data.size, len(pattern)):
        data[start : start + len(pattern)] = pattern[: data.size - start]
    return data.reshape(shape)
