"""The simulated time and staleness of asynchronous training, where they are known."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection
from fractions import Fraction
from typing import Any

import pytest

from dpsim.model.asynchronous import AccessTimes, distance, mean, simulate
from dpsim.strategy import Asynchronous, Gossip, ParameterServer

FREE = AccessTimes(pull_s=0.0, push_s=0.0)
UNBOUNDED = 10**6
SERVERS = ParameterServer(staleness=UNBOUNDED)
GOSSIP = Gossip(staleness=UNBOUNDED)


def run(*compute_s: float, times: AccessTimes = FREE, strategy: Asynchronous = SERVERS, updates: int = 3000):  # type: ignore[no-untyped-def]
    return simulate([itertools.repeat(each) for each in compute_s], times, strategy, updates)


@pytest.mark.parametrize("strategy", [SERVERS, GOSSIP])
def test_one_worker_is_never_stale_and_takes_the_sum_of_its_times(strategy: Asynchronous) -> None:
    alone = run(1.0, times=AccessTimes(pull_s=0.25, push_s=0.5), strategy=strategy, updates=8)
    assert alone.staleness == {0: 8} and alone.seconds == 8 * 1.75


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_equal_workers_are_one_update_of_each_other_apart(workers: int) -> None:
    """A little apart, so that no two events coincide."""
    equal = run(*(1 + 1e-6 * number for number in range(workers)))
    assert mean(equal.staleness) == pytest.approx(workers - 1, rel=0.01)
    assert equal.seconds == pytest.approx(3000 / workers, rel=0.01)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_a_copy_of_equal_workers_is_averaged_with_others_once_an_update(workers: int) -> None:
    """Each of the others averages it once in workers - 1 updates."""
    equal = run(*(1 + 1e-6 * number for number in range(workers)), strategy=GOSSIP)
    assert mean(equal.staleness) == pytest.approx(1, rel=0.01) and sum(equal.staleness.values()) == 3000
    everybody = run(*(1 + 1e-6 * number for number in range(workers)), strategy=Gossip(peers=9, staleness=UNBOUNDED))
    assert mean(everybody.staleness) == pytest.approx(workers - 1, rel=0.01)


def test_copies_that_are_averaged_are_both_busy_and_others_are_not() -> None:
    times = AccessTimes(pull_s=0.0, push_s=1.0)
    assert run(1e-6, 1e-6, times=times, strategy=GOSSIP, updates=1000).seconds == pytest.approx(1000, rel=0.01)
    apart = run(1e-6, 1e-6, 1e-6, 1e-6, times=times, strategy=_TwoPairs(staleness=UNBOUNDED), updates=1000)
    assert apart.seconds == pytest.approx(500, rel=0.01)


class _TwoPairs(Asynchronous, frozen=True):
    """Copies 0 and 1 are averaged, and copies 2 and 3."""

    name = "two-pairs"

    def groups(self, worker: int, workers: int, made: int, gone: Collection[int] = ()) -> list[tuple[int, ...]]:
        return [(worker, worker ^ 1)]


@pytest.mark.parametrize("peers", [1, 2, 3, 7])
def test_a_worker_meets_all_others_equally_often_and_nobody_who_is_gone(peers: int) -> None:
    met = Counter(peer for made in range(12) for peer in Gossip(peers=peers).groups(1, 5, made)[0][1:])
    assert met == dict.fromkeys((0, 2, 3, 4), 12 * min(peers, 4) // 4)
    groups = [Gossip(peers=peers).groups(1, 5, made, gone=(0, 3))[0] for made in range(12)]
    assert {each for group in groups for each in group[1:]} == {2, 4}
    assert all(group[0] == 1 and len({*group}) == len(group) == min(peers, 2) + 1 for group in groups)
    assert Gossip().groups(0, 2, 5, gone=(1,)) == [(0,)] == Gossip().groups(0, 1, 5)


@pytest.mark.parametrize("kind", [ParameterServer, Gossip])
def test_without_a_bound_speeds_add_up_and_with_one_the_slowest_decides(kind: Any) -> None:
    free, bound = (run(1.0, 2.0 + 1e-4, strategy=kind(staleness=most)) for most in (UNBOUNDED, 3))
    assert free.seconds == pytest.approx(float(3000 / (1 + Fraction(1, 2))), rel=0.01)
    assert bound.seconds == pytest.approx(3000 / 2 * 2.0, rel=0.01)
    assert bound.staleness != free.staleness


def test_a_shard_serves_one_worker_at_a_time() -> None:
    served = AccessTimes(pull_s=0.0, push_s=1.0)
    assert run(1e-6, 1e-6, times=served, updates=1000).seconds == pytest.approx(1000, rel=0.01)


@pytest.mark.parametrize(("bound", "workers"), [(0, 2), (1, 3), (2, 4)])
def test_no_staleness_is_above_what_the_bound_allows(bound: int, workers: int) -> None:
    uneven = run(1.0, *(0.37 + 0.211 * number for number in range(workers - 1)), strategy=ParameterServer(bound))
    assert max(uneven.staleness) <= (workers - 1) * (2 * bound + 1) and sum(uneven.staleness.values()) == 3000 * workers


def test_the_distance_of_distributions_is_the_share_that_moves() -> None:
    assert distance({0: 1, 1: 3}, {0: 10, 1: 30}) == 0 and distance({0: 1}, {1: 5}) == 1
    assert distance({0: 3, 1: 1}, {0: 1, 2: 1}) == pytest.approx(0.5) and mean({1: 1, 3: 3}) == 2.5
