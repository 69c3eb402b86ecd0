"""Sums along a tree, and the rectifier of a sum with its backward pass, in the memory of a GPU.

Each array is read or written once. A kernel takes (addresses that it reads, addresses that it writes, (elements,)).
Importing this loads numba-cuda.
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


@functools.cache
def tree_sum(count: int, lanes: int) -> Any:
    """kernel(``count`` arrays, (out,), (elements,)): out = their sum along the tree (``allreduce.tree.leaf_tree``)."""
    read, store = _subtree(0, count, lanes), memory.store("float32", lanes)

    @threadless
    def work(reads, writes, at):  # type: ignore[no-untyped-def]
        store(writes[0] + at, read(reads, at))

    return elementwise(work, lanes)


def _subtree(first: int, count: int, lanes: int) -> Any:
    """read(reads, at): the sum of ``count`` arrays from the first on; a power of two of them stands on the left."""
    if count == 1:
        load = memory.load("float32", lanes)

        @threadless
        def one(reads, at):  # type: ignore[no-untyped-def]
            return load(reads[first] + at)

        return one
    half = 1 << (count - 1).bit_length() - 1
    left, right, add = _subtree(first, half, lanes), _subtree(first + half, count - half, lanes), registers.add

    @threadless
    def both(reads, at):  # type: ignore[no-untyped-def]
        return add(left(reads, at), right(reads, at))

    return both


def _of(lanes: int) -> tuple[Any, Any, Any, Any]:
    return memory.load("float32", lanes), memory.store("float32", lanes), registers.add, registers.rectify


def elementwise(work: Any, lanes: int) -> Any:
    @kernel_of()
    def kernel(reads, writes, numbers):  # type: ignore[no-untyped-def]
        pack = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        while pack < numbers[0] // lanes:
            work(reads, writes, 4 * pack * lanes)
            pack += cuda.gridDim.x * THREADS

    return kernel
