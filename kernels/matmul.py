"""Products of matrices one of which has few rows: a batch, its weights, and the gradients of both.

BLAS first copies the large matrix into an order of its own; with the 64 rows of a local batch that takes as long as a
third of the product. Here every matrix is read where it lies. An element's sum is taken in the same order whatever the
number of rows, so in the first two products a sample's result does not depend on the batch it is in.
Legend: M rows (samples), K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from dpsim.kernels.cache import compiled
from dpsim.kernels.leaves import MOST_DOUBLINGS, leaf_program
from dpsim.kernels.vector import WIDE, Kernel, Value, Variable, lanes

Array = NDArray[Any]

_BLOCK = (8, 3) if WIDE else (6, 2)
"""Rows, and vectors of columns, whose sums stay in registers: 24 of 32, or 12 of 16."""
_DOT_BLOCK = (4, 6) if WIDE else (3, 3)


def product(x_MK: Array, w_KN: Array, out_MN: Array) -> None:
    """out = x w. Reads w once from memory a block of columns; a sum goes through k in order."""
    (m, k), n = x_MK.shape, w_KN.shape[1]
    _product(x_MK.dtype.name, n % lanes(x_MK.dtype))(x_MK, w_KN, out_MN, m, k, n)


def product_with_transposed(g_MN: Array, w_KN: Array, out_MK: Array) -> None:
    """out = g w^T. A sum has a part a lane, each going through n in order; the parts are added pair by pair."""
    (m, n), k = g_MN.shape, w_KN.shape[0]
    _with_transposed(g_MN.dtype.name, n % lanes(g_MN.dtype))(g_MN, w_KN, out_MK, m, k, n)


def transposed_product(x_MK: Array, g_MN: Array, out_KN: Array) -> None:
    """out = x^T g. Writes out once, row after row; a sum goes through the samples in order."""
    (m, k), n = x_MK.shape, g_MN.shape[1]
    _transposed(x_MK.dtype.name, n % lanes(x_MK.dtype))(x_MK, g_MN, out_KN, m, k, n)


def transposed_products(x_MK: Array, g_MN: Array, leaves: tuple[int, ...], out_KN: Array) -> None:
    """out = the sum of x^T g over leaves (their boundaries are given), along the tree of ``allreduce.tree.leaf_tree``.

    Each leaf has the bits that it has alone; 2048 leaves at most. Their sums stay in registers and the nearest cache.
    """
    if len(leaves) == 2:
        transposed_product(x_MK[slice(*leaves)], g_MN[slice(*leaves)], out_KN)
        return
    (_, k), n = x_MK.shape, g_MN.shape[1]
    program = leaf_program(leaves)
    kernel = _transposed_of_leaves(x_MK.dtype.name, n % lanes(x_MK.dtype))
    kernel(x_MK, g_MN, out_KN, program, len(program), k, n)


def _columns(kernel: Kernel, n: Value, tail: int, body: Callable[[Value, list[int]], None]) -> None:
    """``body(first column, elements of each vector)`` for blocks of vectors, single vectors, and the last ``tail``."""
    one, most = kernel.lanes, _BLOCK[1]
    kernel.in_tiles(n - tail, (most * one, one), lambda at, size: body(at, [one] * (size // one)))
    if tail:
        body(n - tail, [tail])


@compiled
def _product(dtype: str, tail: int) -> Kernel:
    kernel = Kernel(dtype, ("x", "w", "out"), ("m", "k", "n"))
    x, w, out, m, k, n = (kernel[name] for name in ("x", "w", "out", "m", "k", "n"))

    def columns(first: Value, counts: list[int]) -> None:
        places = [first + v * kernel.lanes for v in range(len(counts))]

        def rows(row: Value, size: int) -> None:
            starts = [(row + i) * k for i in range(size)]
            sums = [[kernel.variable() for _ in counts] for _ in range(size)]
            with kernel.loop(0, k) as j:
                weights = [kernel.load(w, j * n + at, count) for at, count in zip(places, counts, strict=True)]
                for start, of_row in zip(starts, sums, strict=True):
                    element = kernel.vector(kernel.load_number(x, start + j))
                    for total, weight in zip(of_row, weights, strict=True):
                        total.add_product(element, weight)
            for i, of_row in enumerate(sums):
                for at, count, total in zip(places, counts, of_row, strict=True):
                    kernel.store(out, (row + i) * n + at, total.get(), count)

        kernel.in_tiles(m, (_BLOCK[0], 1), rows)

    _columns(kernel, n, tail, columns)
    return kernel


@compiled
def _transposed(dtype: str, tail: int) -> Kernel:
    kernel = Kernel(dtype, ("x", "g", "out"), ("m", "k", "n"))

    def sums(block: _Block) -> None:
        block.add_samples(kernel.index(0), kernel["m"])

    _by_blocks(kernel, tail, sums)
    return kernel


@compiled
def _transposed_of_leaves(dtype: str, tail: int) -> Kernel:
    kernel = Kernel(dtype, ("x", "g", "out", "program"), ("leaves", "k", "n"))
    stack = kernel.scratch(MOST_DOUBLINGS * _BLOCK[0] * _BLOCK[1] * kernel.lanes)

    def sums(block: _Block) -> None:
        numbers = block.numbers
        depth = kernel.variable(kernel.index(0))
        with kernel.loop(0, kernel["leaves"]) as leaf:
            start, stop, merges = (kernel.load_index(kernel["program"], leaf * 3 + field) for field in range(3))
            for total in numbers:
                total.set(kernel.vector(0.0))
            block.add_samples(start, stop)
            with kernel.loop(0, merges):
                depth.set(depth.get() - 1)
                before = depth.get() * (len(numbers) * kernel.lanes)
                for number, total in enumerate(numbers):
                    total.set(kernel.load(stack, before + number * kernel.lanes) + total.get())
            here = depth.get() * (len(numbers) * kernel.lanes)
            for number, total in enumerate(numbers):
                kernel.store(stack, here + number * kernel.lanes, total.get())
            depth.set(depth.get() + 1)

    _by_blocks(kernel, tail, sums)
    return kernel


class _Block:
    """Some rows of x^T g by some vectors of its columns, whose sums stay in registers."""

    def __init__(self, kernel: Kernel, row: Value, size: int, first: Value, counts: list[int]) -> None:
        self._kernel, self._row, self._counts = kernel, row, counts
        self._places = [first + v * kernel.lanes for v in range(len(counts))]
        self._sums = [[kernel.variable() for _ in counts] for _ in range(size)]

    @property
    def numbers(self) -> list[Variable]:
        return [total for of_row in self._sums for total in of_row]

    def add_samples(self, start: Value, stop: Value) -> None:
        kernel, vectors = self._kernel, list(zip(self._places, self._counts, strict=True))
        with kernel.loop(start, stop) as sample:
            grads = [kernel.load(kernel["g"], sample * kernel["n"] + at, count) for at, count in vectors]
            for i, of_row in enumerate(self._sums):
                element = kernel.vector(kernel.load_number(kernel["x"], sample * kernel["k"] + self._row + i))
                for total, grad in zip(of_row, grads, strict=True):
                    total.add_product(element, grad)

    def write(self) -> None:
        kernel = self._kernel
        for i, of_row in enumerate(self._sums):
            for at, count, total in zip(self._places, self._counts, of_row, strict=True):
                kernel.store(kernel["out"], (self._row + i) * kernel["n"] + at, total.get(), count)


def _by_blocks(kernel: Kernel, tail: int, sums: Callable[[_Block], None]) -> None:
    """out = what ``sums`` makes of each block."""

    def rows(row: Value, size: int) -> None:
        def columns(first: Value, counts: list[int]) -> None:
            block = _Block(kernel, row, size, first, counts)
            sums(block)
            block.write()

        _columns(kernel, kernel["n"], tail, columns)

    kernel.in_tiles(kernel["k"], (_BLOCK[0], 1), rows)


@compiled
def _with_transposed(dtype: str, tail: int) -> Kernel:
    kernel = Kernel(dtype, ("g", "w", "out"), ("m", "k", "n"))
    g, w, out, m, k, n = (kernel[name] for name in ("g", "w", "out", "m", "k", "n"))

    def inputs(first: Value, width: int) -> None:
        weight_starts = [(first + j) * n for j in range(width)]

        def rows(row: Value, size: int) -> None:
            grad_starts = [(row + i) * n for i in range(size)]
            sums = [[kernel.variable() for _ in range(width)] for _ in range(size)]

            def add(at: Value, count: int) -> None:
                weights = [kernel.load(w, start + at, count) for start in weight_starts]
                for start, of_row in zip(grad_starts, sums, strict=True):
                    grad = kernel.load(g, start + at, count)
                    for total, weight in zip(of_row, weights, strict=True):
                        total.add_product(grad, weight)

            with kernel.loop(0, n - tail, kernel.lanes) as at:
                add(at, kernel.lanes)
            if tail:
                add(n - tail, tail)
            for i, of_row in enumerate(sums):
                for j, total in enumerate(of_row):
                    kernel.store(out, (row + i) * k + first + j, kernel.sum_of_lanes(total.get()))

        kernel.in_tiles(m, (_DOT_BLOCK[0], 1), rows)

    kernel.in_tiles(k, (_DOT_BLOCK[1], 1), inputs)
    return kernel
