"""The kernel that executes a schedule of ``moves``: ring and halving-doubling."""

from __future__ import annotations

import functools
from typing import Any

from dpsim.kernels.allreduce.cuda.kernels import SIZE, flags, inline, kernel, lanes_of, memory, registers, sweep

PARTIAL, FINAL, COPY = range(3)
"""What a move of a schedule leaves: a partial sum, the result, a copy of a result."""
AT_ONCE = 4
"""Packs of which a thread reads the same partial sum before it reads the next one."""
MOVE_WORDS = 9
"""Bounds (packs, single elements), where its sources start in the table, how many, both targets, what it leaves."""


def _whole(load: Any, store: Any) -> tuple[Any, Any]:
    """Return how partial sums are read and written that are as large as the numbers are."""

    @inline
    def read(upper, lower, at):  # type: ignore[no-untyped-def]
        return load(upper + at)

    @inline
    def write(target, lower, leaves, at, sums):  # type: ignore[no-untyped-def]
        store(target + at, sums)

    return read, write


def _halves(lanes: int, load: Any, store: Any) -> tuple[Any, Any]:
    """Return the same for 16-bit numbers: partial sums are float32, their halves in two places."""
    load_halves, store_halves = memory.load_halves(lanes), memory.store_halves(lanes)

    @inline
    def read(upper, lower, at):  # type: ignore[no-untyped-def]
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
    """Return the rounds of a schedule, as steps. args: a table, scale.

    The table: for each step and rank where its moves begin (a number of words; those of the next begin where they end);
    the moves, ``MOVE_WORDS`` each; pairs of addresses that are their sources. The second address of a pair is 0, or
    where the lower halves of float32 sums of 16-bit numbers lie.
    """
    size, times, add, word = SIZE[dtype], registers.multiply, registers.add, flags.read_address

    def accesses(lanes: int) -> tuple[Any, Any]:
        load, store = memory.load(dtype, lanes), memory.store(dtype, lanes)
        return _halves(lanes, load, store) if size == 2 else _whole(load, store)

    def work(lanes: int) -> Any:
        read, write = accesses(lanes)

        @inline
        def put(element, args):  # type: ignore[no-untyped-def]
            source, count, target, lower, leaves, scale = args
            at = element * size
            sums = read(word(source), word(source + 8), at)
            for number in range(1, count):
                entry = source + 16 * number
                sums = add(sums, read(word(entry), word(entry + 8), at))
            if leaves == FINAL:
                sums = times(sums, scale)
            write(target, lower, leaves, at, sums)

        return put

    def grouped(lanes: int) -> Any:
        read, write = accesses(lanes)

        @inline
        def put(element, between, args):  # type: ignore[no-untyped-def]
            source, count, target, lower, leaves, scale = args
            a, step = element * size, between * size
            b, c, d = a + step, a + 2 * step, a + 3 * step
            upper, under = word(source), word(source + 8)  # once for all four
            of_a, of_b, of_c, of_d = (
                read(upper, under, a),
                read(upper, under, b),
                read(upper, under, c),
                read(upper, under, d),
            )
            for number in range(1, count):
                entry = source + 16 * number
                upper, under = word(entry), word(entry + 8)
                more_a, more_b = read(upper, under, a), read(upper, under, b)
                more_c, more_d = read(upper, under, c), read(upper, under, d)
                of_a, of_b, of_c, of_d = add(of_a, more_a), add(of_b, more_b), add(of_c, more_c), add(of_d, more_d)
            if leaves == FINAL:
                of_a, of_b, of_c, of_d = times(of_a, scale), times(of_b, scale), times(of_c, scale), times(of_d, scale)
            write(target, lower, leaves, a, of_a)
            write(target, lower, leaves, b, of_b)
            write(target, lower, leaves, c, of_c)
            write(target, lower, leaves, d, of_d)

        return put

    lanes = lanes_of(dtype)
    over = sweep(work(lanes), work(1), lanes, grouped(lanes), AT_ONCE)

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

    return kernel(act, scope, ranks, outside=outside, at_once=1)  # its many addresses take registers
