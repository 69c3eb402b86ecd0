"""The order of the updates of an asynchronous training: its staleness, and how it is replayed.

Cells are what has versions: shards of parameters, or workers' own copies of them.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from dpsim.codec import Noun
from dpsim.errors import ConfigError

_SHOWN = 6


class Pull(NamedTuple):
    """Update ``ticket`` takes the cell as it is now."""

    ticket: int
    cell: int


class Compute(NamedTuple):
    """All cells that update ``ticket`` pulls are there: its gradient can be computed."""

    ticket: int


class Push(NamedTuple):
    """Update ``ticket`` makes the next versions of cells: its gradient that of the first, the mean those of all."""

    ticket: int
    cells: tuple[int, ...]


class UpdateOrder(Noun, frozen=True):
    """Who made which update (``takers``, a worker for each update, -1 where nobody took it), and in what order.

    ``pulls[update][cell]`` is the version that its gradient was computed from, -1 if it was not, and ``orders[cell]``
    has the updates that made versions 1, 2 and so on. A cell of them that the update has not pulled has been averaged
    with one that it has. ``gone`` are the workers that died. Their last update may be missing in some cells or in all.
    """

    takers: tuple[int, ...]
    pulls: tuple[tuple[int, ...], ...]
    orders: tuple[tuple[int, ...], ...]
    gone: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        updates, cells = len(self.takers), len(self.orders)
        complete = len(self.pulls) == updates and all(len(pulls) == cells for pulls in self.pulls)
        in_range = all(0 <= ticket < updates for order in self.orders for ticket in order)
        lives = {*range(cells)} - {*self.gone}
        if not (complete and in_range and lives) or any(len({*order}) < len(order) for order in self.orders):
            raise ConfigError(
                "an order of updates that does not fit together",
                allowed="for each update a worker and a version of every cell, for each cell different updates, and a"
                " worker that is not gone",
                remedy="record it again with --record",
            )

    @property
    def made(self) -> list[int]:
        """How many updates have added their gradient to each cell."""
        return [sum(self.pulls[ticket][cell] >= 0 for ticket in order) for cell, order in enumerate(self.orders)]

    @property
    def staleness(self) -> Counter[int]:
        """How many gradients were added to cells that had become so many versions newer since the pull."""
        return Counter(
            version - self.pulls[ticket][cell]
            for cell, order in enumerate(self.orders)
            for version, ticket in enumerate(order)
            if self.pulls[ticket][cell] >= 0
        )

    @property
    def mean_staleness(self) -> float:
        """The mean of ``staleness``; 0 without updates."""
        counts = self.staleness
        return sum(age * count for age, count in counts.items()) / max(sum(counts.values()), 1)

    def describe(self) -> str:
        """Return one line on the staleness of the updates: its mean and how often it was what."""
        counts = self.staleness
        total, most = sum(counts.values()), max(counts, default=0)
        shares = ", ".join(f"{age}: {count / total:.1%}" for age, count in sorted(counts.items())[:_SHOWN])
        shown = f"({shares}{', ...' * (len(counts) > _SHOWN)})"
        return f"staleness of updates: mean {self.mean_staleness:.2f}, at most {most} {shown}"

    def _averaged(self) -> defaultdict[int, tuple[int, ...]]:
        """Return the cells of each ticket that it averages without having pulled them."""
        averaged: defaultdict[int, tuple[int, ...]] = defaultdict(tuple)
        for cell, order in enumerate(self.orders):
            for ticket in order:
                if self.pulls[ticket][cell] < 0:
                    averaged[ticket] += (cell,)
        return averaged

    def steps(self) -> Iterator[Pull | Compute | Push]:
        """Do all of it again, in an order in which each step finds what it needs.

        A cell is pulled before its next version is made. Raises ``ConfigError`` if there is no such order.
        """
        averaged = self._averaged()
        waiting: dict[tuple[int, int], list[int]] = defaultdict(list)
        missing: Counter[int] = Counter()
        for ticket in sorted({*itertools.chain.from_iterable(self.orders)}):
            for cell, version in enumerate(self.pulls[ticket]):
                if version >= 0:
                    waiting[cell, version].append(ticket)
                    missing[ticket] += 1
        versions = [0] * len(self.orders)

        def pulled(cell: int) -> Iterator[Pull | Compute]:
            for ticket in waiting.pop((cell, versions[cell]), ()):
                yield Pull(ticket, cell)
                missing[ticket] -= 1
                if not missing[ticket]:
                    yield Compute(ticket)

        def comes_next(ticket: int, cell: int) -> bool:
            order = self.orders[cell]
            return versions[cell] < len(order) and order[versions[cell]] == ticket

        for cell in range(len(versions)):
            yield from pulled(cell)
        moved = True
        while moved:
            moved = False
            for cell, order in enumerate(self.orders):
                while versions[cell] < len(order):
                    ticket = order[versions[cell]]
                    group = (cell, *averaged[ticket])
                    due = not missing[ticket] and all(comes_next(ticket, each) for each in group)
                    if self.pulls[ticket][cell] < 0 or not due:
                        break
                    moved = True
                    yield Push(ticket, group)
                    for each in group:
                        versions[each] += 1
                        yield from pulled(each)
        if waiting or any(version < len(order) for version, order in zip(versions, self.orders, strict=True)):
            raise ConfigError(
                "an order of updates in which one needs another that needs it",
                allowed="an order that a training has recorded",
                remedy="record it again with --record",
            )
