"""What the ranks of one machine do in an allreduce, and where they must wait for each other.

An algorithm is written once, for all ranks, as ``Step``s in an order in which one process could do them all. From what
each step reads and writes follows which steps of other ranks must come first; ``programs`` gives every rank its own
steps with just the signals and waits that this takes. So an algorithm cannot forget one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dpsim.kernels.allreduce.tree import Tree

SLOT, STAGING, WEIGHTS, MOMENTUM = "slot", "stage", "weights", "momentum"


class Region(NamedTuple):
    """Elements ``start`` to ``stop - 1`` of an array: of slot ``number``, or of the stage, weights... of that rank.

    The memory ``stage`` lies beside the gradients; ``number`` counts slots there too.
    """

    memory: str
    number: int
    start: int
    stop: int

    @property
    def elements(self) -> int:
        return self.stop - self.start

    def meets(self, other: Region) -> bool:
        """Whether they have elements in common."""
        same = (self.memory, self.number) == (other.memory, other.number)
        return same and self.start < other.stop and other.start < self.stop


class Step(NamedTuple):
    """One rank adds the ``sources`` along the tree (numbers of sources) and writes the sum to all ``outputs``.

    All pieces are equally long. A copy is a sum of one source. ``final``: the sum is that of all slots, so that it may
    be scaled. With an ``update`` (pieces of weights and momentum) it is the gradient of one step of SGD, and the
    outputs are weights.
    """

    rank: int
    tree: Tree
    sources: tuple[Region, ...]
    outputs: tuple[Region, ...]
    final: bool = False
    update: tuple[Region, Region] | None = None

    @property
    def reads(self) -> tuple[Region, ...]:
        return self.sources + (self.update or ())

    @property
    def writes(self) -> tuple[Region, ...]:
        return self.outputs + (self.update[1:] if self.update else ())


class Arrive(NamedTuple):
    """Tell everyone that all before this is done; the ``number``-th time in this allreduce."""

    number: int


class Wait(NamedTuple):
    """Until that rank has arrived ``number`` times."""

    rank: int
    number: int


@dataclass(frozen=True)
class Programs:
    """What each rank does, ``of[rank]`` in order.

    ``arrivals``: the most of any rank; ``synchronisations``: the longest chain of waits, each for one that waited.
    """

    of: tuple[tuple[Step | Arrive | Wait, ...], ...]
    arrivals: int
    synchronisations: int


class _Access(NamedTuple):
    rank: int
    sequence: int
    piece: Region
    writes: bool


class _Order:
    """Happens-before, as vector clocks: how many steps of every other rank each rank knows to be done.

    A rank's step 0 is to produce its data, before the allreduce.
    """

    def __init__(self, ranks: int) -> None:
        self.known = [[-1] * ranks for _ in range(ranks)]
        self.level = [0] * ranks
        self.after: list[list[tuple[list[int], int]]] = [[] for _ in range(ranks)]
        self.arrivals: list[set[int]] = [set() for _ in range(ranks)]
        for rank in range(ranks):
            self.done(rank)

    def done(self, rank: int) -> None:
        self.known[rank][rank] += 1
        self.after[rank].append((list(self.known[rank]), self.level[rank]))

    def wait(self, rank: int, needed: Iterable[_Access]) -> list[tuple[int, int]]:
        """The (rank, sequence) to wait for until all that is needed is known to be done."""
        latest: dict[int, int] = {}
        for access in needed:
            latest[access.rank] = max(latest.get(access.rank, -1), access.sequence)
        waits = []
        level = self.level[rank]
        known = self.known[rank]
        # who knows most first: waiting for that one may make other waits needless
        for other, sequence in sorted(latest.items(), key=lambda item: -sum(self.after[item[0]][item[1]][0])):
            if known[other] >= sequence:
                continue
            clock, its_level = self.after[other][sequence]
            self.known[rank] = known = [max(a, b) for a, b in zip(known, clock, strict=True)]
            self.arrivals[other].add(sequence)
            waits.append((other, sequence))
            level = max(level, its_level + 1)
        self.level[rank] = level
        return waits


def programs(steps: Sequence[Step], owners: Sequence[int]) -> Programs:
    """Every rank's program: its steps, and before each the waits for what it would collide with.

    ``owners``: the rank of each slot. A rank's data is final as it begins, and it may rewrite all its slots as it ends.
    The stage is not awaited at the end: it is for the caller to use another one the next time (``cpu.SharedGroup``).
    """
    ranks = max(owners) + 1
    order = _Order(ranks)
    accesses: dict[tuple[str, int], list[_Access]] = defaultdict(list)

    def record(rank: int, sequence: int, pieces: Iterable[Region], *, writes: bool) -> None:
        for piece in pieces:
            accesses[piece.memory, piece.number].append(_Access(rank, sequence, piece, writes))

    def colliding(rank: int, pieces: Iterable[Region], *, writes: bool) -> Iterable[_Access]:
        for piece in pieces:
            for access in accesses[piece.memory, piece.number]:
                if access.rank != rank and (writes or access.writes) and access.piece.meets(piece):
                    yield access

    whole = [Region(SLOT, slot, 0, 1 << 62) for slot in range(len(owners))]
    for slot, owner in enumerate(owners):
        record(owner, 0, [whole[slot]], writes=True)
    rough: list[list[tuple[list[tuple[int, int]], Step | None]]] = [[] for _ in range(ranks)]
    for step in steps:
        if not step.sources[0].elements:
            continue
        rank = step.rank
        needed = [*colliding(rank, step.reads, writes=False), *colliding(rank, step.writes, writes=True)]
        rough[rank].append((order.wait(rank, needed), step))
        order.done(rank)
        sequence = order.known[rank][rank]
        record(rank, sequence, step.reads, writes=False)
        record(rank, sequence, step.writes, writes=True)
    for rank in range(ranks):
        own = [whole[slot] for slot, owner in enumerate(owners) if owner == rank]
        own += [Region(WEIGHTS, rank, 0, 1 << 62), Region(MOMENTUM, rank, 0, 1 << 62)]
        rough[rank].append((order.wait(rank, colliding(rank, own, writes=True)), None))
    counts = [{sequence: count for count, sequence in enumerate(sorted(set_), 1)} for set_ in order.arrivals]
    found = []
    for rank in range(ranks):
        program: list[Step | Arrive | Wait] = [Arrive(counts[rank][0])] if 0 in counts[rank] else []
        for sequence, (waits, do) in enumerate(rough[rank], 1):
            program += [Wait(other, counts[other][awaited]) for other, awaited in waits]
            if do is not None:
                program.append(do)
            if sequence in counts[rank]:
                program.append(Arrive(counts[rank][sequence]))
        found.append(tuple(program))
    return Programs(tuple(found), max(map(len, counts)), max(order.level))


def moved_elements(steps: Iterable[Step]) -> int:
    """Elements that the steps read and write, with no reuse by caches."""
    return sum(piece.elements for step in steps for piece in (*step.reads, *step.writes))
