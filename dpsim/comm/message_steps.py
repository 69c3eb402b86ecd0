"""Allreduces by messages: the algorithms that are lists of steps (``dpsim.kernels.allreduce.algorithms``).

A rank's program is made once for an algorithm and a group. Where the units of its steps begin is decided once for each
length of array.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from dpsim.algorithms import ALGORITHMS
from dpsim.collective import CollectiveKind
from dpsim.comm.compression import Compression
from dpsim.comm.message_program import Extent, Message, Program, Rounding, View, lower
from dpsim.comm.transport import Array, CollectiveSteps, PersistentRound, Request, Transport, wait
from dpsim.errors import unknown
from dpsim.kernels.allreduce import algorithms
from dpsim.kernels.allreduce.shards import shard_bounds
from dpsim.kernels.allreduce.steps import StepList
from dpsim.kernels.allreduce.tree import PartialSums


class _Bound(NamedTuple):
    """A program for arrays of one length: its views as (memory, first, stop), and its rounds as numbers of views.

    Memories are the rank's partial sums, then ``numbers`` elements of buffers, then ``codes`` 16-bit codes.
    """

    views: tuple[tuple[int, int, int], ...]
    rounds: tuple[tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...], tuple[tuple[int, ...], ...]], ...]
    numbers: int
    codes: int


_KEPT_BYTES = 2**16
_Messages = tuple[list[tuple[Array, int]], list[tuple[Array, int]]]
"""The arrays that a rank receives, and those that it sends, each with its peer."""
_Work = list[tuple[Callable[..., object], list[Array]]]
"""The functions that a rank calls after a round, and their operands."""


class MessageAllreduce:
    """The program of an algorithm as a ``PersistentAllreduce`` of this rank's partial sums ``arrays``, 1-D.

    ``order``: all ranks' partial sums, added along its tree; None: one a rank, in the algorithm's own order.
    ``replicas``: see ``dpsim.comm.allreduce.prepare``.
    """

    def __init__(
        self,
        t: Transport,
        arrays: Sequence[Array],
        algorithm: str,
        order: PartialSums | None = None,
        compression: Compression | None = None,
        kind: CollectiveKind = "allreduce",
        replicas: int = 1,
    ) -> None:
        self._transport = t
        self._arrays = arrays[: 1 if order is None else len(order.of(t.rank))]
        rounding: Rounding = "none"
        if compression is not None:
            several_nodes = algorithm != "hierarchical" or t.size > t.devices_a_node
            rounding = "each" if order is not None else "final" if several_nodes else "none"
        group = t.size, t.devices_a_node, replicas, t.rank
        self._bound = _bound(kind, algorithm, order, *group, rounding, arrays[0].size)
        self._functions: list[Callable[..., object]] = [_copy, np.add]
        if compression is not None:
            self._functions += [compression.round, compression.add, compression.encode, compression.decode]

        self._ran = False
        self._persistent: list[tuple[PersistentRound | None, _Work]] | None = None

    def start(self) -> CollectiveSteps:
        for messages, work in self._rounds():
            if isinstance(messages, tuple):
                receives, sends = messages
                pending: list[Request] = [self._transport.receive(view, peer) for view, peer in receives]
                pending += [self._transport.send(view, peer) for view, peer in sends]
                if pending:
                    yield pending
            elif messages is not None:
                yield [messages.start()]
            for function, operands in work:
                function(*operands)

    def run(self) -> None:
        if self._persistent is None:
            for pending in self.start():
                wait(self._transport, pending)
            return
        for messages, work in self._persistent:
            if messages is not None:
                messages.run()
            for function, operands in work:
                function(*operands)

    def _rounds(self) -> Iterable[tuple[_Messages | PersistentRound | None, _Work]]:
        """Return the messages of each round, and what is computed after it.

        From the second run on these are persistent where buffers are small: long ones are not kept between the runs.
        """
        if self._persistent is not None:
            return self._persistent
        bound, again, self._ran = self._bound, self._ran, True
        split = bound.numbers * self._arrays[0].itemsize
        buffers = np.empty(split + 2 * bound.codes, np.uint8)  # one piece, since malloc keeps one for the next time
        memories = [*self._arrays, buffers[:split].view(self._arrays[0].dtype), buffers[split:].view(np.uint16)]
        views = [memories[memory][first:stop] for memory, first, stop in bound.views]
        plain: list[tuple[_Messages, _Work]] = [
            (
                (
                    [(views[number], peer) for number, peer in receives],
                    [(views[number], peer) for number, peer in sends],
                ),
                [(self._functions[kind], [views[number] for number in operands]) for kind, *operands in work],
            )
            for receives, sends, work in bound.rounds
        ]
        if not again or buffers.nbytes > _KEPT_BYTES:
            return plain
        persistent = []
        for messages, work in plain:
            made = self._transport.prepare_round(*messages) if any(messages) else None
            if made is None and any(messages):
                return plain
            persistent.append((made, work))
        self._persistent = persistent
        return persistent


def _copy(source: Array, target: Array) -> None:
    target[...] = source


@functools.lru_cache(maxsize=1024)
def _bound(
    kind: CollectiveKind,
    algorithm: str,
    order: PartialSums | None,
    ranks: int,
    devices_a_node: int,
    replicas: int,
    rank: int,
    rounding: Rounding,
    elements: int,
) -> _Bound:
    own = order.of(rank) if order is not None else (rank,)
    of = _program(kind, algorithm, order, ranks, devices_a_node, replicas, rank, rounding)
    bounds = unit_bounds(kind, algorithm, replicas, elements, of.units)
    numbers, places = _laid_out(of.buffers, bounds)
    codes, code_places = _laid_out(of.code_buffers, bounds)
    indices: dict[tuple[int, int, int], int] = {}

    def index(view: View) -> int:
        start, stop = bounds[view.start], bounds[view.stop]
        key = (view.array, start, stop)
        if view.array < 0:
            offset = (code_places if view.codes else places)[-1 - view.array] - bounds[view.origin]
            key = (len(own) + view.codes, offset + start, offset + stop)
        return indices.setdefault(key, len(indices))

    def messages(those: tuple[Message, ...]) -> tuple[tuple[int, int], ...]:
        return tuple((index(view), peer) for view, peer in those if bounds[view.start] < bounds[view.stop])

    rounds = []
    for receives, sends, operations in of.rounds:
        work = tuple(
            (kind, *map(index, views)) for kind, views in operations if bounds[views[0].start] < bounds[views[0].stop]
        )
        rounds.append((messages(receives), messages(sends), work))
    return _Bound(tuple(indices), tuple(part for part in rounds if any(part)), numbers, codes)


def unit_bounds(kind: CollectiveKind, algorithm: str, replicas: int, elements: int, units: int) -> list[int]:
    """Return the ``units + 1`` elements between which the units of a collective lie."""
    cut: Callable[[int, int], list[int]] = even_bounds if algorithm == "halving-doubling" else chunk_bounds
    if kind != "allreduce" or replicas > 1:
        cut = shard_bounds
    return cut(elements, units)


def chunk_bounds(elements: int, chunks: int) -> list[int]:
    """Return ``chunks + 1`` boundaries of contiguous chunks whose sizes differ by at most one."""
    small, extra = divmod(elements, chunks)
    return [i * small + min(i, extra) for i in range(chunks + 1)]


def even_bounds(elements: int, chunks: int) -> list[int]:
    """Return ``chunk_bounds`` rounded down to where repeated cutting in the middle puts each boundary."""
    return [i * elements // chunks for i in range(chunks + 1)]


def _laid_out(buffers: Iterable[tuple[Extent, ...]], bounds: list[int]) -> tuple[int, list[int]]:
    """Return the number of elements of all buffers together, and where each begins."""
    sizes = [max(bounds[stop] - bounds[start] for start, stop in extents) for extents in buffers]
    *places, total = itertools.accumulate(sizes, initial=0)
    return total, places


@functools.lru_cache(maxsize=256)
def _program(
    kind: CollectiveKind,
    algorithm: str,
    order: PartialSums | None,
    ranks: int,
    devices_a_node: int,
    replicas: int,
    rank: int,
    rounding: Rounding,
) -> Program:
    steps = step_list(kind, algorithm, order, ranks, devices_a_node, replicas)
    return lower(steps, order.owners if order is not None else tuple(range(ranks)), rank, rounding)


def step_list(
    kind: CollectiveKind,
    algorithm: str,
    order: PartialSums | None,
    ranks: int,
    devices_a_node: int = 1,
    replicas: int = 1,
) -> StepList:
    """Return the steps of a collective by messages, as ``MessageAllreduce`` takes them. Raises ``ConfigError``."""
    if kind == "allreduce" and replicas == 1:
        return _steps(algorithm, order, ranks, devices_a_node)
    sums = order or algorithms.node_by_node(ranks, ranks // replicas)
    return algorithms.of_shards(kind, sums, replicas, ring=algorithm == "ring" and order is None)


BY_DIRECT_EXCHANGE = ("direct", "auto", "mpi", "recursive-doubling", "ring")
"""What adds along a tree by the direct exchange: ``mpi`` and ``recursive-doubling`` have another order of their own.

A ring along a tree sends to ranks that are no neighbours, and unevenly: up to twice as long as the plain one.
"""


def _steps(algorithm: str, order: PartialSums | None, ranks: int, devices_a_node: int) -> StepList:
    """Return an algorithm's steps along the tree of an ``order``, or in its own order. Raises ``ConfigError``.

    A user's own algorithm, which yields its messages itself, has no other order either.
    """
    if algorithm == "hierarchical":
        return algorithms.hierarchical(order or algorithms.node_by_node(ranks, devices_a_node), devices_a_node)
    if order is None and algorithm in algorithms.PLAIN:
        return algorithms.PLAIN[algorithm](ranks)
    if order is not None:
        if algorithm in BY_DIRECT_EXCHANGE or ALGORITHMS.find(algorithm).steps is not None:
            return algorithms.two_shot(order)
        if algorithm in algorithms.IN_TREE_ORDER:
            return algorithms.IN_TREE_ORDER[algorithm](order)
    listed = algorithms.PLAIN if order is None else (*BY_DIRECT_EXCHANGE, *algorithms.IN_TREE_ORDER)
    raise unknown("list of steps for the algorithm", algorithm, ("hierarchical", *listed))


@functools.lru_cache(maxsize=256)
def transmission(
    algorithm: str, order: PartialSums | None, ranks: int, devices_a_node: int = 1, kind: CollectiveKind = "allreduce"
) -> float:
    """Return the transmission time of a collective, in times of one array over a link, without latency or adding.

    A rank sends its messages one after another, as it receives them, and begins a round when all of the one before have
    come. Raises ``ConfigError`` where no list of steps is known.
    """
    programs = [_program(kind, algorithm, order, ranks, devices_a_node, 1, rank, "none") for rank in range(ranks)]
    sent, received, begun = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks
    for rounds in itertools.zip_longest(*(program.rounds for program in programs)):
        under_way = []
        for rank, of_rank in enumerate(rounds):
            sent[rank] = max(sent[rank], begun[rank])
            for view, peer in of_rank.sends if of_rank is not None else ():
                share = (view.stop - view.start) / programs[0].units
                sent[rank] += share
                under_way.append((sent[rank], share, peer))
        for arrival, share, rank in sorted(under_way):
            received[rank] = max(arrival, received[rank] + share)
            begun[rank] = max(begun[rank], received[rank])
    return max(begun)
