"""The simulated time and staleness of asynchronous training, where they are known."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest

from dpsim.predict.asynchronous import ServerTimes, distance, mean, simulate

FREE = ServerTimes(pull_s=0.0, push_s=0.0)
UNBOUNDED = 10**6


def run(*compute_s: float, times: ServerTimes = FREE, staleness: int = UNBOUNDED, updates: int = 3000):  # type: ignore[no-untyped-def]
    return simulate([itertools.repeat(each) for each in compute_s], times, staleness=staleness, updates=updates)


def test_one_worker_is_never_stale_and_takes_the_sum_of_its_times() -> None:
    alone = run(1.0, times=ServerTimes(pull_s=0.25, push_s=0.5), updates=8)
    assert alone.staleness == {0: 8} and alone.seconds == 8 * 1.75


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_equal_workers_are_one_update_of_each_other_apart(workers: int) -> None:
    """A little apart, so that no two events coincide."""
    equal = run(*(1 + 1e-6 * number for number in range(workers)))
    assert mean(equal.staleness) == pytest.approx(workers - 1, rel=0.01)
    assert equal.seconds == pytest.approx(3000 / workers, rel=0.01)


def test_without_a_bound_speeds_add_up_and_with_one_the_slowest_decides() -> None:
    free, bound = run(1.0, 2.0 + 1e-4), run(1.0, 2.0 + 1e-4, staleness=3)
    assert free.seconds == pytest.approx(float(3000 / (1 + Fraction(1, 2))), rel=0.01)
    assert bound.seconds == pytest.approx(3000 / 2 * 2.0, rel=0.01)
    assert run(1.0, 2.0 + 1e-4, staleness=3).staleness != free.staleness


def test_a_shard_serves_one_worker_at_a_time() -> None:
    served = ServerTimes(pull_s=0.0, push_s=1.0)
    assert run(1e-6, 1e-6, times=served, updates=1000).seconds == pytest.approx(1000, rel=0.01)


@pytest.mark.parametrize(("bound", "workers"), [(0, 2), (1, 3), (2, 4)])
def test_no_staleness_is_above_what_the_bound_allows(bound: int, workers: int) -> None:
    uneven = run(1.0, *(0.37 + 0.211 * number for number in range(workers - 1)), staleness=bound)
    assert max(uneven.staleness) <= (workers - 1) * (2 * bound + 1) and sum(uneven.staleness.values()) == 3000 * workers


def test_the_distance_of_distributions_is_the_share_that_moves() -> None:
    assert distance({0: 1, 1: 3}, {0: 10, 1: 30}) == 0 and distance({0: 1}, {1: 5}) == 1
    assert distance({0: 3, 1: 1}, {0: 1, 2: 1}) == pytest.approx(0.5) and mean({1: 1, 3: 3}) == 2.5
