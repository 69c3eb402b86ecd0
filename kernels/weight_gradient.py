"""The gradient of a layer's weights: a batch's inputs, transposed, times its output gradients, alone or in leaves.

A sum goes through the samples in order. With several leaves each has the bits that it has alone, and their sums are
added along the tree of ``allreduce.tree.leaf_tree``. Legend: M samples, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from dpsim.kernels.allreduce.tree import MOST_DOUBLINGS, leaf_program
from dpsim.kernels.cache import compiled
from dpsim.kernels.matmul import BLOCK, columns
from dpsim.kernels.scratch import LINE_BYTES, scratch
from dpsim.kernels.vector import Kernel, Value, Variable, lanes

Array = NDArray[Any]

_ROWS = BLOCK[0], 8 * BLOCK[0]
"""Rows of x^T that read a block of the gradients' columns one after the other: for few samples, and for many."""


def transposed_product(x_MK: Array, g_MN: Array, out_KN: Array) -> None:
    """out = x^T g. Writes out from its first byte to its last, some rows at a time, as memory takes it fastest."""
    _multiply(x_MK, g_MN, out_KN, _ROWS[0])


def blocked_transposed_product(x_MK: Array, g_MN: Array, out_KN: Array) -> None:
    """out = x^T g for many samples, with the same bits: a block of columns stays in the nearest cache for many rows.

    Where whole cache lines are written, they are not read first.
    """
    lines = g_MN.shape[1] % lanes(x_MK.dtype) == 0 and out_KN.ctypes.data % LINE_BYTES == 0
    _multiply(x_MK, g_MN, out_KN, _ROWS[1], past_caches=lines)


def _multiply(x_MK: Array, g_MN: Array, out_KN: Array, rows: int, *, past_caches: bool = False) -> None:
    kernel = _transposed(*_asked(x_MK, g_MN), rows, past_caches)
    kernel(x_MK, g_MN, out_KN, *_packed(x_MK, g_MN, rows), len(x_MK), x_MK.shape[1], g_MN.shape[1])


def transposed_products(x_MK: Array, g_MN: Array, leaves: tuple[int, ...], out_KN: Array) -> None:
    """out = the sum of x^T g over leaves between the boundaries ``leaves``; 2048 leaves at most.

    The leaves' sums stay in registers and the nearest cache.
    """
    first, stop = leaves[0], leaves[-1]
    x, g = x_MK[first:stop], g_MN[first:stop]
    if len(leaves) == 2:
        return transposed_product(x, g, out_KN)
    program = leaf_program(tuple(edge - first for edge in leaves))
    kernel = _transposed_of_leaves(*_asked(x, g))
    kernel(x, g, out_KN, *_packed(x, g, _ROWS[0]), program, len(x), x.shape[1], g.shape[1], len(program))


def _asked(x: Array, g: Array) -> tuple[str, int, bool]:
    """Return (dtype, tail, whether to copy first). With one block of columns x is read once: no copy then."""
    n = g.shape[1]
    return x.dtype.char, n % lanes(x.dtype), n > BLOCK[1] * lanes(x.dtype)


def _packed(x: Array, g: Array, rows: int) -> tuple[Array, Array]:
    """Return memory for the rows of x^T that are copied at once, and for g in whole vectors."""
    m, n, lane = len(x), g.shape[1], lanes(x.dtype)
    return scratch("rows", m * rows, x.dtype), scratch("gradients", m * (-(-n // lane) * lane), x.dtype)


@compiled
def _transposed(dtype: str, tail: int, packs: bool, rows: int, past_caches: bool) -> Kernel:
    kernel = Kernel(dtype, ("x", "g", "out", "rows", "gradients"), ("m", "k", "n"))

    def sums(block: _Block) -> None:
        block.add_samples(kernel.index(0), kernel["m"])
        block.write(past_caches=past_caches)

    _block_product(kernel, tail, packs, rows, sums)
    if past_caches:
        kernel.fence()
    return kernel


@compiled
def _transposed_of_leaves(dtype: str, tail: int, packs: bool) -> Kernel:
    kernel = Kernel(dtype, ("x", "g", "out", "rows", "gradients", "program"), ("m", "k", "n", "leaves"))
    stack = kernel.scratch(MOST_DOUBLINGS * BLOCK[0] * BLOCK[1] * kernel.lanes)

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
            top = depth.get() * (len(numbers) * kernel.lanes)
            for number, total in enumerate(numbers):
                kernel.store(stack, top + number * kernel.lanes, total.get())
            depth.set(depth.get() + 1)
        block.write()

    _block_product(kernel, tail, packs, _ROWS[0], sums)
    return kernel


class _Block:
    """Some rows of x^T g by some vectors of its columns, whose sums stay in registers.

    Where the kernel packs, both factors are copied first, so that what is read one after another are neighbours: rows
    that lie a multiple of 4 KiB apart share few sets of a cache.
    """

    def __init__(
        self, kernel: Kernel, start: Value, near: Value, size: int, first: Value, counts: list[int], packs: bool
    ) -> None:
        """``size`` rows, ``near`` rows after the ``start`` of those that are copied at once."""
        self._kernel, self._start, self._near, self._size = kernel, start, near, size
        self._first, self._packs = first, packs
        self._vectors = [(v * kernel.lanes, count) for v, count in enumerate(counts)]
        self._sums = [[kernel.variable() for _ in counts] for _ in range(size)]

    @property
    def numbers(self) -> list[Variable]:
        return [total for of_row in self._sums for total in of_row]

    def pack_gradients(self) -> None:
        kernel = self._kernel
        with kernel.loop(0, kernel["m"]) as sample:
            for offset, count in self._vectors:
                gradient = kernel.load(kernel["g"], sample * kernel["n"] + self._first + offset, count)
                kernel.store(kernel["gradients"], self._packed_gradients(sample) + offset, gradient)

    def _packed_gradients(self, sample: Value) -> Value:
        return self._first * self._kernel["m"] + sample * (len(self._vectors) * self._kernel.lanes)

    def _gradients(self, sample: Value) -> list[Value]:
        kernel = self._kernel
        if self._packs:
            start = self._packed_gradients(sample)
            return [kernel.load(kernel["gradients"], start + offset) for offset, _ in self._vectors]
        start = sample * kernel["n"] + self._first
        return [kernel.load(kernel["g"], start + offset, count) for offset, count in self._vectors]

    def add_samples(self, start: Value, stop: Value) -> None:
        kernel = self._kernel
        with kernel.loop(start, stop) as sample:
            gradients = self._gradients(sample)
            x, at = (
                (kernel["rows"], self._near * kernel["m"] + sample * self._size)
                if self._packs
                else (kernel["x"], sample * kernel["k"] + self._start + self._near)
            )
            for i, of_row in enumerate(self._sums):
                element = kernel.vector(kernel.load_number(x, at + i))
                for total, gradient in zip(of_row, gradients, strict=True):
                    total.add_product(element, gradient)

    def write(self, *, past_caches: bool = False) -> None:
        kernel = self._kernel
        for i, of_row in enumerate(self._sums):
            start = (self._start + self._near + i) * kernel["n"] + self._first
            for (offset, count), total in zip(self._vectors, of_row, strict=True):
                kernel.store(kernel["out"], start + offset, total.get(), count, past_caches=past_caches)


def _block_product(kernel: Kernel, tail: int, packs: bool, at_once: int, sums: Callable[[_Block], None]) -> None:
    """Compute by blocks: ``sums`` computes and writes each; ``at_once`` rows read a block of columns in turn."""
    m, k, n, none = (*(kernel[name] for name in ("m", "k", "n")), kernel.index(0))
    if packs:
        columns(kernel, n, tail, lambda at, counts: _Block(kernel, none, none, 0, at, counts, True).pack_gradients())
    with kernel.loop(0, k, at_once) as start:
        count = (k - start).at_most(at_once)

        def pack(near: Value, size: int, start: Value = start) -> None:
            with kernel.loop(0, m) as sample:
                for i in range(size):
                    element = kernel.load_number(kernel["x"], sample * k + start + near + i)
                    kernel.store(kernel["rows"], near * m + sample * size + i, element)

        def block_of(first: Value, counts: list[int], start: Value = start, count: Value = count) -> None:
            def rows(near: Value, size: int) -> None:
                sums(_Block(kernel, start, near, size, first, counts, packs))

            kernel.in_tiles(count, (BLOCK[0], 1), rows)

        if packs:
            kernel.in_tiles(count, (BLOCK[0], 1), pack)
        columns(kernel, n, tail, block_of)
