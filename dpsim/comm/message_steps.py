"""An allreduce's steps (``dpsim.kernels.allreduce.steps``) by messages: for slots that are added in the fixed order.

The steps are those of all ranks, in an order in which one process could do them. What a rank reads of another's comes
in a message, and so does what another writes to it. A message that no step before changes leaves at once. All that is
sent is a node of the tree, so with 16 bits on the wire, where nodes are rounded, messages are their codes.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dpsim.comm.compression import Compression
from dpsim.comm.transport import Array, CollectiveSteps, Request, Transport
from dpsim.kernels.allreduce import algorithms
from dpsim.kernels.allreduce.steps import SLOT, Region, Step
from dpsim.kernels.allreduce.tree import PartialSums, fold


class _Message(NamedTuple):
    """``here``, of rank ``source``, goes to ``there``, of rank ``target``: read by a step, or ``written`` by it.

    ``early``: it can be sent before the first step. What is read is not kept: ``there`` is ``here``.
    """

    source: int
    target: int
    here: Region
    there: Region
    step: int
    written: bool
    early: bool


class _Plan(NamedTuple):
    steps: tuple[Step, ...]
    early: tuple[_Message, ...]
    of_step: tuple[tuple[tuple[_Message, ...], tuple[_Message, ...]], ...]
    """What each step reads, and what it writes, in messages that are not early."""


def run_over_messages(
    t: Transport, arrays: Sequence[Array], order: PartialSums, algorithm: str, compression: Compression | None = None
) -> CollectiveSteps:
    """Add the slots of all ranks into every rank's first slot; ``arrays`` are this rank's own, 1-D.

    ``ring``, ``halving-doubling``, ``one-shot``, ``hierarchical``; every other one is the direct exchange. With a
    ``compression`` the arrays hold numbers of its 16 bits, and every sum is rounded to them.
    """
    plan = _plan(algorithm, order, arrays[0].size, t.devices_a_node)
    return _Rank(t, arrays, order, compression).rounds(plan)


class _UnderWay(NamedTuple):
    """A message to a piece of this rank, or out of it; ``codes`` are what comes where that is not the numbers."""

    pending: Request
    piece: Region
    comes: bool
    codes: Array | None = None


class _Rank:
    """One rank's part."""

    def __init__(
        self, t: Transport, arrays: Sequence[Array], order: PartialSums, compression: Compression | None
    ) -> None:
        self._t, self._compression = t, compression
        self._own = {(SLOT, slot): array for slot, array in zip(order.of(t.rank), arrays, strict=False)}
        self._size, self._dtype = arrays[0].size, arrays[0].dtype
        self._under_way: list[_UnderWay] = []
        self._coming: dict[tuple[int, Region], tuple[Request, Array]] = {}

    def rounds(self, plan: _Plan) -> CollectiveSteps:
        for message in plan.early:
            self._expect(message)
        for message in plan.early:
            yield from self._give(message)
        for number, (step, (read, written)) in enumerate(zip(plan.steps, plan.of_step, strict=True)):
            for message in read:
                yield from self._give(message)
                self._expect(message)
            if step.rank == self._t.rank:
                yield from self._add(number, step)
            for message in written:
                yield from self._give(message)
                yield from self._take(message)
        yield [one.pending for one in self._under_way]
        self._land(self._under_way)

    def _view(self, piece: Region) -> Array:
        key = (piece.memory, piece.number)
        if key not in self._own:  # a stage of its own
            self._own[key] = np.empty(self._size, self._dtype)
        return self._own[key][piece.start : piece.stop]

    def _give(self, message: _Message) -> CollectiveSteps:
        if message.source == self._t.rank:
            yield from self._settled([message.here], written=False)
            sent = self._view(message.here)
            if self._compression is not None:
                numbers, sent = sent, np.empty(sent.size, np.uint16)
                self._compression.encode(numbers, sent)
            self._under_way.append(_UnderWay(self._t.send(sent, message.target), message.here, comes=False))

    def _expect(self, message: _Message) -> None:
        if message.target == self._t.rank and not message.written:
            into = np.empty(message.here.elements, self._dtype if self._compression is None else np.uint16)
            self._coming[message.step, message.here] = (self._t.receive(into, message.source), into)

    def _take(self, message: _Message) -> CollectiveSteps:
        if message.target == self._t.rank:
            yield from self._settled([message.there], written=True)
            codes = None if self._compression is None else np.empty(message.there.elements, np.uint16)
            pending = self._t.receive(self._view(message.there) if codes is None else codes, message.source)
            self._under_way.append(_UnderWay(pending, message.there, comes=True, codes=codes))

    def _settled(self, pieces: Sequence[Region], *, written: bool) -> CollectiveSteps:
        """Wait for what is on its way to the pieces; where they will be written also for what leaves them."""
        waiting = [
            one for one in self._under_way if (written or one.comes) and any(one.piece.meets(piece) for piece in pieces)
        ]
        if waiting:
            yield [one.pending for one in waiting]
            self._land(waiting)
            self._under_way = [one for one in self._under_way if not any(one is other for other in waiting)]

    def _land(self, arrived: Sequence[_UnderWay]) -> None:
        """Put codes that have come where their numbers belong."""
        for one in arrived:
            if one.codes is not None and self._compression is not None:
                self._compression.decode(one.codes, self._view(one.piece))

    def _add(self, number: int, step: Step) -> CollectiveSteps:
        coming = {piece: self._coming.pop((number, piece)) for piece in step.sources if (number, piece) in self._coming}
        if coming:
            yield [pending for pending, _ in coming.values()]
        here = [piece for piece in step.outputs if (piece.memory, piece.number) in self._own or piece.memory != SLOT]
        yield from self._settled(step.sources, written=False)
        yield from self._settled(here, written=True)

        def source(index: int) -> Array:
            piece = step.sources[index]
            return self._numbers(coming[piece][1]) if piece in coming else self._view(piece)

        total: Array = fold(step.tree, source, operator.add if self._compression is None else self._compression.add)
        for piece in here:
            self._view(piece)[...] = total

    def _numbers(self, message: Array) -> Array:
        if self._compression is None:
            return message
        numbers = np.empty(message.size, self._dtype)
        self._compression.decode(message, numbers)
        return numbers


@functools.lru_cache(maxsize=1024)
def _plan(algorithm: str, order: PartialSums, elements: int, devices_a_node: int) -> _Plan:
    """Who sends what to whom, in what order: the same on every rank, so that messages of a pair never mix."""
    steps = tuple(step for step in _steps(algorithm, order, elements, devices_a_node) if step.sources[0].elements)
    holder: dict[tuple[str, int], int] = {(SLOT, slot): owner for slot, owner in enumerate(order.owners)}
    changed: list[Region] = []
    early: list[_Message] = []
    of_step = []
    for number, step in enumerate(steps):
        holder |= {(piece.memory, piece.number): step.rank for piece in step.outputs if piece.memory != SLOT}
        at = {piece: holder[piece.memory, piece.number] for piece in (*step.sources, *step.outputs)}
        read: list[_Message] = []
        for piece in step.sources:
            if at[piece] != step.rank:
                now = not any(piece.meets(other) for other in changed)
                message = _Message(at[piece], step.rank, piece, piece, number, written=False, early=now)
                (early if now else read).append(message)
        own = next(piece for piece in step.outputs if at[piece] == step.rank)
        written = [
            _Message(step.rank, at[piece], own, piece, number, written=True, early=False)
            for piece in step.outputs
            if at[piece] != step.rank
        ]
        changed += step.outputs
        of_step.append((tuple(read), tuple(written)))
    return _Plan(steps, tuple(early), tuple(of_step))


def _steps(algorithm: str, order: PartialSums, elements: int, devices_a_node: int) -> list[Step]:
    if algorithm == "hierarchical":
        return algorithms.hierarchical(order, elements, devices_a_node)
    known = {
        "ring": algorithms.ring,
        "halving-doubling": algorithms.halving_doubling,
        "one-shot": algorithms.one_shot,
    }
    return known.get(algorithm, algorithms.two_shot)(order, elements)
