"""Two-shot: each rank adds its share of the elements and gives the result to all; and what is fused with it."""

from __future__ import annotations

import functools
from typing import Any

from dpsim.kernels.allreduce.cuda.kernels import (
    SIZE,
    flags,
    inline,
    kernel,
    lanes_of,
    memory,
    registers,
    share_of,
    sweep,
)
from dpsim.kernels.allreduce.tree import Tree


@functools.cache
def two_shot(dtype: str, tree: Tree, ranks: int, scope: str | None, each_sum: bool = False) -> Any:
    """Do one step: each rank adds its share of all slots and writes it to all results. args: slots, results, scale.

    ``each_sum``: the sum of every two is rounded to ``dtype``.
    """
    size, times = SIZE[dtype], registers.multiply

    def work(lanes: int) -> Any:
        total, store = memory.total(dtype, lanes, tree, each_sum), memory.store_each(dtype, lanes)

        @inline
        def reduce(element, args):  # type: ignore[no-untyped-def]
            slots, results, scale = args
            store(results, element * size, times(total(slots, element * size), scale))

        return reduce

    over = sweep(work(lanes_of(dtype)), work(1), lanes_of(dtype))

    @inline
    def act(step, rank, elements, args):  # type: ignore[no-untyped-def]
        over(share_of(rank, ranks, elements), elements, args)

    return kernel(act, scope, ranks, outside=True)


@functools.cache
def encoded(compression: str, tree: Tree, ranks: int, scope: str | None, each_sum: bool = False) -> Any:
    """Do three steps: encode the own slots; add a share of all codes into all; decode the result.

    ``each_sum``: the sum of every two is rounded to 16 bits, not the whole one alone.

    args: a table, all codes, the codes of the results, down, up, scale. The table: for each rank where its pairs of
    addresses begin and end (numbers of words), the pairs (numbers, codes), a rank's first one being its result.
    """
    lanes, times, word = lanes_of(compression), registers.multiply, flags.read_address

    def encode(lanes: int) -> Any:
        load, store = memory.load("float32", lanes), memory.store(compression, lanes)

        @inline
        def put(element, args):  # type: ignore[no-untyped-def]
            numbers, codes, down, _, _ = args
            store(codes + 2 * element, times(load(numbers + 4 * element), down))

        return put

    def reduce(lanes: int) -> Any:
        total, store = memory.total(compression, lanes, tree, each_sum), memory.store_each(compression, lanes)

        @inline
        def put(element, args):  # type: ignore[no-untyped-def]
            slots, results = args
            store(results, 2 * element, total(slots, 2 * element))

        return put

    def decode(lanes: int) -> Any:
        load, store = memory.load(compression, lanes), memory.store("float32", lanes)

        @inline
        def put(element, args):  # type: ignore[no-untyped-def]
            numbers, codes, _, up, scale = args
            store(numbers + 4 * element, times(times(load(codes + 2 * element), up), scale))

        return put

    over_encode, over_reduce, over_decode = (sweep(w(lanes), w(1), lanes) for w in (encode, reduce, decode))

    @inline
    def act(step, rank, elements, args):  # type: ignore[no-untyped-def]
        table, codes, results, down, up, scale = args
        everything = (0, elements[1], 0, elements[2])
        first, stop = word(table + 16 * rank), word(table + 16 * rank + 8)
        if step == 0:
            while first < stop:
                pair = table + 8 * first
                over_encode(everything, elements, (word(pair), word(pair + 8), down, up, scale))
                first += 2
        elif step == 1:
            over_reduce(share_of(rank, ranks, elements), elements, (codes, results))
        else:
            pair = table + 8 * first
            over_decode(everything, elements, (word(pair), word(pair + 8), down, up, scale))

    return kernel(act, scope, ranks)
