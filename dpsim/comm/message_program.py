"""Lowers the steps of an allreduce (``dpsim.kernels.allreduce.steps``) to one rank's rounds of messages.

The steps are those of all ranks, in an order in which one process could do them. What a rank reads of another's comes
in a message, and so does what another writes to it. Each message is sent in the first round in which its numbers are
final and the memory that it goes to is free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from dpsim.kernels.allreduce.steps import SLOT, STAGING, Region, Step, StepList
from dpsim.kernels.allreduce.tree import Tree

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
    """The messages that a rank receives and sends at once, and what it then computes. The first has no messages."""

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


def lower(steps: StepList, owners: tuple[int, ...], rank: int, rounding: Rounding) -> Program:
    """Return a rank's program; ``owners``: the rank of each partial sum. All ranks of a group have the same rounds."""
    builder = _Builder(owners, rank, rounding, steps.units)
    for step in steps.steps:
        builder.add(step)
    return builder.program()


class _Buffer(NamedTuple):
    """Memory from the round in which it is filled to the round after which it is read for the last time."""

    extent: Extent
    first: int
    last: int


class _Builder:
    """A builder that assigns steps to rounds, and notes what one rank does in each.

    For every unit of memory it notes times: a message of round k is under way at 2k, and what is computed after that
    round is done at 2k + 1.
    """

    def __init__(self, owners: tuple[int, ...], rank: int, rounding: Rounding, units: int) -> None:
        self._owners, self._rank, self._rounding, self._units = owners, rank, rounding, units
        own = [number for number, owner in enumerate(owners) if owner == rank]
        self._arrays = {number: index for index, number in enumerate(own)}
        self._staging: dict[int, tuple[int, View | None]] = {}
        self._written: dict[tuple[str, int], list[int]] = defaultdict(lambda: [1] * units)
        self._used: dict[tuple[str, int], list[int]] = defaultdict(lambda: [1] * units)
        self._receives: dict[int, list[Message]] = defaultdict(list)
        self._sends: dict[int, list[Message]] = defaultdict(list)
        self._work: dict[int, list[Operation]] = defaultdict(list)
        self._encoded: dict[tuple[Region, int], View] = {}
        self._buffers: tuple[list[_Buffer], list[_Buffer]] = ([], [])

    def add(self, step: Step) -> None:
        """Add the messages that bring a step its sources, the step itself, and the messages with its sum."""
        for output in step.outputs:
            if output.memory == STAGING and output.number not in self._staging:
                result = self._buffer((output.start, output.stop), 0, _ALWAYS) if step.rank == self._rank else None
                self._staging[output.number] = (step.rank, result)
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
            self._sum(step.tree, values, [self._own_view(r) for r in outputs], level, rounded=coded)
        for output in step.outputs:
            if output not in outputs:
                number = max(level, self._time(self._used, output) // 2) + 1
                self._write(outputs[0], output, number, coded=coded)

    def program(self) -> Program:
        """Return the program of what was added, with buffers that serve one extent after another."""
        numbers, codes = map(_shared, self._buffers)

        def view(of: View) -> View:
            return of._replace(array=-1 - (codes if of.codes else numbers)[-1 - of.array]) if of.array < 0 else of

        def messages(those: list[Message], distance: Callable[[int], int]) -> tuple[Message, ...]:
            """Return the messages, nearest peer first in its direction, so that no link has several at once."""
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
        """Add a message of round ``number`` into another rank's memory."""
        to = self._holder(target)
        self._send(source, to, number, coded=coded)
        self._note(source, 2 * number)
        self._note(target, 2 * number, writes=True)
        if to == self._rank:
            target_view = self._own_view(target)
            view = self._buffer((target.start, target.stop), number, number, codes=True) if coded else target_view
            self._receives[number].append(Message(view, self._holder(source)))
            if coded:
                self._work[number].append(Operation(DECODE, (view, target_view)))

    def _send(self, source: Region, to: int, number: int, *, coded: bool) -> None:
        """Add this rank's part in sending ``source``, if it is this rank's: its codes are made once for all peers."""
        if self._holder(source) != self._rank:
            return
        view = self._own_view(source)
        if coded:
            key = (source, number)
            if key not in self._encoded:
                self._encoded[key] = self._buffer((source.start, source.stop), number - 1, number, codes=True)
                self._work[number - 1].append(Operation(ENCODE, (view, self._encoded[key])))
            view = self._encoded[key]
        self._sends[number].append(Message(view, to))

    def _value(self, source: Region, arrival: int | None, level: int, step: Step, *, coded: bool) -> View:
        """Return where a step's source is after round ``level``: received in round ``arrival``, or this rank's own."""
        extent = (source.start, source.stop)
        if arrival is not None:
            view = self._buffer(extent, arrival, level, codes=coded)
            self._receives[arrival].append(Message(view, self._holder(source)))
            if not coded:
                return view
        else:
            view = self._own_view(source)
            if not (self._rounding == "final" and step.final):
                return view
        result = self._buffer(extent, level, level)
        self._work[level].append(Operation(DECODE if arrival is not None else ROUND, (view, result)))
        return result

    def _sum(self, tree: Tree, values: list[View], outputs: list[View], level: int, *, rounded: bool) -> None:
        """Add the operations that sum ``values`` along a tree into ``outputs``, this rank's own, and round the sums.

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

    def _own_view(self, region: Region) -> View:
        """Return the view of a region of this rank's."""
        staging = None if region.memory == SLOT else self._staging[region.number][1]
        if staging is None:
            return View(self._arrays[region.number], region.start, region.stop)
        return staging._replace(start=region.start, stop=region.stop)

    def _time(self, times: dict[tuple[str, int], list[int]], region: Region) -> int:
        return max(times[region.memory, region.number][region.start : region.stop])

    def _note(self, region: Region, time: int, *, writes: bool = False) -> None:
        for times in (self._used, self._written) if writes else (self._used,):
            of_units = times[region.memory, region.number]
            for unit in range(region.start, region.stop):
                of_units[unit] = max(of_units[unit], time)


def _shared(buffers: Sequence[_Buffer]) -> list[int]:
    """Return the number of a memory for each buffer: buffers in use at the same time have different ones."""
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
    """Return what each memory holds, one extent after another."""
    extents: dict[int, list[Extent]] = defaultdict(list)
    for number, buffer in zip(numbers, buffers, strict=True):
        extents[number].append(buffer.extent)
    return tuple(tuple(extents[number]) for number in range(len(extents)))
