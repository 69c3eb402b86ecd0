"""Allreduce in place: by messages (ring, doubling, direct, hierarchical), in shared memory, and MPI's own.

An algorithm is a generator: it starts a round of messages, yields them, and goes on once they are done. Who
waits, and how, is not its business: the same code runs blocking, polled beside a backward pass, or on a thread.
Each is registered in ``dpsim.algorithms``. Sources: Thakur, Rabenseifner and Gropp 2005; Patarasuk and Yuan 2009.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np

from dpsim.algorithms import ALGORITHMS
from dpsim.comm.compression import Compression
from dpsim.comm.message_steps import run_over_messages
from dpsim.comm.transport import Array, PersistentAllreduce, Request, Transport, wait
from dpsim.comm.transport import CollectiveSteps as CollectiveSteps
from dpsim.kernels.allreduce.tree import PartialSums, fold, leaf_tree
from dpsim.registry import load
from dpsim.wire_dtype import check_compression


def chunk_bounds(elements: int, chunks: int) -> list[int]:
    """``chunks + 1`` boundaries of contiguous chunks whose sizes differ by at most one."""
    small, extra = divmod(elements, chunks)
    return [i * small + min(i, extra) for i in range(chunks + 1)]


def _chunks(data: Array, number: int) -> list[Array]:
    bounds = chunk_bounds(data.size, number)
    return [data[bounds[i] : bounds[i + 1]] for i in range(number)]


def _send(t: Transport, data: Array, to: int) -> list[Request]:
    return [t.send(data, to)] if data.size else []


def _receive(t: Transport, data: Array, source: int) -> list[Request]:
    return [t.receive(data, source)] if data.size else []


def _exchange(t: Transport, out: Array, into: Array, peer: int) -> list[Request]:
    return _receive(t, into, peer) + _send(t, out, peer)


def ring(t: Transport, data: Array) -> CollectiveSteps:
    """2(n-1) rounds around a ring: n-1 that reduce one chunk a rank, n-1 that pass the reduced chunks on."""
    n, rank = t.size, t.rank
    chunks = _chunks(data, n)
    scratch = np.empty_like(chunks[0])
    right, left = (rank + 1) % n, (rank - 1) % n
    for step in range(n - 1):
        mine = chunks[(rank - step - 1) % n]
        coming = scratch[: mine.size]
        yield _receive(t, coming, left) + _send(t, chunks[(rank - step) % n], right)
        mine += coming
    for step in range(n - 1):
        yield _receive(t, chunks[(rank - step) % n], left) + _send(t, chunks[(rank - step + 1) % n], right)


def _scatter(t: Transport, chunks: list[Array], into: Array, group: range) -> CollectiveSteps:
    """One round after which ``into[i]`` is this rank's chunk as rank ``group[i]`` has it; its own row stays."""
    n, place = len(group), group.index(t.rank)
    peers = [(place + shift) % n for shift in range(1, n)]
    pending: list[Request] = []
    for peer in reversed(peers):
        pending += _receive(t, into[peer], group[peer])
    for peer in peers:
        pending += _send(t, chunks[peer], group[peer])
    yield pending


def _reduce_scatter(t: Transport, chunks: list[Array], group: range) -> CollectiveSteps:
    """One round after which chunk i of rank ``group[i]`` is the sum of that chunk over the group."""
    n, place = len(group), group.index(t.rank)
    if n == 1:
        return
    mine = chunks[place]
    scratch = np.empty((n, mine.size), mine.dtype)
    yield from _scatter(t, chunks, scratch, group)
    _add_up([mine if row == place else scratch[row] for row in range(n)], mine)


def _add_up(rows: Sequence[Array], into: Array) -> None:
    """into = the sum of the rows along the tree over them. Overwrites rows; ``into`` may be one of them."""

    def add(a: Array, b: Array) -> Array:
        a += b
        return a

    total = fold(leaf_tree(len(rows)), rows.__getitem__, add)
    if total is not into:
        into[...] = total


def _all_gather(t: Transport, chunks: list[Array], group: range) -> CollectiveSteps:
    """One round after which every rank of the group has chunk i of rank ``group[i]``."""
    n, place = len(group), group.index(t.rank)
    if n == 1:
        return
    peers = [(place + shift) % n for shift in range(1, n)]
    pending: list[Request] = []
    for peer in reversed(peers):
        pending += _receive(t, chunks[peer], group[peer])
    for peer in peers:
        pending += _send(t, chunks[place], group[peer])
    yield pending


def _two_shot(t: Transport, data: Array, group: range, compression: Compression | None) -> CollectiveSteps:
    """The two rounds of ``direct`` among a group of ranks."""
    n, place = len(group), group.index(t.rank)
    if n == 1:
        return
    chunks = _chunks(data, n)
    if compression is None:
        yield from _reduce_scatter(t, chunks, group)
        yield from _all_gather(t, chunks, group)
        return
    mine = chunks[place]
    room = np.empty(data.size + n * mine.size, np.uint16)  # malloc keeps one piece for the next time, of two not both
    coded, contributions = room[: data.size], room[data.size :].reshape(n, mine.size)
    codes = _chunks(coded, n)
    compression.encode(data, coded)
    contributions[place] = codes[place]
    yield from _scatter(t, codes, contributions, group)
    rows = np.empty((n, mine.size), np.float32)
    for codes_of_rank, row in zip(contributions, rows, strict=True):
        compression.decode(codes_of_rank, row)
    _add_up(list(rows), mine)
    compression.encode(mine, codes[place])
    yield from _all_gather(t, codes, group)
    compression.decode(coded, data)


def direct(t: Transport, data: Array, compression: Compression | None = None) -> CollectiveSteps:
    """Two rounds: every rank sends slice j to rank j, adds what it gets, and sends its reduced slice to all.

    Contributions are added along the tree over the ranks (``dpsim.kernels.allreduce.tree``).
    """
    return _two_shot(t, data, range(t.size), compression)


def hierarchical(t: Transport, data: Array, compression: Compression | None = None) -> CollectiveSteps:
    """Four rounds on m nodes of k devices: reduce-scatter in each node, ``direct`` among the ranks of one place of all
    nodes on their slice, all-gather in each node. A rank sends 2 (k-1)/k n inside its node and 2 (m-1)/m n/k across;
    with a 16-bit ``compression`` half of the latter.
    """
    k = t.devices_a_node
    node, place = divmod(t.rank, k)
    node_ranks, across = range(node * k, node * k + k), range(place, t.size, k)
    chunks = _chunks(data, k)
    yield from _reduce_scatter(t, chunks, node_ranks)
    yield from _two_shot(t, chunks[place], across, compression)
    yield from _all_gather(t, chunks, node_ranks)


def _fold(t: Transport, data: Array, scratch: Array) -> Generator[Sequence[Request], None, tuple[int, int]]:
    """Bring a group of any size to a power of two: of the first 2r ranks, odd ones hand their data to the one below.

    Returns this rank's number in the smaller group (-1: it only waits for the result) and that group's size.
    """
    core = 1 << (t.size.bit_length() - 1)
    extra = t.size - core
    if t.rank >= 2 * extra:
        return t.rank - extra, core
    if t.rank % 2:
        yield _send(t, data, t.rank - 1)
        return -1, core
    yield _receive(t, scratch[: data.size], t.rank + 1)
    data += scratch[: data.size]
    return t.rank // 2, core


def _unfold(t: Transport, data: Array) -> CollectiveSteps:
    extra = t.size - (1 << (t.size.bit_length() - 1))
    if t.rank < 2 * extra:
        if t.rank % 2:
            yield _receive(t, data, t.rank - 1)
        else:
            yield _send(t, data, t.rank + 1)


def _real_rank(t: Transport, core_rank: int) -> int:
    extra = t.size - (1 << (t.size.bit_length() - 1))
    return core_rank * 2 if core_rank < extra else core_rank + extra


def recursive_doubling(t: Transport, data: Array) -> CollectiveSteps:
    """log2(n) rounds in which pairs at distance 1, 2, 4, ... exchange and add everything."""
    scratch = np.empty_like(data)
    core_rank, core = yield from _fold(t, data, scratch)
    distance = 1
    while core_rank >= 0 and distance < core:
        yield _exchange(t, data, scratch, _real_rank(t, core_rank ^ distance))
        # Addition commutes to the bit, so both partners hold the same sum.
        data += scratch
        distance *= 2
    yield from _unfold(t, data)


def halving_doubling(t: Transport, data: Array) -> CollectiveSteps:
    """Rabenseifner: reduce-scatter by recursive halving, then all-gather by recursive doubling."""
    scratch = np.empty_like(data)
    core_rank, core = yield from _fold(t, data, scratch)
    low, high = 0, data.size
    halves: list[tuple[int, int, int]] = []
    distance = core // 2
    while core_rank >= 0 and distance >= 1:
        peer, middle = _real_rank(t, core_rank ^ distance), (low + high) // 2
        keep, give = ((low, middle), (middle, high)) if not core_rank & distance else ((middle, high), (low, middle))
        coming = scratch[keep[0] : keep[1]]
        yield _exchange(t, data[give[0] : give[1]], coming, peer)
        data[keep[0] : keep[1]] += coming
        halves.append((peer, *give))
        low, high = keep
        distance //= 2
    for peer, give_low, give_high in reversed(halves):
        yield _exchange(t, data[low:high], data[give_low:give_high], peer)
        low, high = min(low, give_low), max(high, give_high)
    yield from _unfold(t, data)


def native(t: Transport, data: Array) -> CollectiveSteps:
    """The transport's own allreduce as one round."""
    yield [t.start_native_allreduce(data)]


class _PersistentRequest:
    """A prepared allreduce as one ``Request``."""

    __slots__ = ("_prepared",)

    def __init__(self, prepared: PersistentAllreduce) -> None:
        self._prepared = prepared

    def done(self) -> bool:
        return self._prepared.advance()

    def due_s(self) -> float | None:
        return None


def _in_memory(prepared: PersistentAllreduce) -> CollectiveSteps:
    yield [_PersistentRequest(prepared)]


def _in_shared_memory(algorithm: str) -> bool:
    return ALGORITHMS.find(algorithm).place == "shared memory"


def _instead(algorithm: str, compression: Compression | None) -> str:
    """What an algorithm of shared memory is where there is none."""
    if not _in_shared_memory(algorithm):
        return algorithm
    return "mpi" if compression is None else "direct"


class SummationOrder(NamedTuple):
    """The fixed order of addition: the slots of all ranks, and this rank's slots besides the first one, or more arrays.

    All ranks have as many ``extra`` arrays, of the length of the first; those that are no slot of a rank are not used.
    """

    slots: PartialSums
    extra: tuple[Array, ...] = ()


def start(
    t: Transport,
    data: Array,
    algorithm: str,
    compression: Compression | None = None,
    fixed: SummationOrder | None = None,
) -> CollectiveSteps:
    """Begin an allreduce (sum) of a contiguous 1-D array, in place; nothing moves before the first ``next``.

    With ``fixed`` several arrays a rank are added along the tree of their slots, into ``data``, by whatever algorithm;
    where ``mpi`` or ``recursive-doubling`` would add in another order, by the direct exchange. What the extra arrays
    hold afterwards is not defined.

    With a ``compression`` float32 numbers travel as its 16-bit codes; with ``fixed`` too they are rounded to it
    already, and every sum of two is, by whatever algorithm. Raises ``ConfigError`` for an unknown algorithm, or one
    that cannot do that. Groups of one and empty arrays have no rounds.
    """
    shared = _in_shared_memory(algorithm)
    if t.size == 1 or data.size == 0:
        return iter(())  # type: ignore[return-value]  # an exhausted iterator serves as a generator here
    if fixed is None and (own := t.own_rounds(data, algorithm, compression)) is not None:
        return own
    if shared and (prepared := t.prepare(data, algorithm, compression, fixed)) is not None:
        return _in_memory(prepared)
    if fixed is not None:
        return run_over_messages(t, [data, *fixed.extra], fixed.slots, algorithm, compression)
    algorithm = _instead(algorithm, compression)
    if compression is not None:
        check_compression(compression.dtype, algorithm)
        return (hierarchical if algorithm == "hierarchical" else direct)(t, data, compression)
    rounds: CollectiveSteps = load(ALGORITHMS.find(algorithm).steps)(t, data)
    return rounds


def warm_up(
    t: Transport,
    data: Array,
    algorithm: str,
    compression: Compression | None = None,
    fixed: SummationOrder | None = None,
) -> None:
    """Prepare an allreduce, so that it is compiled when it comes. Moves nothing."""
    if t.size > 1 and data.size and _in_shared_memory(algorithm):
        t.prepare(data, algorithm, compression, fixed)


def allreduce(
    t: Transport,
    data: Array,
    algorithm: str,
    compression: Compression | None = None,
    fixed: SummationOrder | None = None,
) -> None:
    """Sum ``data`` over the ranks, in place; returns when it is done. Same bits on every rank."""
    if t.size > 1 and data.size:
        shared = _in_shared_memory(algorithm)
        if shared and (prepared := t.prepare(data, algorithm, compression, fixed)) is not None:
            prepared.run()
            return
        native = _instead(algorithm, compression) == "mpi" and compression is None and fixed is None
        if native and t.own_rounds(data, algorithm, compression) is None:
            t.native_allreduce(data)  # blocking, it is faster than the same as a round
            return
    for pending in start(t, data, algorithm, compression, fixed):
        wait(t, pending)
