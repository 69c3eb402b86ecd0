"""Sums of columns in the memory of a GPU, in an order that depends on the number of rows alone.

The threads of a block that share a column add every so many rows, and one of them adds these sums. Importing this loads
numba-cuda.

A kernel takes (addresses that it reads, addresses that it writes, numbers).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import cuda

from dpsim.kernels.allreduce.cuda.kernels import SIMULATED, SIZE, THREADS, inline, kernel_of, memory

COLUMNS = 2 if SIMULATED else 32
"""Columns that a block of ``column_total`` adds; as many threads share each as it has for one."""
SHARES = THREADS // COLUMNS


@functools.cache
def column_total(dtype: str) -> Any:
    """total(first, rows, pitch, sums): the sum of ``rows`` numbers, ``pitch`` bytes apart from ``first`` on.

    All threads of a block call it, those of one column with the same arguments; the first ``COLUMNS`` get its sum.
    ``sums``: ``THREADS`` numbers of shared memory of its own.
    """
    load, zero = memory.load(dtype, 1), np.dtype(dtype).type(0)

    @inline
    def total(first, rows, pitch, sums):  # type: ignore[no-untyped-def]
        thread = cuda.threadIdx.x
        number = zero
        for row in range(thread // COLUMNS, rows, SHARES):
            number += load(first + row * pitch)[0]
        sums[thread] = number
        cuda.syncthreads()
        if thread < COLUMNS:
            for share in range(1, SHARES):
                number += sums[share * COLUMNS + thread]
        return number

    return total


@functools.cache
def column_sums(dtype: str) -> Any:
    """kernel((x,), (out,), (rows, columns)): out = the sum of the rows of x."""
    total, store, size = column_total(dtype), memory.store(dtype, 1), SIZE[dtype]
    number = np.dtype(dtype).type

    @kernel_of()
    def kernel(reads, writes, numbers):  # type: ignore[no-untyped-def]
        rows, columns = numbers
        sums = cuda.shared.array(THREADS, number)
        column = cuda.blockIdx.x * COLUMNS + cuda.threadIdx.x % COLUMNS
        own = min(column, columns - 1)
        value = total(reads[0] + size * own, rows, size * columns, sums)
        if column < columns and cuda.threadIdx.x < COLUMNS:
            store(writes[0] + size * column, (value,))

    return kernel
