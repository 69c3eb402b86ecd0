"""The measuring loop: rounds in which every alternative is visited, until a stop rule holds.

What is to be compared takes turns, in an order that differs from round to round, so that a machine that slows down
or is disturbed for a while does so to all alternatives alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from dpsim.comm.clock import now
from dpsim.errors import ConfigError
from dpsim.progress import Progress, no_progress
from dpsim.study.time_limit import FIRST_ROUNDS_GRACE_S

T = TypeVar("T")
Name = TypeVar("Name", bound=Hashable)
Clock = Callable[[], float]


class Communicator(Protocol):
    """What the loop needs of an MPI communicator: rank 0 decides for all ranks."""

    @property
    def rank(self) -> int: ...

    def bcast(self, obj: Any) -> Any: ...


LEAST_ROUNDS = 6
"""Rounds that a sweep measures, whatever its budget."""
_KNOWN_ROUNDS, _FEWEST_KNOWN_ROUNDS = 5, 2


@dataclass(frozen=True, kw_only=True)
class StopRule:
    """When a measurement ends: by its rounds, its seconds, and whether its samples suffice.

    It ends after ``least_rounds`` or more, as soon as it has ``most_rounds``, or has taken ``most_s``, or has taken
    ``least_s`` and its samples suffice. With ``whole_rounds`` a round is not begun that would end after ``most_s``
    if it took as long as the longest so far. After ``fewest_rounds`` no round is begun that would end so after
    ``limit_s``, even where the least rounds are not measured yet. Raises ``ConfigError`` for limits that contradict
    each other.
    """

    least_rounds: int = 1
    most_rounds: float = math.inf
    least_s: float = 0.0
    most_s: float = math.inf
    whole_rounds: bool = False
    fewest_rounds: int = 1
    limit_s: float = math.inf

    def __post_init__(self) -> None:
        if not 1 <= self.least_rounds <= self.most_rounds or not 0 <= self.least_s <= self.most_s:
            raise ConfigError(
                f"{self.least_rounds} to {self.most_rounds} rounds in {self.least_s} to {self.most_s} s",
                allowed="one round or more, and upper limits that are not below the lower ones",
            )

    def holds(self, rounds: int, spent_s: float, longest_s: float, suffice: Callable[[], bool]) -> bool:
        """Whether to stop after ``rounds`` that took ``spent_s``, the longest of them ``longest_s``.

        ``suffice`` tells whether the samples do; it is asked only where that decides.
        """
        if rounds >= self.fewest_rounds and spent_s + longest_s >= self.limit_s:
            return True
        if rounds < self.least_rounds:
            return False
        ahead_s = longest_s if self.whole_rounds else 0.0
        if rounds >= self.most_rounds or spent_s + ahead_s >= self.most_s:
            return True
        return spent_s >= self.least_s and suffice()

    def excess(self, warm_up: int, round_s: float) -> str:
        """Return a sentence on what the least rounds take above the budget, if each takes ``round_s``; else nothing.

        Where these do not fit into ``limit_s``, it is about those that do, or the fewest.
        """
        budget_s, needed = self.least_s or self.most_s, self.least_rounds
        if (needed + warm_up) * round_s > self.limit_s:
            needed = min(needed, max(self.fewest_rounds, math.ceil(self.limit_s / round_s) - 1 - warm_up))
        least_s = (needed + warm_up) * round_s
        if least_s <= budget_s:
            return ""
        more = f" and {warm_up} that warm up" if warm_up else ""
        return (
            f"warning: the budget of {budget_s:.3g} s will be exceeded by about {least_s - budget_s:.2g} s:"
            f" {needed} rounds{more} are needed in any case, and the first took {round_s:.2g} s"
        )


def until_known(seconds: float, most_rounds: float = math.inf, least_rounds: int = _KNOWN_ROUNDS) -> StopRule:
    """Measure for ``seconds``, and for up to twice as long until every compute slowdown is known well enough.

    Where the least rounds take 10 s longer than that, fewer are measured, but all sizes of a collective.
    """
    return StopRule(
        least_rounds=least_rounds,
        least_s=seconds,
        most_s=2 * seconds,
        most_rounds=most_rounds,
        fewest_rounds=_FEWEST_KNOWN_ROUNDS,
        limit_s=2 * seconds + FIRST_ROUNDS_GRACE_S,
    )


@dataclass(frozen=True, kw_only=True)
class Round:
    """A round of a measurement. ``number`` counts from 0; samples of a round that is not ``counted`` are dropped."""

    number: int
    counted: bool
    seed: int
    start_s: float
    clock: Clock = field(repr=False)

    def order(self, alternatives: Sequence[T], turn: int = 0) -> list[T]:
        """Every alternative, in the random order in which to visit them.

        The order depends on the seed, the round's number, ``turn`` and how many alternatives there are, so it is the
        same on all ranks. ``turn`` tells apart several orders of one round. An alternative that is listed several
        times is visited as often, but only once in a round that warms up, which visits them as they are listed.
        """
        if not self.counted:
            return list(dict.fromkeys(alternatives))
        random = np.random.default_rng([self.seed % 2**64, self.number, turn])
        return [alternatives[index] for index in random.permutation(len(alternatives))]

    def spent_s(self) -> float:
        """Seconds of measuring so far, the warm-up included."""
        return self.clock() - self.start_s


def rounds(
    stop: StopRule,
    *,
    suffice: Callable[[], bool] = lambda: False,
    warm_up: int = 0,
    seed: int = 0,
    first: int = 0,
    spent_s: float = 0.0,
    comm: Communicator | None = None,
    clock: Clock = now,
    report: Progress = no_progress,
) -> Iterator[Round]:
    """Yield ``warm_up`` rounds that do not count, then counted ones until ``stop`` holds.

    ``suffice`` tells whether the samples so far suffice. With ``comm`` this is collective: rank 0 alone asks
    ``suffice`` and the clock, and its decision is that of all ranks. A measurement that is resumed gives the number
    of its ``first`` round and the seconds ``spent_s`` before it. ``report`` gets a sentence after the first round of a
    measurement where the least rounds take longer than its budget.
    """
    start_s, longest_s, number = clock() - spent_s, 0.0, first - warm_up
    stopped = False
    while not stopped:
        begin_s, counted = clock(), number >= first
        yield Round(number=number, counted=counted, seed=seed, start_s=start_s, clock=clock)
        number += 1
        end_s = clock()
        longest_s = max(longest_s, end_s - begin_s)
        if comm is None or comm.rank == 0:
            if number == 1 - warm_up and (excess := stop.excess(warm_up, longest_s)):
                report(excess)
            stopped = counted and stop.holds(number, end_s - start_s, longest_s, suffice)
        if comm is not None:
            stopped = bool(comm.bcast(stopped))


def in_turns(
    visits: Mapping[Name, Callable[[], T]],
    stop: StopRule,
    *,
    suffice: Callable[[Mapping[Name, Sequence[T]]], bool] = lambda samples: False,
    warm_up: int = 1,
    seed: int = 0,
    comm: Communicator | None = None,
    report: Progress = no_progress,
) -> dict[Name, list[T]]:
    """Return what the visits to each alternative return, one for each round that counts.

    In a round every alternative is visited once, in random order, until ``stop`` holds; ``suffice`` tells whether the
    samples so far do. With ``comm`` this is collective, and rank 0 decides. ``report`` gets a line after each round.
    """
    samples: dict[Name, list[T]] = {name: [] for name in visits}
    stopping = rounds(stop, suffice=lambda: suffice(samples), warm_up=warm_up, seed=seed, comm=comm, report=report)
    for current in stopping:
        for name in current.order(list(visits)):
            sample = visits[name]()
            if current.counted:
                samples[name].append(sample)
        if current.counted:
            report(f"round {current.number + 1}: {current.spent_s():.0f} of at most {stop.most_s:.0f} s")
    return samples
