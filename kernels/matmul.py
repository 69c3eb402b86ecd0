"""Products of a batch with a layer's weights, and with the weights transposed.

An element's sum is taken in the same order whatever the number of rows, so a sample's result does not depend on the
batch it is in. ``product`` and ``packed_product`` add in the same order: they give the same bits.
Legend: M rows (samples), K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from dpsim.kernels.cache import compiled
from dpsim.kernels.scratch import scratch
from dpsim.kernels.vector import WIDE, Kernel, Value, lanes

Array = NDArray[Any]

BLOCK = (8, 3) if WIDE else (6, 2)
"""Rows, and vectors of columns, whose sums stay in registers: 24 of 32, or 12 of 16."""
_DOT_BLOCK = (4, 6) if WIDE else (3, 3)
_PANEL_INPUTS = 256
"""Rows of the weights that are packed at once: a panel of them stays in the second-level cache."""


def product(x_MK: Array, w_KN: Array, out_MN: Array) -> None:
    """out = x w for few rows. Reads w where it lies, once for each block of rows; a sum goes through k in order."""
    (m, k), n = x_MK.shape, w_KN.shape[1]
    _product(x_MK.dtype.char, n % lanes(x_MK.dtype))(x_MK, w_KN, out_MN, m, k, n)


def packed_product(x_MK: Array, w_KN: Array, out_MN: Array) -> None:
    """out = x w for many rows. Copies a panel of w while the first rows read it; a sum goes through k in order.

    Rows of w that lie a multiple of 4 KiB apart share few sets of a cache, and each may lie on a page of its own. The
    copy has neither defect, and the lines of the next panel are asked for while this one is used.
    """
    (m, k), n = x_MK.shape, w_KN.shape[1]
    if m <= BLOCK[0]:
        return product(x_MK, w_KN, out_MN)
    dtype = x_MK.dtype
    inputs = min(k, _PANEL_INPUTS)
    rows = scratch("rows", m * inputs, dtype)
    panel = scratch("panel", inputs * BLOCK[1] * lanes(dtype), dtype)
    _packed_product(dtype.char, n % lanes(dtype))(x_MK, w_KN, out_MN, rows, panel, m, k, n)


def product_with_transposed(g_MN: Array, w_KN: Array, out_MK: Array) -> None:
    """out = g w^T. A sum has a part a lane, each going through n in order; the parts are added pair by pair."""
    (m, n), k = g_MN.shape, w_KN.shape[0]
    _with_transposed(g_MN.dtype.char, n % lanes(g_MN.dtype))(g_MN, w_KN, out_MK, m, k, n)


def columns(kernel: Kernel, n: Value, tail: int, body: Callable[[Value, list[int]], None]) -> None:
    """``body(first column, elements of each vector)`` for blocks of vectors, single vectors, and the last ``tail``."""
    one, most = kernel.lanes, BLOCK[1]
    kernel.in_tiles(n - tail, (most * one, one), lambda at, size: body(at, [one] * (size // one)))
    if tail:
        body(n - tail, [tail])


@compiled
def _product(dtype: str, tail: int) -> Kernel:
    kernel = Kernel(dtype, ("x", "w", "out"), ("m", "k", "n"))
    x, w, out, m, k, n = (kernel[name] for name in ("x", "w", "out", "m", "k", "n"))

    def block(first: Value, counts: list[int]) -> None:
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

        kernel.in_tiles(m, (BLOCK[0], 1), rows)

    columns(kernel, n, tail, block)
    return kernel


@compiled
def _packed_product(dtype: str, tail: int) -> Kernel:
    """``rows`` holds a block of rows of x element by element, so that the rows of a block are neighbours."""
    kernel = Kernel(dtype, ("x", "w", "out", "rows", "panel"), ("m", "k", "n"))
    m, k, n = (kernel[name] for name in ("m", "k", "n"))
    with kernel.loop(0, k, _PANEL_INPUTS) as start:
        inputs = (k - start).at_most(_PANEL_INPUTS)

        def pack(row: Value, size: int, start: Value = start, inputs: Value = inputs) -> None:
            with kernel.loop(0, inputs) as j:
                for i in range(size):
                    element = kernel.load_number(kernel["x"], (row + i) * k + start + j)
                    kernel.store(kernel["rows"], row * inputs + j * size + i, element)

        kernel.in_tiles(m, (BLOCK[0], 1), pack)

        def panel(first: Value, counts: list[int], start: Value = start, inputs: Value = inputs) -> None:
            _Panel(kernel, start, inputs, first, counts).multiply()

        columns(kernel, n, tail, panel)
    return kernel


class _Panel:
    """Some vectors of columns of w, ``inputs`` rows from ``start`` on, times all rows of x; added to ``out``."""

    def __init__(self, kernel: Kernel, start: Value, inputs: Value, first: Value, counts: list[int]) -> None:
        self._kernel, self._start, self._inputs, self._first, self._counts = kernel, start, inputs, first, counts
        self._places = [v * kernel.lanes for v in range(len(counts))]
        self._width = len(counts) * kernel.lanes

    def multiply(self) -> None:
        kernel = self._kernel
        self._block(kernel.index(0), BLOCK[0], copying=True)
        left = kernel["m"] - BLOCK[0]
        blocks = (left + (BLOCK[0] - 1)) // BLOCK[0]
        share = (self._inputs + blocks - 1) // blocks

        def block(row: Value, size: int) -> None:
            if size > 1:
                first = row // BLOCK[0] * share
                self._ask_for_the_next(first, (first + share).at_most(self._inputs))
            self._block(row + BLOCK[0], size, copying=False)

        kernel.in_tiles(left, (BLOCK[0], 1), block)

    def _ask_for_the_next(self, first: Value, stop: Value) -> None:
        kernel = self._kernel
        with kernel.loop(first, stop) as j:
            for place in self._places:
                kernel.prefetch(kernel["w"], (self._start + j) * kernel["n"] + self._first + self._width + place)

    def _weights(self, j: Value, copying: bool) -> list[Value]:
        kernel = self._kernel
        if not copying:
            return [kernel.load(kernel["panel"], j * self._width + place) for place in self._places]
        row = (self._start + j) * kernel["n"] + self._first
        pairs = zip(self._places, self._counts, strict=True)
        weights = [kernel.load(kernel["w"], row + place, count) for place, count in pairs]
        for place, weight in zip(self._places, weights, strict=True):
            kernel.store(kernel["panel"], j * self._width + place, weight)
        return weights

    def _block(self, row: Value, size: int, *, copying: bool) -> None:
        kernel, n = self._kernel, self._kernel["n"]
        sums = [[kernel.variable() for _ in self._counts] for _ in range(size)]
        placed = [
            ((row + i) * n + self._first + place, count, total)
            for i, of_row in enumerate(sums)
            for place, count, total in zip(self._places, self._counts, of_row, strict=True)
        ]
        with kernel.when(self._start > 0):
            for at, count, total in placed:
                total.set(kernel.load(kernel["out"], at, count))
        with kernel.loop(0, self._inputs) as j:
            weights = self._weights(j, copying)
            for i, of_row in enumerate(sums):
                element = kernel.vector(kernel.load_number(kernel["rows"], row * self._inputs + j * size + i))
                for total, weight in zip(of_row, weights, strict=True):
                    total.add_product(element, weight)
        for at, count, total in placed:
            kernel.store(kernel["out"], at, total.get(), count)


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
