"""Products of a batch with a layer's weights, and with the weights transposed.

An element's sum is taken in the same order whatever the number of rows, so a sample's result does not depend on the
batch it is in. ``product``, ``streamed_product`` and ``packed_product`` add in the same order: they give the same bits.
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
_STREAMED_INPUTS = 16
"""Rows of the weights that are read side by side: as many streams as a processor's prefetcher follows."""
_PANEL_INPUTS = 256
"""Rows of the weights that are packed at once: a panel of them stays in the second-level cache."""


def product(x_MK: Array, w_KN: Array, out_MN: Array) -> None:
    """out = x w for few rows. Reads w where it lies, once for each block of rows; a sum goes through k in order."""
    (m, k), n = x_MK.shape, w_KN.shape[1]
    _product(x_MK.dtype.char, n % lanes(x_MK.dtype))(x_MK, w_KN, out_MN, m, k, n)


def streamed_product(x_MK: Array, w_KN: Array, out_MN: Array) -> None:
    """out = x w for few rows. Reads w from its first byte to its last, some rows at a time, as memory gives it fastest.

    A sum goes through k in order; between parts of k it is kept in ``out``.
    """
    (m, k), n = x_MK.shape, w_KN.shape[1]
    _streamed_product(x_MK.dtype.char, n % lanes(x_MK.dtype))(x_MK, w_KN, out_MN, m, k, n)


def packed_product(x_MK: Array, w_KN: Array, out_MN: Array) -> None:
    """out = x w for many rows. Copies a panel of w while the first rows read it; a sum goes through k in order.

    Rows of w that lie a multiple of 4 KiB apart share few sets of a cache, and each may lie on a page of its own. The
    copy has neither defect, and the lines of the next panel are asked for while this one is used.
    """
    (m, k), n = x_MK.shape, w_KN.shape[1]
    if m <= BLOCK[0]:
        return product(x_MK, w_KN, out_MN)
    rows, panel = _packed(x_MK)
    _packed_product(x_MK.dtype.char, n % lanes(x_MK.dtype))(x_MK, w_KN, out_MN, rows, panel, m, k, n)


def product_with_transposed(g_MN: Array, w_KN: Array, out_MK: Array) -> None:
    """out = g w^T. A sum has a part a lane, each going through n in order; the parts are added pair by pair."""
    (m, n), k = g_MN.shape, w_KN.shape[0]
    _with_transposed(g_MN.dtype.char, n % lanes(g_MN.dtype))(g_MN, w_KN, out_MK, m, k, n)


def packed_with_transposed(g_MN: Array, w_KN: Array, out_MK: Array) -> None:
    """out = g w^T for many rows. Copies a panel of w, transposed; a sum goes through n in order."""
    (m, n), k, lane = g_MN.shape, w_KN.shape[0], lanes(g_MN.dtype)
    rows, panel = _packed(g_MN)
    _packed_with_transposed(g_MN.dtype.char, k % lane, n % lane)(g_MN, w_KN, out_MK, rows, panel, m, n, k)


def _packed(x_MK: Array) -> tuple[Array, Array]:
    """Return memory for a panel's inputs of every row of x, and for a panel of weights."""
    (m, k), dtype = x_MK.shape, x_MK.dtype
    panel = scratch("panel", _PANEL_INPUTS * BLOCK[1] * lanes(dtype), dtype)
    return scratch("rows", m * min(k, _PANEL_INPUTS), dtype), panel


def columns(kernel: Kernel, n: Value, tail: int, body: Callable[[Value, list[int]], None]) -> None:
    """``body(first column, elements of each vector)`` for blocks of vectors, single vectors, and the last ``tail``."""
    one, most = kernel.lanes, BLOCK[1]
    kernel.in_tiles(n - tail, (most * one, one), lambda at, size: body(at, [one] * (size // one)))
    if tail:
        body(n - tail, [tail])


class _Sums:
    """Some rows of ``out`` by some vectors of its columns, of which there are ``n``; their sums stay in registers."""

    def __init__(self, kernel: Kernel, n: Value, row: Value, size: int, first: Value, counts: list[int]) -> None:
        self._kernel, self._size = kernel, size
        self._sums = [[kernel.variable() for _ in counts] for _ in range(size)]
        self._placed = [
            ((row + i) * n + first + v * kernel.lanes, count, total)
            for i, of_row in enumerate(self._sums)
            for v, (count, total) in enumerate(zip(counts, of_row, strict=True))
        ]

    def read(self) -> None:
        """Go on from the sums that ``out`` holds."""
        for at, count, total in self._placed:
            total.set(self._kernel.load(self._kernel["out"], at, count))

    def add(self, element: Callable[[int], Value], weights: list[Value]) -> None:
        """Add the products of each row's element and these vectors."""
        for i, of_row in enumerate(self._sums):
            of_every_lane = self._kernel.vector(element(i))
            for total, weight in zip(of_row, weights, strict=True):
                total.add_product(of_every_lane, weight)

    def write(self) -> None:
        for at, count, total in self._placed:
            self._kernel.store(self._kernel["out"], at, total.get(), count)


@compiled
def _product(dtype: str, tail: int) -> Kernel:
    kernel = Kernel(dtype, ("x", "w", "out"), ("m", "k", "n"))
    m, n = kernel["m"], kernel["n"]

    def block(first: Value, counts: list[int]) -> None:
        def rows(row: Value, size: int) -> None:
            sums = _Sums(kernel, n, row, size, first, counts)
            _add_inputs(kernel, sums, row, first, counts, kernel.index(0), kernel["k"])
            sums.write()

        kernel.in_tiles(m, (BLOCK[0], 1), rows)

    columns(kernel, n, tail, block)
    return kernel


@compiled
def _streamed_product(dtype: str, tail: int) -> Kernel:
    kernel = Kernel(dtype, ("x", "w", "out"), ("m", "k", "n"))
    m, k, n = (kernel[name] for name in ("m", "k", "n"))
    with kernel.loop(0, k, _STREAMED_INPUTS) as start:
        stop = (start + _STREAMED_INPUTS).at_most(k)

        def rows(row: Value, size: int, start: Value = start, stop: Value = stop) -> None:
            def block(first: Value, counts: list[int]) -> None:
                sums = _Sums(kernel, n, row, size, first, counts)
                with kernel.when(start > 0):
                    sums.read()
                _add_inputs(kernel, sums, row, first, counts, start, stop)
                sums.write()

            columns(kernel, n, tail, block)

        kernel.in_tiles(m, (BLOCK[0], 1), rows)
    return kernel


def _add_inputs(
    kernel: Kernel, sums: _Sums, row: Value, first: Value, counts: list[int], start: Value, stop: Value
) -> None:
    """Add the products of x's inputs from ``start`` to ``stop`` with w, both where they lie."""
    x, w, k, n = (kernel[name] for name in ("x", "w", "k", "n"))
    with kernel.loop(start, stop) as j:
        weights = [kernel.load(w, j * n + first + v * kernel.lanes, count) for v, count in enumerate(counts)]
        sums.add(lambda i, j=j: kernel.load_number(x, (row + i) * k + j), weights)  # type: ignore[misc]


def _panel_product(dtype: str, tail: int, multiply: Callable[[_Panel, Value], None]) -> Kernel:
    """Multiply by packed panels of the weights: ``multiply(panel, inputs)`` for each panel of ``inputs`` inputs."""
    kernel = Kernel(dtype, ("x", "w", "out", "rows", "panel"), ("m", "k", "n"))
    with kernel.loop(0, kernel["k"], _PANEL_INPUTS) as start:
        inputs = (kernel["k"] - start).at_most(_PANEL_INPUTS)
        _pack_rows(kernel, start, inputs)

        def panel(first: Value, counts: list[int], start: Value = start, inputs: Value = inputs) -> None:
            multiply(_Panel(kernel, start, inputs, first, counts), inputs)

        columns(kernel, kernel["n"], tail, panel)
    return kernel


@compiled
def _packed_product(dtype: str, tail: int) -> Kernel:
    def multiply(panel: _Panel, inputs: Value) -> None:
        kernel = panel.kernel
        panel.add_rows(kernel.index(0), BLOCK[0], copying=True)
        left = kernel["m"] - BLOCK[0]
        blocks = (left + (BLOCK[0] - 1)) // BLOCK[0]
        share = (inputs + blocks - 1) // blocks

        def rows(row: Value, size: int) -> None:
            if size > 1:
                first = row // BLOCK[0] * share
                panel.prefetch_next(first, (first + share).at_most(inputs))
            panel.add_rows(row + BLOCK[0], size)

        kernel.in_tiles(left, (BLOCK[0], 1), rows)

    return _panel_product(dtype, tail, multiply)


@compiled
def _packed_with_transposed(dtype: str, tail: int, input_tail: int) -> Kernel:
    """Multiply ``x``, the gradient: its inputs are w's columns, and the rows of w are the columns of ``out``."""

    def multiply(panel: _Panel, inputs: Value) -> None:
        panel.copy_transposed(input_tail)
        panel.kernel.in_tiles(panel.kernel["m"], (BLOCK[0], 1), panel.add_rows)

    return _panel_product(dtype, tail, multiply)


def _pack_rows(kernel: Kernel, start: Value, inputs: Value) -> None:
    """Copy each block of rows of x into the order in which a block of sums reads its elements."""

    def pack(row: Value, size: int) -> None:
        with kernel.loop(0, inputs) as j:
            for i in range(size):
                element = kernel.load_number(kernel["x"], (row + i) * kernel["k"] + start + j)
                kernel.store(kernel["rows"], row * inputs + j * size + i, element)

    kernel.in_tiles(kernel["m"], (BLOCK[0], 1), pack)


class _Panel:
    """Some vectors of columns of the weights, ``inputs`` of them from ``start`` on, to be multiplied by rows of x."""

    def __init__(self, kernel: Kernel, start: Value, inputs: Value, first: Value, counts: list[int]) -> None:
        self.kernel, self._start, self._inputs, self._first, self._counts = kernel, start, inputs, first, counts
        self._offsets = [v * kernel.lanes for v in range(len(counts))]
        self._width = len(counts) * kernel.lanes

    def prefetch_next(self, first: Value, stop: Value) -> None:
        """Prefetch the weights of inputs ``first`` to ``stop - 1`` of the next panel."""
        kernel = self.kernel
        with kernel.loop(first, stop) as j:
            for offset in self._offsets:
                kernel.prefetch(kernel["w"], (self._start + j) * kernel["n"] + self._first + self._width + offset)

    def copy_transposed(self, input_tail: int) -> None:
        """Copy the panel from w transposed: squares of as many rows and columns as a vector has lanes."""
        kernel, lane = self.kernel, self.kernel.lanes
        for offset, count in zip(self._offsets, self._counts, strict=True):

            def square(at: Value, width: int, offset: int = offset, count: int = count) -> None:
                row = self._first + offset
                rows = [
                    kernel.load(kernel["w"], (row + i) * kernel["k"] + self._start + at, width) for i in range(count)
                ]
                rows += [kernel.vector(0.0)] * (lane - count)
                for i, column in enumerate(kernel.transposed(rows)[:width]):
                    kernel.store(kernel["panel"], (at + i) * self._width + offset, column)

            full = self._inputs // lane * lane
            with kernel.loop(0, full, lane) as at:
                square(at, lane)
            if input_tail:
                with kernel.when(full < self._inputs):
                    square(full, input_tail)

    def _weights(self, j: Value, copying: bool) -> list[Value]:
        kernel = self.kernel
        if not copying:
            return [kernel.load(kernel["panel"], j * self._width + offset) for offset in self._offsets]
        row = (self._start + j) * kernel["n"] + self._first
        pairs = zip(self._offsets, self._counts, strict=True)
        weights = [kernel.load(kernel["w"], row + offset, count) for offset, count in pairs]
        for offset, weight in zip(self._offsets, weights, strict=True):
            kernel.store(kernel["panel"], j * self._width + offset, weight)
        return weights

    def add_rows(self, row: Value, size: int, *, copying: bool = False) -> None:
        """Add the panel's products with some rows of x to ``out``; ``copying`` reads w itself and fills the panel."""
        kernel = self.kernel
        sums = _Sums(kernel, kernel["n"], row, size, self._first, self._counts)
        with kernel.when(self._start > 0):
            sums.read()
        with kernel.loop(0, self._inputs) as j:
            at = row * self._inputs + j * size
            sums.add(lambda i, at=at: kernel.load_number(kernel["rows"], at + i), self._weights(j, copying))  # type: ignore[misc]
        sums.write()


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
