"""What the ranks of one machine do in an allreduce, and where they must wait for each other.

An algorithm is written once, for all ranks, as ``Step``s in an order in which one process could do them all. Three
programs are made from that list: for the processes of one machine (``programs``), for messages
(``dpsim.comm.message_steps``) and for GPUs (``cuda.moves``). What each step reads and writes tells which steps of
other ranks must come first, so no algorithm can forget a signal, a wait or a message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dpsim.kernels.allreduce.tree import Tree

SLOT, STAGING = "slot", "staging"


class Region(NamedTuple):
    """Elements ``start`` to ``stop - 1`` of an array: the partial sum ``number``, or its array in another ``memory``.

    ``SLOT`` is the memory of the partial sums themselves, and ``STAGING`` memory besides with an array for each number.
    """

    memory: str
    number: int
    start: int
    stop: int

    @property
    def elements(self) -> int:
        return self.stop - self.start

    def overlaps(self, other: Region) -> bool:
        """Return whether they have elements in common."""
        same = (self.memory, self.number) == (other.memory, other.number)
        return same and self.start < other.stop and other.start < self.stop


class Step(NamedTuple):
    """One rank adds the ``sources`` along the tree (numbers of sources) and writes the sum to all ``outputs``.

    All regions are equally long. A copy is a sum of one source. ``final``: the sum is that of all partial sums, so that
    it may be scaled.
    """

    rank: int
    tree: Tree
    sources: tuple[Region, ...]
    outputs: tuple[Region, ...]
    final: bool = False


class StepList(NamedTuple):
    """The steps of an algorithm, round by round: no rank touches in a round what another rank writes in it.

    The regions count in ``units``: as many equal parts of every array.
    """

    rounds: tuple[tuple[Step, ...], ...]
    units: int

    @classmethod
    def of(cls, rounds: Iterable[Sequence[Step]], units: int) -> StepList:
        """Return the list of these rounds, without empty ones."""
        return cls(tuple(tuple(steps) for steps in rounds if steps), units)

    @property
    def steps(self) -> list[Step]:
        return [step for steps in self.rounds for step in steps]

    def scaled(self, bound: Callable[[int], int]) -> list[Step]:
        """Return the steps in elements: unit u begins at element ``bound(u)``. Steps without elements are left out."""

        def region(of: Region) -> Region:
            return Region(of.memory, of.number, bound(of.start), bound(of.stop))

        return [step for step in self.renumbered(region).steps if step.sources[0].elements]

    def renumbered(self, region: Callable[[Region], Region]) -> StepList:
        """Return the same steps on other regions."""

        def renamed(step: Step) -> Step:
            return step._replace(sources=tuple(map(region, step.sources)), outputs=tuple(map(region, step.outputs)))

        return StepList(tuple(tuple(map(renamed, steps)) for steps in self.rounds), self.units)


class Arrive(NamedTuple):
    """A signal to all ranks that everything before this is done, for the ``number``-th time in this allreduce."""

    number: int


class Wait(NamedTuple):
    """A wait until that rank has arrived ``number`` times."""

    rank: int
    number: int


@dataclass(frozen=True)
class Programs:
    """The programs of the ranks, ``of[rank]`` in order.

    ``arrivals``: the most of any rank; ``synchronisations``: the longest chain of waits, each for a rank that waited.
    """

    of: tuple[tuple[Step | Arrive | Wait, ...], ...]
    arrivals: int
    synchronisations: int


class _Access(NamedTuple):
    rank: int
    sequence: int
    region: Region
    writes: bool


class _Order:
    """The happens-before relation as vector clocks: how many steps of every other rank each rank knows to be done.

    In its step 0, before the allreduce, a rank produces its data.
    """

    def __init__(self, ranks: int) -> None:
        self.clocks = [[-1] * ranks for _ in range(ranks)]
        self.level = [0] * ranks
        self.after: list[list[tuple[list[int], int]]] = [[] for _ in range(ranks)]
        self.arrivals: list[set[int]] = [set() for _ in range(ranks)]
        for rank in range(ranks):
            self.done(rank)

    def done(self, rank: int) -> None:
        self.clocks[rank][rank] += 1
        self.after[rank].append((list(self.clocks[rank]), self.level[rank]))

    def wait(self, rank: int, needed: Iterable[_Access]) -> list[tuple[int, int]]:
        """Return the steps (rank, sequence) that this rank must wait for until all that it needs is done."""
        latest: dict[int, int] = {}
        for access in needed:
            latest[access.rank] = max(latest.get(access.rank, -1), access.sequence)
        waits = []
        level = self.level[rank]
        own_clock = self.clocks[rank]
        # the rank that knows most comes first: waiting for it may make other waits needless
        for other, sequence in sorted(latest.items(), key=lambda item: -sum(self.after[item[0]][item[1]][0])):
            if own_clock[other] >= sequence:
                continue
            clock, its_level = self.after[other][sequence]
            self.clocks[rank] = own_clock = [max(a, b) for a, b in zip(own_clock, clock, strict=True)]
            self.arrivals[other].add(sequence)
            waits.append((other, sequence))
            level = max(level, its_level + 1)
        self.level[rank] = level
        return waits


def programs(steps: Sequence[Step], owners: Sequence[int]) -> Programs:
    """Return every rank's program: its steps, and before each the waits for the accesses that it would collide with.

    ``owners``: the rank of each partial sum. A rank's data is final when its program begins, and it may overwrite all
    its partial sums when the program ends. Nobody waits for staging memory at the end: the caller takes another half
    of it the next time (``cpu.SharedGroup``).
    """
    ranks = max(owners) + 1
    order = _Order(ranks)
    accesses: dict[tuple[str, int], list[_Access]] = defaultdict(list)

    def record(rank: int, sequence: int, regions: Iterable[Region], *, writes: bool) -> None:
        for region in regions:
            accesses[region.memory, region.number].append(_Access(rank, sequence, region, writes))

    def colliding(rank: int, regions: Iterable[Region], *, writes: bool) -> Iterable[_Access]:
        for region in regions:
            for access in accesses[region.memory, region.number]:
                if access.rank != rank and (writes or access.writes) and access.region.overlaps(region):
                    yield access

    slots = [Region(SLOT, number, 0, 1 << 62) for number in range(len(owners))]
    for number, owner in enumerate(owners):
        record(owner, 0, [slots[number]], writes=True)
    rough: list[list[tuple[list[tuple[int, int]], Step | None]]] = [[] for _ in range(ranks)]
    for step in steps:
        rank = step.rank
        needed = [*colliding(rank, step.sources, writes=False), *colliding(rank, step.outputs, writes=True)]
        rough[rank].append((order.wait(rank, needed), step))
        order.done(rank)
        sequence = order.clocks[rank][rank]
        record(rank, sequence, step.sources, writes=False)
        record(rank, sequence, step.outputs, writes=True)
    for rank in range(ranks):
        own = [slots[number] for number, owner in enumerate(owners) if owner == rank]
        rough[rank].append((order.wait(rank, colliding(rank, own, writes=True)), None))
    counts = [{sequence: count for count, sequence in enumerate(sorted(set_), 1)} for set_ in order.arrivals]
    result = []
    for rank in range(ranks):
        program: list[Step | Arrive | Wait] = [Arrive(counts[rank][0])] if 0 in counts[rank] else []
        for sequence, (waits, do) in enumerate(rough[rank], 1):
            program += [Wait(other, counts[other][awaited]) for other, awaited in waits]
            if do is not None:
                program.append(do)
            if sequence in counts[rank]:
                program.append(Arrive(counts[rank][sequence]))
        result.append(tuple(program))
    return Programs(tuple(result), max(map(len, counts)), max(order.level))


def moved_elements(steps: Iterable[Step]) -> int:
    """Return how many elements the steps read and write, with no reuse by caches."""
    return sum(region.elements for step in steps for region in (*step.sources, *step.outputs))
