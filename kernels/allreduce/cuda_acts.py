"""What the versions do in each step, each written for one dtype and one tree of slots; ``cuda_kernels`` does the rest."""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda

from dpsim.kernels.allreduce.cuda_kernels import (
    SIZE, THREADS, WORDS, flags, inline, lanes_of, meeting, memory, plain, share_of, sweep, waiting, words_of,
)  # fmt: skip
from dpsim.kernels.allreduce.tree import Tree

PARTIAL, FINAL, COPY = range(3)
"""What a move of a schedule leaves: a partial sum, the result, a copy of a result."""
MOVE_WORDS = 9
"""Bounds (packs, single elements), where its sources start in the table, how many, both targets, what it leaves."""


def kernel(act: Any, scope: str | None, ranks: int, *, outside: bool = False) -> Any:
    """``act`` as a kernel: waiting at ``scope``, or without waiting for anybody."""
    return plain(act) if scope is None else waiting(act, scope, ranks, outside=outside)


@functools.cache
def two_shot(dtype: str, tree: Tree, ranks: int, scope: str | None) -> Any:
    """One step: each rank adds its share of all slots and writes it to all results. args: slots, results, scale."""
    size, times = SIZE[dtype], memory.times

    def work(lanes: int) -> Any:
        total, store = memory.total(dtype, lanes, tree), memory.store_each(dtype, lanes)

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
def momentum(dtype: str, tree: Tree, ranks: int, scope: str | None) -> Any:
    """One step: each rank updates its share of w and v and writes it to all ranks'.

    args: slots, all w, all v, the w and v to read, scale, momentum, -rate.
    """
    size, times, add = SIZE[dtype], memory.times, memory.add

    def work(lanes: int) -> Any:
        total, load = memory.total(dtype, lanes, tree), memory.load(dtype, lanes)
        store = memory.store_each(dtype, lanes)

        @inline
        def update(element, args):  # type: ignore[no-untyped-def]
            slots, all_w, all_v, w, v, scale, keep, minus_rate = args
            at = element * size
            step = times(total(slots, at), scale)
            velocity = add(times(load(v + at), keep), step)
            store(all_v, at, velocity)
            store(all_w, at, add(load(w + at), times(velocity, minus_rate)))

        return update

    over = sweep(work(lanes_of(dtype)), work(1), lanes_of(dtype))

    @inline
    def act(step, rank, elements, args):  # type: ignore[no-untyped-def]
        over(share_of(rank, ranks, elements), elements, args)

    return kernel(act, scope, ranks, outside=True)


@functools.cache
def encoded(wire: str, tree: Tree, ranks: int, scope: str | None) -> Any:
    """Three steps: encode the own slots; add a share of all codes into all; decode the result.

    args: a table, all codes, the codes of the results, down, up, scale. The table: for each rank where its pairs of
    addresses begin and end (numbers of words), the pairs (numbers, codes), a rank's first one being its result.
    """
    lanes, times, word = lanes_of(wire), memory.times, flags.read_address

    def encode(lanes: int) -> Any:
        load, store = memory.load("float32", lanes), memory.store(wire, lanes)

        @inline
        def put(element, args):  # type: ignore[no-untyped-def]
            numbers, codes, down, _, _ = args
            store(codes + 2 * element, times(load(numbers + 4 * element), down))

        return put

    def reduce(lanes: int) -> Any:
        total, store = memory.total(wire, lanes, tree), memory.store_each(wire, lanes)

        @inline
        def put(element, args):  # type: ignore[no-untyped-def]
            slots, results = args
            store(results, 2 * element, total(slots, 2 * element))

        return put

    def decode(lanes: int) -> Any:
        load, store = memory.load(wire, lanes), memory.store("float32", lanes)

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


@functools.cache
def one_shot(dtype: str, tree: Tree, ranks: int) -> Any:
    """Two steps: each rank adds all slots into memory of its own; then copies that into its result.

    args: slots, a table of that memory (an address a rank), a table of the results, scale.
    """
    size, times, word = SIZE[dtype], memory.times, flags.read_address

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
    """Sums wait in registers until all ranks have read: as many elements at a time as there are threads.

    args as those of ``one_shot``.
    """
    lanes, size, times, word = lanes_of(dtype), SIZE[dtype], memory.times, flags.read_address
    total, store = memory.total(dtype, lanes, tree), memory.store(dtype, lanes)
    total_of_one, store_one = memory.total(dtype, 1, tree), memory.store(dtype, 1)
    meet = meeting(scope, ranks)
    outer = int(outside)

    @cuda.jit
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
            meet(own, theirs, rank, point)
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
            meet(own, theirs, rank, point)
            if number < packs:
                store(result + pack_at, pack)
            if number < singles:
                store_one(result + one_at, one)
            base += cuda.gridDim.x * THREADS
        if cuda.threadIdx.x == 0:
            flags.write_word(own + 4 * ranks, point)

    return kernel


def _whole(load: Any, store: Any) -> tuple[Any, Any]:
    """How partial sums are read and written that are as large as the numbers are."""
    word = flags.read_address

    @inline
    def read(pair, at):  # type: ignore[no-untyped-def]
        return load(word(pair) + at)

    @inline
    def write(target, lower, leaves, at, sums):  # type: ignore[no-untyped-def]
        store(target + at, sums)

    return read, write


def _halves(lanes: int, load: Any, store: Any) -> tuple[Any, Any]:
    """The same for 16-bit numbers: partial sums are float32, their halves in two places."""
    word, load_halves, store_halves = flags.read_address, memory.load_halves(lanes), memory.store_halves(lanes)

    @inline
    def read(pair, at):  # type: ignore[no-untyped-def]
        upper, lower = word(pair), word(pair + 8)
        return load(upper + at) if lower == 0 else load_halves(upper + at, lower + at)

    @inline
    def write(target, lower, leaves, at, sums):  # type: ignore[no-untyped-def]
        if leaves == PARTIAL:
            store_halves(target + at, lower + at, sums)
        else:
            store(target + at, sums)

    return read, write


@functools.cache
def scheduled(dtype: str, ranks: int, scope: str | None, outside: bool) -> Any:
    """The steps of a schedule (``cuda_schedule``). args: a table, scale.

    The table: for each step and rank where its moves begin (a number of words; those of the next begin where they end);
    the moves, ``MOVE_WORDS`` each; pairs of addresses that are their sources. The second address of a pair is 0, or
    where the lower halves of float32 sums of 16-bit numbers lie.
    """
    size, times, add, word = SIZE[dtype], memory.times, memory.add, flags.read_address

    def work(lanes: int) -> Any:
        load, store = memory.load(dtype, lanes), memory.store(dtype, lanes)
        read, write = _halves(lanes, load, store) if size == 2 else _whole(load, store)

        @inline
        def put(element, args):  # type: ignore[no-untyped-def]
            source, count, target, lower, leaves, scale = args
            at = element * size
            sums = read(source, at)
            for number in range(1, count):
                sums = add(sums, read(source + 16 * number, at))
            if leaves == FINAL:
                sums = times(sums, scale)
            write(target, lower, leaves, at, sums)

        return put

    over = sweep(work(lanes_of(dtype)), work(1), lanes_of(dtype))

    @inline
    def act(step, rank, elements, args):  # type: ignore[no-untyped-def]
        table, scale = args
        row = table + 8 * (step * ranks + rank)
        move, stop = table + 8 * word(row), table + 8 * word(row + 8)
        while move < stop:
            bounds = (word(move), word(move + 8), word(move + 16), word(move + 24))
            source = table + 8 * word(move + 32)
            rest = (source, word(move + 40), word(move + 48), word(move + 56), word(move + 64), scale)
            over(bounds, elements, rest)
            move += 8 * MOVE_WORDS

    return kernel(act, scope, ranks, outside=outside)
