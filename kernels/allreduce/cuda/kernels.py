"""Common to all kernels: which thread works on which elements, steps, and waiting between them.

A kernel is **steps**; between two of them ranks wait for each other, in it by flags, or outside: then a launch does
steps ``first`` to ``stop - 1``. Its grid is (blocks of a rank, ranks).

The elements are ``head`` single ones, ``packs`` of several that are read and written in 16-byte accesses, and single
ones again: where arrays are aligned differently, all are single. Whatever the step, an element belongs to one thread of
one block of a rank, the same on every rank. So a block waits for the block of its number on the other ranks alone.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from numba import config, cuda

from dpsim.kernels.allreduce.cuda.launch import HEADER_WORDS
from dpsim.units import ITEM_BYTES

SIMULATED = bool(config.ENABLE_CUDASIM)  # type: ignore[attr-defined]
config.CUDA_LOW_OCCUPANCY_WARNINGS = 0  # type: ignore[attr-defined]  # every step of a small model has small grids
_HERE = "dpsim.kernels.allreduce.cuda"
memory: Any = importlib.import_module(f"{_HERE}.simulated" if SIMULATED else f"{_HERE}.memory")
registers: Any = importlib.import_module(f"{_HERE}.simulated" if SIMULATED else f"{_HERE}.registers")
flags: Any = importlib.import_module(f"{_HERE}.simulated" if SIMULATED else f"{_HERE}.flags")

THREADS = 4 if SIMULATED else 512
"""A block's. The simulator starts as many threads of the operating system for each block."""
SIZE = ITEM_BYTES
HALF, WORDS = 1 << 31, (1 << 32) - 1
POLLS = 8 if SIMULATED else 1024
"""How often a waiting thread polls a flag before it looks at the abort word and the clock: under a millisecond."""

inline: Any = functools.partial(cuda.jit, device=True, inline="always")
threadless: Any = (lambda function: function) if SIMULATED else inline
"""As ``inline``, for a function that asks for nothing of ``cuda``: the simulator takes 0.1 ms to call any other."""


def lanes_of(dtype: str) -> int:
    """Return numbers of a dtype in one 16-byte access."""
    return 16 // SIZE[dtype]


def kernel_of(at_once: int = 2) -> Any:
    """Make a function a kernel of which a multiprocessor must be able to run ``at_once`` blocks at once."""
    return cuda.jit if SIMULATED else cuda.jit(launch_bounds=(THREADS, at_once))


@inline
def behind(seen, point):  # type: ignore[no-untyped-def]
    """Return whether a flag that reads ``seen`` belongs to a point before ``point``, both modulo 2^32."""
    return ((seen - point) & WORDS) >= HALF


@inline
def _first_tile(low, block, blocks):  # type: ignore[no-untyped-def]
    """Return the block's first tile of THREADS packs from the one on that pack ``low`` is in."""
    tile = low // THREADS
    return tile + (block - tile) % blocks


def sweep(wide: Any, single: Any, lanes: int, grouped: Any = None, at_once: int = 1) -> Any:
    """over(bounds, elements, args): ``wide`` on the packs, ``single`` on the single elements that are this thread's.

    ``wide`` and ``single`` take the number of their first element, and ``args``. ``grouped`` does what ``wide`` does on
    ``at_once`` packs, and takes besides how many elements lie between two of them: a thread then has that many accesses
    to memory under way. The packs of a thread are the same.
    """

    @inline
    def rest(pack, low, high, head, args):  # type: ignore[no-untyped-def]
        stride = cuda.gridDim.x * THREADS
        while pack < high:
            if pack >= low:
                wide(head + pack * lanes, args)
            pack += stride

    @inline
    def groups(pack, low, high, head, args):  # type: ignore[no-untyped-def]
        stride = cuda.gridDim.x * THREADS
        if pack < low:
            pack += stride
        while pack + (at_once - 1) * stride < high:
            grouped(head + pack * lanes, stride * lanes, args)
            pack += at_once * stride
        rest(pack, low, high, head, args)

    over_packs = rest if grouped is None else groups

    @inline
    def over(bounds, elements, args):  # type: ignore[no-untyped-def]
        head, packs, _ = elements
        low, high, low_single, high_single = bounds
        block, blocks, thread = cuda.blockIdx.x, cuda.gridDim.x, cuda.threadIdx.x
        over_packs(_first_tile(low, block, blocks) * THREADS + thread, low, high, head, args)
        index = _first_tile(low_single, block, blocks) * THREADS + thread
        while index < high_single:
            if index >= low_single:
                single(index if index < head else index + packs * lanes, args)
            index += blocks * THREADS

    return over


@inline
def share_of(rank, ranks, elements):  # type: ignore[no-untyped-def]
    """Return the bounds of a rank's part of the elements, of ``ranks`` equal ones."""
    _, packs, singles = elements
    return (
        packs * rank // ranks,
        packs * (rank + 1) // ranks,
        singles * rank // ranks,
        singles * (rank + 1) // ranks,
    )


def plain(act: Any, at_once: int = 2) -> Any:
    """Return a kernel for steps ``first`` to ``stop - 1`` that never waits. ``act(step, rank, elements, args)``."""

    @kernel_of(at_once)
    def kernel(first, stop, first_rank, table, elements, args):  # type: ignore[no-untyped-def]
        for step in range(first, stop):
            act(step, first_rank + cuda.blockIdx.y, elements, args)

    return kernel


def on_all(work: Callable[[int], Any], lanes: int) -> Any:
    """Return a ``plain`` kernel for one rank: ``work(lanes)`` on all packs of elements, ``work(1)`` on the others."""
    over = sweep(work(lanes), work(1), lanes)

    @inline
    def act(step, rank, elements, args):  # type: ignore[no-untyped-def]
        over((0, elements[1], 0, elements[2]), elements, args)

    return plain(act)


def arguments_on_all(
    addresses: tuple[int, ...], length: int, lanes: int, numbers: tuple[Any, ...] = ()
) -> tuple[Any, ...]:
    """Return a kernel's arguments for ``on_all``; ``addresses`` not multiples of 16 have single elements alone."""
    packs = 0 if any(address % 16 for address in addresses) else length // lanes
    return (0, 1, 0, 0, (0, packs, length - packs * lanes), (*addresses, *numbers))


def blocks_for(threads: int, most: int) -> int:
    """Return the blocks of so many threads, from 1 to ``most`` (2 in the simulator, which runs one after another)."""
    return min(max(1, -(-threads // THREADS)), 2 if SIMULATED else most)


def barrier_at(scope: str, ranks: int) -> Any:
    """barrier(own, theirs, rank, point, table): wait until this block has come to a point on all ranks.

    It returns 0, or another number to all threads of the block if the kernel is to end, since a rank has not come.
    ``own``: the block's first word in this rank's flags; ``theirs``: in those of the rank of this thread's number.
    ``table``: for each rank where its abort word is; then the address of ``Watch.report`` and the limit in nanoseconds,
    0 for none.
    """
    release, acquire, word = flags.release(scope), flags.acquire(scope), flags.read_address

    @inline
    def comes(flag, point):  # type: ignore[no-untyped-def]
        left = POLLS
        while left > 0 and behind(acquire(flag), point):
            left -= 1
        return left > 0

    @inline
    def wait(flag, point, rank, peer, table):  # type: ignore[no-untyped-def]
        begin = 0
        ended = 0
        while ended == 0 and not comes(flag, point):
            time = flags.nanoseconds()
            begin = begin if begin > 0 else time
            limit = word(table + 8 * (ranks + 1))
            ended = acquire(word(table + 8 * rank))
            if ended == 0 and limit > 0 and time - begin > limit:
                ended = 1 + rank * ranks + peer
                for other in range(ranks):
                    release(word(table + 8 * other), ended)
        return ended

    @inline
    def barrier(own, theirs, rank, point, table):  # type: ignore[no-untyped-def]
        cuda.syncthreads()
        thread = cuda.threadIdx.x
        ended = 0
        if thread < ranks:
            release(theirs + 4 * rank, point)
            ended = wait(own + 4 * thread, point, rank, thread, table)
            if ended > 0 and word(table + 8 * ranks) > 0:
                release(word(table + 8 * ranks), ended)
        return cuda.syncthreads_or(ended)

    return barrier


@inline
def words_of(table, rank, ranks):  # type: ignore[no-untyped-def]
    """Return the address of a block's first word in a rank's flags; ``table`` is that of ``barrier_at``."""
    return flags.read_address(table + 8 * rank) + 4 * (HEADER_WORDS + (ranks + 1) * cuda.blockIdx.x)


def waiting(act: Any, scope: str, ranks: int, *, outside: bool, at_once: int = 2) -> Any:
    """Return a kernel that waits between its steps, and with ``outside`` before the first and after the last."""
    barrier = barrier_at(scope, ranks)
    outer = int(outside)

    @kernel_of(at_once)
    def kernel(first, stop, first_rank, table, elements, args):  # type: ignore[no-untyped-def]
        rank = first_rank + cuda.blockIdx.y
        own = words_of(table, rank, ranks)
        theirs = words_of(table, min(cuda.threadIdx.x, ranks - 1), ranks)
        point = flags.read_word(own + 4 * ranks)
        for step in range(first, stop):
            if outer or step > first:
                point = (point + 1) & WORDS
                if barrier(own, theirs, rank, point, table):
                    return
            act(step, rank, elements, args)
        if outer:
            point = (point + 1) & WORDS
            if barrier(own, theirs, rank, point, table):
                return
        if cuda.threadIdx.x == 0:
            flags.write_word(own + 4 * ranks, point)

    return kernel


def kernel(act: Any, scope: str | None, ranks: int, *, outside: bool = False, at_once: int = 2) -> Any:
    """Return ``act`` as a kernel: waiting at ``scope``, or without waiting for anybody."""
    if scope is None:
        return plain(act, at_once)
    return waiting(act, scope, ranks, outside=outside, at_once=at_once)
