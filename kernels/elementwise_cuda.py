"""The rectifier of a sum and its backward pass in the memory of a GPU: each array read or written once.

A kernel takes (addresses that it reads, addresses that it writes, (elements,)). Importing this loads numba-cuda.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda

from dpsim.kernels.allreduce.cuda.kernels import THREADS, kernel_of, memory, registers, threadless


@functools.cache
def rectified_sum(lanes: int) -> Any:
    """kernel((a, b), (out,), (elements,)): out = max(a + b, 0); NaN stays NaN."""
    load, store, add, rectify = _of(lanes)

    @threadless
    def work(reads, writes, at):  # type: ignore[no-untyped-def]
        store(writes[0] + at, rectify(add(load(reads[0] + at), load(reads[1] + at))))

    return elementwise(work, lanes)


@functools.cache
def both_gradients(lanes: int) -> Any:
    """kernel((grad, y), (grad, copy), (elements,)): grad = copy = grad where y > 0, else 0."""
    load, store, _, _ = _of(lanes)
    keep_positive = registers.keep_positive

    @threadless
    def work(reads, writes, at):  # type: ignore[no-untyped-def]
        grad = keep_positive(load(reads[0] + at), load(reads[1] + at))
        store(writes[0] + at, grad)
        store(writes[1] + at, grad)

    return elementwise(work, lanes)


def _of(lanes: int) -> tuple[Any, Any, Any, Any]:
    return memory.load("float32", lanes), memory.store("float32", lanes), registers.add, registers.rectify


def elementwise(work: Any, lanes: int) -> Any:
    @kernel_of()
    def kernel(reads, writes, numbers):  # type: ignore[no-untyped-def]
        place = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        while place < numbers[0] // lanes:
            work(reads, writes, 4 * place * lanes)
            place += cuda.gridDim.x * THREADS

    return kernel
