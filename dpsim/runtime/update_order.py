"""The order of the updates of an asynchronous training: its staleness, and how it is replayed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from dpsim.codec import Noun
from dpsim.errors import ConfigError

_SHOWN = 6


class Pull(NamedTuple):
    """Update ``ticket`` takes the shard as it is now."""

    ticket: int
    shard: int


class Compute(NamedTuple):
    """All shards of update ``ticket`` are there: its gradient can be computed."""

    ticket: int


class Push(NamedTuple):
    """The gradient of update ``ticket`` becomes the next version of the shard."""

    ticket: int
    shard: int


class UpdateOrder(Noun, frozen=True):
    """Who made which update (``takers``, a worker for each update, -1 where nobody took it), and in what order.

    ``pulls[update][shard]`` is the version that it was computed from, ``orders[shard]`` the updates that made versions
    1, 2 and so on. An update whose worker died may be missing in some shards or in all.
    """

    takers: tuple[int, ...]
    pulls: tuple[tuple[int, ...], ...]
    orders: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        updates, shards = len(self.takers), len(self.orders)
        whole = len(self.pulls) == updates and all(len(pulls) == shards for pulls in self.pulls)
        known = all(0 <= ticket < updates for order in self.orders for ticket in order)
        if not whole or not known or any(len({*order}) < len(order) for order in self.orders):
            raise ConfigError(
                "an order of updates that does not fit together",
                allowed="for each update a worker and a version of every shard, and for each shard different updates",
                remedy="record it again with --record",
            )

    @property
    def staleness(self) -> Counter[int]:
        """How many updates of shards were made from parameters that were so many versions old."""
        return Counter(
            version - self.pulls[ticket][shard]
            for shard, order in enumerate(self.orders)
            for version, ticket in enumerate(order)
        )

    def describe(self) -> str:
        """One line on the staleness of the updates: its mean and how often it was what."""
        counts = self.staleness
        total, most = sum(counts.values()), max(counts, default=0)
        mean = sum(age * count for age, count in counts.items()) / max(total, 1)
        shares = ", ".join(f"{age}: {count / total:.1%}" for age, count in sorted(counts.items())[:_SHOWN])
        return f"staleness of updates: mean {mean:.2f}, at most {most} ({shares}{', ...' * (len(counts) > _SHOWN)})"

    def steps(self) -> Iterator[Pull | Compute | Push]:
        """Do all of it again, in an order in which each step finds what it needs.

        A shard is pulled before its next version is made. Raises ``ConfigError`` if there is no such order.
        """
        pulled = {*(ticket for order in self.orders for ticket in order)}
        waiting: dict[tuple[int, int], list[int]] = defaultdict(list)
        for ticket in sorted(pulled):
            for shard, version in enumerate(self.pulls[ticket]):
                waiting[shard, version].append(ticket)
        missing = dict.fromkeys(pulled, len(self.orders))
        versions = [0] * len(self.orders)
        moved = True
        while moved:
            moved = False
            for shard, order in enumerate(self.orders):
                while True:
                    for ticket in waiting.pop((shard, versions[shard]), ()):
                        moved = True
                        yield Pull(ticket, shard)
                        missing[ticket] -= 1
                        if not missing[ticket]:
                            yield Compute(ticket)
                    if versions[shard] == len(order) or missing[order[versions[shard]]]:
                        break
                    moved = True
                    yield Push(order[versions[shard]], shard)
                    versions[shard] += 1
        if waiting or any(version < len(order) for version, order in zip(versions, self.orders, strict=True)):
            raise ConfigError(
                "an order of updates in which one needs another that needs it",
                allowed="an order that a training has recorded",
                remedy="record it again with --record",
            )
