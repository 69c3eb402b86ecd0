"""One-shot: every rank adds all elements, and writes nothing before all ranks have read."""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda

from dpsim.kernels.allreduce.cuda.kernels import (
    SIZE,
    THREADS,
    WORDS,
    barrier_at,
    flags,
    inline,
    kernel_of,
    lanes_of,
    memory,
    plain,
    registers,
    sweep,
    words_of,
)
from dpsim.kernels.allreduce.tree import Tree


@functools.cache
def one_shot(dtype: str, tree: Tree, ranks: int) -> Any:
    """Do two steps: each rank adds all slots into memory of its own, then copies that into its result.

    args: slots, a table of that memory (an address a rank), a table of the results, scale.
    """
    size, times, word = SIZE[dtype], registers.multiply, flags.read_address

    def reduce(lanes: int) -> Any:
        total, store = memory.total(dtype, lanes, tree), memory.store(dtype, lanes)

        @inline
        def put(element, args):  # type: ignore[no-untyped-def]
            slots, own, scale = args
            store(own + element * size, times(total(slots, element * size), scale))

        return put

    def copy(lanes: int) -> Any:
        load, store = memory.load(dtype, lanes), memory.store(dtype, lanes)

        @inline
        def put(element, args):  # type: ignore[no-untyped-def]
            own, result = args
            store(result + element * size, load(own + element * size))

        return put

    over_reduce, over_copy = (sweep(w(lanes_of(dtype)), w(1), lanes_of(dtype)) for w in (reduce, copy))

    @inline
    def act(step, rank, elements, args):  # type: ignore[no-untyped-def]
        slots, own, results, scale = args
        everything = (0, elements[1], 0, elements[2])
        if step == 0:
            over_reduce(everything, elements, (slots, word(own + 8 * rank), scale))
        else:
            over_copy(everything, elements, (word(own + 8 * rank), word(results + 8 * rank)))

    return plain(act)


@functools.cache
def one_shot_waiting(dtype: str, tree: Tree, ranks: int, scope: str, outside: bool) -> Any:
    """Keep sums in registers until all ranks have read: as many elements at a time as there are threads.

    args as those of ``one_shot``.
    """
    lanes, size, times, word = lanes_of(dtype), SIZE[dtype], registers.multiply, flags.read_address
    total, store = memory.total(dtype, lanes, tree), memory.store(dtype, lanes)
    total_of_one, store_one = memory.total(dtype, 1, tree), memory.store(dtype, 1)
    barrier = barrier_at(scope, ranks)
    outer = int(outside)

    @kernel_of()
    def kernel(first, stop, first_rank, table, elements, args):  # type: ignore[no-untyped-def]
        slots, _, results, scale = args
        head, packs, singles = elements
        rank = first_rank + cuda.blockIdx.y
        own = words_of(table, rank, ranks)
        theirs = words_of(table, min(cuda.threadIdx.x, ranks - 1), ranks)
        point = flags.read_word(own + 4 * ranks)
        result = word(results + 8 * rank)
        if outer:
            point = (point + 1) & WORDS
            if barrier(own, theirs, rank, point, table):
                return
        base = 0
        while base < max(packs, singles):
            number = base + cuda.blockIdx.x * THREADS + cuda.threadIdx.x
            pack_at = (head + number * lanes) * size
            one_at = (number if number < head else number + packs * lanes) * size
            if number < packs:
                pack = times(total(slots, pack_at), scale)
            if number < singles:
                one = times(total_of_one(slots, one_at), scale)
            point = (point + 1) & WORDS
            if barrier(own, theirs, rank, point, table):
                return
            if number < packs:
                store(result + pack_at, pack)
            if number < singles:
                store_one(result + one_at, one)
            base += cuda.gridDim.x * THREADS
        if cuda.threadIdx.x == 0:
            flags.write_word(own + 4 * ranks, point)

    return kernel
