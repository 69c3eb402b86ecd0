"""Sums of squares in the memory of a GPU: the digits of ``dpsim.kernels.exact_squares``, and so the CPU's bits.

Each thread adds whole numbers to digits of its own, a block adds those of its threads, and a second kernel those of the
blocks. Whole numbers may be added in any order. Importing this loads numba-cuda.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import cuda

from dpsim.kernels.allreduce.cuda.arguments import address_of
from dpsim.kernels.allreduce.cuda.kernels import SIMULATED, SIZE, flags, inline, kernel_of, memory, registers
from dpsim.kernels.allreduce.cuda.prepare import on_device
from dpsim.kernels.exact_squares import digits, first_digit

THREADS = 2 if SIMULATED else 128
_MOST_BLOCKS = 2 if SIMULATED else 128
_ELEMENTS = 2 if SIMULATED else 16
"""Elements of a thread, where a tensor has so few that fewer blocks do."""
_AT_ONCE = 8
"""Digits that a block adds at once, each by another thread."""
_SHARED = THREADS * _AT_ONCE
_MASK, _FRACTION, _ONE = (1 << 32) - 1, (1 << 52) - 1, 1 << 52


@inline
def _carry(sums, count):  # type: ignore[no-untyped-def]
    for digit in range(count - 1):
        sums[digit + 1] += sums[digit] >> 32
        sums[digit] &= _MASK


@functools.cache
def block_digits(dtype: str) -> Any:
    """kernel(table, rows, out): digits of a row's part that a block adds, float64 [2 rows, blocks, digits].

    ``table``: the addresses of two arrays, then the first element of each row, then where each ends. The grid is
    (blocks, 2 rows): the rows of the first array, then of the second one.
    """
    count, lowest = digits(dtype), 32 * first_digit(dtype)
    load, store, size = memory.load(dtype, 1), memory.store("float64", 1), SIZE[dtype]
    square, word = registers.square_bits, flags.read_address

    @kernel_of()
    def kernel(table, rows, out):  # type: ignore[no-untyped-def]
        thread, row = cuda.threadIdx.x, cuda.blockIdx.y
        x = word(table + 8 * (row // rows))
        first = word(table + 8 * (2 + row % rows)) + cuda.blockIdx.x * THREADS
        at, stop = first + thread, word(table + 8 * (2 + rows + row % rows))
        sums = cuda.local.array(count, np.int64)
        for digit in range(count):
            sums[digit] = 0
        while at < stop:
            bits = square(load(x + at * size)[0])
            exponent, fraction = bits >> 52, bits & _FRACTION
            if exponent == 2047:
                sums[count - 1] = 1  # not finite
            elif bits > 0:
                if exponent > 0:
                    fraction |= _ONE
                power = max(exponent, 1) - 1 - lowest
                digit, shift = power // 32, power % 32
                low, high = (fraction & _MASK) << shift, (fraction >> 32) << shift
                sums[digit] += low & _MASK
                sums[digit + 1] += (low >> 32) + (high & _MASK)
                sums[digit + 2] += high >> 32
            at += cuda.gridDim.x * THREADS
        of_threads = cuda.shared.array(_SHARED, np.int64)
        low = count if first >= stop else 0
        while low < count:
            width = min(_AT_ONCE, count - low)
            for digit in range(width):
                of_threads[digit * THREADS + thread] = sums[low + digit]
            cuda.syncthreads()
            digit_index = thread
            while digit_index < width:
                for other in range(1, THREADS):
                    of_threads[digit_index * THREADS] += of_threads[digit_index * THREADS + other]
                digit_index += THREADS
            cuda.syncthreads()
            if thread == 0:
                for digit in range(width):
                    sums[low + digit] = of_threads[digit * THREADS]
            cuda.syncthreads()
            low += _AT_ONCE
        if thread == 0:
            _carry(sums, count)
            begin = out + 8 * count * (row * cuda.gridDim.x + cuda.blockIdx.x)
            for digit in range(count):
                store(begin + 8 * digit, (float(sums[digit]),))

    return kernel


@functools.cache
def row_digits(dtype: str) -> Any:
    """kernel(partials, blocks, rows, out): the digits of each row, float64 [rows, digits], from those of its blocks."""
    count = digits(dtype)
    load, store = memory.load("float64", 1), memory.store("float64", 1)

    @kernel_of()
    def kernel(partials, blocks, rows, out):  # type: ignore[no-untyped-def]
        row = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        if row < rows:
            sums = cuda.local.array(count, np.int64)
            for digit in range(count):
                sums[digit] = 0
            for block in range(blocks):
                begin = partials + 8 * count * (row * blocks + block)
                for digit in range(count):
                    sums[digit] += int(load(begin + 8 * digit)[0])
            _carry(sums, count)
            sums[count - 1] = min(sums[count - 1], 1)
            for digit in range(count):
                store(out + 8 * (row * count + digit), (float(sums[digit]),))

    return kernel


class SumsOfSquares:
    """``exact_squares.sums_of_squares`` of two arrays of a device, in one of numba's streams; see there.

    ``out``: float64 [2 * rows * digits] on the device. ``zeros(size_bytes)`` allocates memory of it.
    """

    def __init__(
        self, arrays: Sequence[Any], starts: Sequence[int], stops: Sequence[int], out: Any, zeros: Any, stream: Any
    ) -> None:
        dtype = arrays[0].dtype.name
        self._of_blocks, self._of_rows, self._stream = block_digits(dtype), row_digits(dtype), stream
        longest = max((stop - start for start, stop in zip(starts, stops, strict=True)), default=0)
        self._blocks = min(max(1, -(-longest // (THREADS * _ELEMENTS))), _MOST_BLOCKS)
        self._rows = len(starts)
        partials = zeros(8 * max(1, 2 * self._rows * self._blocks * digits(dtype)))
        table = on_device([*map(address_of, arrays), *starts, *stops])
        self._held = (*arrays, out, partials, table)
        self._table, self._partials, self._out = address_of(table), address_of(partials), address_of(out)

    def __call__(self) -> None:
        """Ask the device for them."""
        if not self._rows:
            return
        self._of_blocks[(self._blocks, 2 * self._rows), THREADS, self._stream](self._table, self._rows, self._partials)
        blocks = -(-2 * self._rows // THREADS)
        self._of_rows[(blocks, 1), THREADS, self._stream](self._partials, self._blocks, 2 * self._rows, self._out)
