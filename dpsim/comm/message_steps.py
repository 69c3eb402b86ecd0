"""An allreduce's steps (``dpsim.kernels.allreduce.steps``) as rounds of messages.

The steps are those of all ranks, in an order in which one process could do them. What a rank reads of another's comes
in a message, and so does what another writes to it. Each message is sent in the first round in which its numbers are
final and the memory that it goes to is free. A rank's program is made once for an algorithm and a group; where the
units of the steps begin is decided for each array.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from dpsim.comm.compression import Compression
from dpsim.comm.transport import Array, CollectiveSteps, Request, Transport, wait
from dpsim.kernels.allreduce import algorithms
from dpsim.kernels.allreduce.steps import SLOT, STAGING, Region, Step, StepList
from dpsim.kernels.allreduce.tree import PartialSums, Tree, slots

Rounding = Literal["none", "final", "each"]
"""Where 16 bits are sent: never; to and from the final sums, which are rounded as their sources are; or always, where
partial sums are rounded already and every sum of two is."""

COPY, ADD, ROUND, ADD_ROUNDED, ENCODE, DECODE = range(6)
"""The operations between rounds; their arguments are views, the result last."""

_ALWAYS = 1 << 30
"""The last round of buffers that serve the whole program."""


class View(NamedTuple):
    """Units ``start`` to ``stop - 1`` of this rank's partial sum ``array``, or of a buffer that begins at ``origin``.

    Arrays from -1 down are buffers: -1 is the first one of numbers, or of codes.
    """

    array: int
    start: int
    stop: int
    origin: int = 0
    codes: bool = False


class Message(NamedTuple):
    view: View
    peer: int


class Operation(NamedTuple):
    kind: int
    views: tuple[View, ...]


class Round(NamedTuple):
    """What a rank receives and sends at once, and then computes. The first one has no messages: it only computes."""

    receives: tuple[Message, ...]
    sends: tuple[Message, ...]
    work: tuple[Operation, ...]


Extent = tuple[int, int]
"""The first unit and the stop of what a buffer holds."""


class Program(NamedTuple):
    """One rank's part, for arrays of any length. A buffer is as long as the longest extent that it serves."""

    rounds: tuple[Round, ...]
    units: int
    buffers: tuple[tuple[Extent, ...], ...]
    code_buffers: tuple[tuple[Extent, ...], ...]


class _Bound(NamedTuple):
    """A program for arrays of one length: its views as (memory, first, stop), and its rounds as numbers of views.

    Memories are the rank's partial sums, then ``numbers`` elements of buffers, then ``codes`` 16-bit codes.
    """

    views: tuple[tuple[int, int, int], ...]
    rounds: tuple[tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...], tuple[tuple[int, ...], ...]], ...]
    numbers: int
    codes: int


class MessageAllreduce:
    """The program of an algorithm as a ``PersistentAllreduce`` of this rank's partial sums ``arrays``, 1-D.

    ``order``: all ranks' partial sums, added along its tree; None: one a rank, in the algorithm's own order.
    """

    def __init__(
        self,
        t: Transport,
        arrays: Sequence[Array],
        algorithm: str,
        order: PartialSums | None = None,
        compression: Compression | None = None,
    ) -> None:
        self._transport = t
        self._arrays = arrays[: 1 if order is None else len(order.of(t.rank))]
        rounding: Rounding = "none"
        if compression is not None:
            several_nodes = algorithm != "hierarchical" or t.size > t.devices_a_node
            rounding = "each" if order is not None else "final" if several_nodes else "none"
        self._bound = _bound(algorithm, order, t.size, t.devices_a_node, t.rank, rounding, arrays[0].size)
        self._functions: list[Callable[..., object]] = [_copy, np.add]
        if compression is not None:
            self._functions += [compression.round, compression.add, compression.encode, compression.decode]

    def start(self) -> CollectiveSteps:
        t, functions, arrays = self._transport, self._functions, self._arrays
        places, rounds, numbers, codes = self._bound
        split = numbers * arrays[0].itemsize
        buffers = np.empty(split + 2 * codes, np.uint8)  # one piece, since malloc keeps one for the next time, not two
        memories = [*arrays, buffers[:split].view(arrays[0].dtype), buffers[split:].view(np.uint16)]
        views = [memories[memory][first:stop] for memory, first, stop in places]
        for receives, sends, work in rounds:
            pending: list[Request] = [t.receive(views[number], peer) for number, peer in receives]
            pending += [t.send(views[number], peer) for number, peer in sends]
            if pending:
                yield pending
            for kind, *operands in work:
                functions[kind](*[views[number] for number in operands])

    def run(self) -> None:
        for pending in self.start():
            wait(self._transport, pending)


def _copy(source: Array, target: Array) -> None:
    target[...] = source


@functools.lru_cache(maxsize=1024)
def _bound(
    algorithm: str,
    order: PartialSums | None,
    ranks: int,
    devices_a_node: int,
    rank: int,
    rounding: Rounding,
    elements: int,
) -> _Bound:
    own = order.of(rank) if order is not None else (rank,)
    of = _program(algorithm, order, ranks, devices_a_node, rank, rounding)
    cut = even_bounds if algorithm == "halving-doubling" else chunk_bounds
    bounds = cut(elements, of.units)
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


def chunk_bounds(elements: int, chunks: int) -> list[int]:
    """``chunks + 1`` boundaries of contiguous chunks whose sizes differ by at most one."""
    small, extra = divmod(elements, chunks)
    return [i * small + min(i, extra) for i in range(chunks + 1)]


def even_bounds(elements: int, chunks: int) -> list[int]:
    """The same with each boundary rounded down, where cutting in the middle again and again puts it."""
    return [i * elements // chunks for i in range(chunks + 1)]


def _laid_out(buffers: Iterable[tuple[Extent, ...]], bounds: list[int]) -> tuple[int, list[int]]:
    """Elements of all buffers together, and where each begins."""
    sizes = [max(bounds[stop] - bounds[start] for start, stop in extents) for extents in buffers]
    *places, total = itertools.accumulate(sizes, initial=0)
    return total, places


@functools.lru_cache(maxsize=256)
def _program(
    algorithm: str, order: PartialSums | None, ranks: int, devices_a_node: int, rank: int, rounding: Rounding
) -> Program:
    steps = _steps(algorithm, order, ranks, devices_a_node)
    builder = _Builder(order.owners if order is not None else tuple(range(ranks)), rank, rounding, steps.units)
    for step in steps.steps:
        builder.add(step)
    return builder.program()


def _steps(algorithm: str, order: PartialSums | None, ranks: int, devices_a_node: int) -> StepList:
    """The steps of an algorithm; without an ``order`` in its own, and with one by the direct exchange if need be."""
    if algorithm == "hierarchical":
        sums = order or algorithms.node_by_node(ranks, devices_a_node)
        return algorithms.hierarchical(sums, devices_a_node)
    if order is None:
        plain = {"ring": algorithms.plain_ring, "halving-doubling": algorithms.plain_halving_doubling}
        return plain[algorithm](ranks) if algorithm in plain else algorithms.two_shot(slots(range(ranks + 1)))
    by_name = {
        "ring": algorithms.ring,
        "halving-doubling": algorithms.halving_doubling,
        "one-shot": algorithms.one_shot,
    }
    return by_name.get(algorithm, algorithms.two_shot)(order)


class _Buffer(NamedTuple):
    """Memory from the round in which it is filled to the round after which it is read for the last time."""

    extent: Extent
    first: int
    last: int


class _Builder:
    """Assigns steps to rounds, and notes what one rank does in each.

    For every unit of memory it notes times: a message of round k is under way at 2k, and what is computed after that
    round is done at 2k + 1.
    """

    def __init__(self, owners: tuple[int, ...], rank: int, rounding: Rounding, units: int) -> None:
        self._owners, self._rank, self._rounding, self._units = owners, rank, rounding, units
        own = [number for number, owner in enumerate(owners) if owner == rank]
        self._arrays = {number: place for place, number in enumerate(own)}
        self._staging: dict[int, tuple[int, View | None]] = {}
        self._written: dict[tuple[str, int], list[int]] = defaultdict(lambda: [1] * units)
        self._used: dict[tuple[str, int], list[int]] = defaultdict(lambda: [1] * units)
        self._receives: dict[int, list[Message]] = defaultdict(list)
        self._sends: dict[int, list[Message]] = defaultdict(list)
        self._work: dict[int, list[Operation]] = defaultdict(list)
        self._encoded: dict[tuple[Region, int], View] = {}
        self._buffers: tuple[list[_Buffer], list[_Buffer]] = ([], [])

    def add(self, step: Step) -> None:
        """The messages that bring a step its sources, the step itself, and the messages that its sum goes out in."""
        for output in step.outputs:
            if output.memory == STAGING:
                kept = self._buffer((output.start, output.stop), 0, _ALWAYS) if step.rank == self._rank else None
                self._staging[output.number] = (step.rank, kept)
        coded = self._rounding == "each" or (self._rounding == "final" and step.final)
        arrivals = {r: self._time(self._written, r) // 2 + 1 for r in step.sources if self._holder(r) != step.rank}
        if step.tree == 0 and arrivals and len(step.outputs) == 1:
            (source,), (output,) = step.sources, step.outputs
            self._write(source, output, max(arrivals[source], self._time(self._used, output) // 2 + 1), coded=coded)
            return
        outputs = [r for r in step.outputs if self._holder(r) == step.rank]
        level = max(
            *arrivals.values(),
            *(self._time(self._written, r) // 2 for r in step.sources if r not in arrivals),
            *(self._time(self._used, r) // 2 for r in outputs),
        )
        for source in step.sources:
            self._note(source, 2 * arrivals[source] if source in arrivals else 2 * level + 1)
        for output in outputs:
            self._note(output, 2 * level + 1, writes=True)
        for source, number in arrivals.items():
            self._send(source, step.rank, number, coded=coded)
        if step.rank == self._rank:
            values = [self._value(r, arrivals.get(r), level, step, coded=coded) for r in step.sources]
            self._sum(step.tree, values, [self._place(r) for r in outputs], level, rounded=coded)
        for output in step.outputs:
            if output not in outputs:
                number = max(level, self._time(self._used, output) // 2) + 1
                self._write(outputs[0], output, number, coded=coded)

    def program(self) -> Program:
        """What was noted, with buffers that serve one extent after another."""
        numbers, codes = map(_shared, self._buffers)

        def view(of: View) -> View:
            return of._replace(array=-1 - (codes if of.codes else numbers)[-1 - of.array]) if of.array < 0 else of

        def messages(those: list[Message], distance: Callable[[int], int]) -> tuple[Message, ...]:
            """The nearest peer first, in its direction, so that no link has several messages at once."""
            ordered = sorted(those, key=lambda message: distance(message.peer) % (max(self._owners) + 1))
            return tuple(Message(view(message.view), message.peer) for message in ordered)

        rounds = [
            Round(
                messages(self._receives[number], lambda peer: self._rank - peer),
                messages(self._sends[number], lambda peer: peer - self._rank),
                tuple(Operation(kind, tuple(map(view, views))) for kind, views in self._work[number]),
            )
            for number in range(max([*self._receives, *self._sends, *self._work], default=0) + 1)
        ]
        return Program(
            tuple(rounds), self._units, *(_extents(*of) for of in zip(self._buffers, (numbers, codes), strict=True))
        )

    def _write(self, source: Region, target: Region, number: int, *, coded: bool) -> None:
        """A message of round ``number`` into another rank's memory."""
        to = self._holder(target)
        self._send(source, to, number, coded=coded)
        self._note(source, 2 * number)
        self._note(target, 2 * number, writes=True)
        if to == self._rank:
            place = self._place(target)
            view = self._buffer((target.start, target.stop), number, number, codes=True) if coded else place
            self._receives[number].append(Message(view, self._holder(source)))
            if coded:
                self._work[number].append(Operation(DECODE, (view, place)))

    def _send(self, source: Region, to: int, number: int, *, coded: bool) -> None:
        """This rank's part in sending ``source``, if it is this rank's: its codes are made once for all peers."""
        if self._holder(source) != self._rank:
            return
        view = self._place(source)
        if coded:
            key = (source, number)
            if key not in self._encoded:
                self._encoded[key] = self._buffer((source.start, source.stop), number - 1, number, codes=True)
                self._work[number - 1].append(Operation(ENCODE, (view, self._encoded[key])))
            view = self._encoded[key]
        self._sends[number].append(Message(view, to))

    def _value(self, source: Region, arrival: int | None, level: int, step: Step, *, coded: bool) -> View:
        """Where this rank finds a source of a step after round ``level``; received in round ``arrival``, or its own."""
        extent = (source.start, source.stop)
        if arrival is not None:
            view = self._buffer(extent, arrival, level, codes=coded)
            self._receives[arrival].append(Message(view, self._holder(source)))
            if not coded:
                return view
        else:
            view = self._place(source)
            if not (self._rounding == "final" and step.final):
                return view
        result = self._buffer(extent, level, level)
        self._work[level].append(Operation(DECODE if arrival is not None else ROUND, (view, result)))
        return result

    def _sum(self, tree: Tree, values: list[View], outputs: list[View], level: int, *, rounded: bool) -> None:
        """The operations that add ``values`` along a tree into ``outputs``, this rank's own, and round what they must.

        With ``final`` rounding only the whole sum is rounded, else every one.
        """
        work = self._work[level]

        def total(node: Tree, target: View | None) -> View:
            if isinstance(node, int):
                return values[node]
            left, right = total(node[0], None), total(node[1], None)
            if target is None:
                free = (view for view in (left, right) if self._is_temporary(view))
                target = next(free, None) or self._buffer((left.start, left.stop), level, level)
            rounds = rounded and (self._rounding == "each" or target is outputs[0])
            work.append(Operation(ADD_ROUNDED if rounds else ADD, (left, right, target)))
            return target

        result = total(tree, outputs[0])
        work += [Operation(COPY, (result, output)) for output in outputs if output != result]

    def _is_temporary(self, view: View) -> bool:
        return view.array < 0 and self._buffers[view.codes][-1 - view.array].last != _ALWAYS

    def _buffer(self, extent: Extent, first: int, last: int, *, codes: bool = False) -> View:
        buffers = self._buffers[codes]
        buffers.append(_Buffer(extent, first, last))
        return View(-len(buffers), *extent, origin=extent[0], codes=codes)

    def _holder(self, region: Region) -> int:
        return self._owners[region.number] if region.memory == SLOT else self._staging[region.number][0]

    def _place(self, region: Region) -> View:
        """The place of a region of this rank's."""
        kept = None if region.memory == SLOT else self._staging[region.number][1]
        if kept is None:
            return View(self._arrays[region.number], region.start, region.stop)
        return kept._replace(start=region.start, stop=region.stop)

    def _time(self, times: dict[tuple[str, int], list[int]], region: Region) -> int:
        return max(times[region.memory, region.number][region.start : region.stop])

    def _note(self, region: Region, time: int, *, writes: bool = False) -> None:
        for times in (self._used, self._written) if writes else (self._used,):
            of_units = times[region.memory, region.number]
            for unit in range(region.start, region.stop):
                of_units[unit] = max(of_units[unit], time)


def _shared(buffers: Sequence[_Buffer]) -> list[int]:
    """A number of a memory for each buffer: those that are in use at the same time have different ones."""
    memories: list[list[_Buffer]] = []
    numbers = [0] * len(buffers)
    for number, buffer in sorted(enumerate(buffers), key=lambda item: item[1].first):
        fits = (i for i, uses in enumerate(memories) if all(use.last < buffer.first for use in uses))
        numbers[number] = next(fits, len(memories))
        if numbers[number] == len(memories):
            memories.append([])
        memories[numbers[number]].append(buffer)
    return numbers


def _extents(buffers: Sequence[_Buffer], numbers: Sequence[int]) -> tuple[tuple[Extent, ...], ...]:
    """What each memory holds, one extent after another."""
    extents: dict[int, list[Extent]] = defaultdict(list)
    for number, buffer in zip(numbers, buffers, strict=True):
        extents[number].append(buffer.extent)
    return tuple(tuple(extents[number]) for number in range(len(extents)))
