"""The measuring loop: who is visited how often and in which order, when it stops, and that all ranks agree."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsim.errors import ConfigError
from dpsim.study.loop import Round, StopRule, in_turns, rounds
from dpsim.study.steps import step_times_s


class FakeClock:
    """A clock that the measured work moves."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self.now_s = start_s

    def __call__(self) -> float:
        return self.now_s

    def work(self, seconds: float) -> None:
        self.now_s += seconds


class Rank:
    """A communicator of one rank that hears what rank 0 has decided."""

    def __init__(self, rank: int, decisions: list[Any]) -> None:
        self.rank, self._decisions, self._next = rank, decisions, iter(decisions)

    def bcast(self, obj: Any) -> Any:
        if self.rank == 0:
            self._decisions.append(obj)
            return obj
        return next(self._next)


def counted_rounds(stop: StopRule, round_s: Callable[[int], float], **options: Any) -> tuple[list[Round], float]:
    """The counted rounds of a measurement whose round k takes ``round_s(k)``, and the seconds that all rounds took."""
    clock, taken = FakeClock(), []
    for current in rounds(stop, clock=clock, **options):
        clock.work(round_s(current.number))
        if current.counted:
            taken.append(current)
    return taken, clock.now_s - 1000.0


def test_after_the_first_round_it_says_by_how_much_the_least_rounds_exceed_the_budget() -> None:
    said: list[str] = []
    stop = StopRule(least_rounds=6, most_s=3.0)
    _, spent_s = counted_rounds(stop, lambda _: 1.5, warm_up=2, report=said.append)
    assert spent_s == 8 * 1.5
    assert said == [
        "warning: the budget of 3 s will be exceeded by about 9 s: 6 rounds and 2 that warm up are needed in any case,"
        " and the first took 1.5 s"
    ]
    counted_rounds(stop, lambda _: 0.3, warm_up=2, report=said.append)
    counted_rounds(stop, lambda _: 9.0, warm_up=2, first=3, report=said.append)  # resumed: it has been said
    assert len(said) == 1


def test_it_says_that_fewer_rounds_are_needed_where_the_least_do_not_fit_into_the_limit() -> None:
    said: list[str] = []
    stop = StopRule(least_rounds=6, most_s=10.0, fewest_rounds=3, limit_s=40.0)
    taken, _ = counted_rounds(stop, lambda _: 8.0, warm_up=2, report=said.append)
    assert len(taken) == 3
    assert said[0].startswith("warning: the budget of 10 s will be exceeded by about 30 s: 3 rounds and 2 that warm up")


# Who is visited.


@given(names=st.lists(st.text(), max_size=8), count=st.integers(1, 12), seed=st.integers(-(2**70), 2**70))
def test_every_alternative_is_visited_equally_often(names: list[str], count: int, seed: int) -> None:
    visits: Counter[str] = Counter()
    for current in rounds(StopRule(most_rounds=count), seed=seed):
        visits.update(current.order(names))
    assert visits == Counter(names * count)


@given(seed=st.integers(0, 2**63), alternatives=st.integers(0, 20))
def test_the_order_is_the_same_on_all_ranks_and_differs_between_rounds(seed: int, alternatives: int) -> None:
    decisions: list[Any] = []
    orders = []
    for rank in range(3):
        measured = rounds(StopRule(most_rounds=6), seed=seed, comm=Rank(rank, decisions))
        orders.append([(now.order(range(alternatives)), now.order(range(alternatives), turn=1)) for now in measured])
    assert orders[0] == orders[1] == orders[2]
    if alternatives > 12:  # two equal orders of 13 have a chance of 1 in 6 billion
        drawn = [tuple(order) for pair in orders[0] for order in pair]
        assert len(set(drawn)) == len(drawn) == 12


def test_a_rank_that_leaves_an_order_out_still_agrees_on_the_next_one() -> None:
    (first,), (second,) = (list(rounds(StopRule(most_rounds=1), seed=3)) for _ in range(2))
    first.order(range(50))
    assert first.order(range(20), turn=1) == second.order(range(20), turn=1)


def test_repeated_settings_interleave() -> None:
    """A and its twin A' come first about equally often, and between the visits of one there are visits of others."""
    order = [
        name for current in rounds(StopRule(most_rounds=400), seed=1) for name in current.order(["A", "B", "C", "A'"])
    ]
    firsts = Counter(
        "A" if order[begin : begin + 4].index("A") < order[begin : begin + 4].index("A'") else "A'"
        for begin in range(0, len(order), 4)
    )
    assert 160 < firsts["A"] < 240
    positions = [index % 4 for index, name in enumerate(order) if name == "A"]
    assert all(70 < positions.count(place) < 130 for place in range(4))
    visits = [index for index, name in enumerate(order) if name == "A"]
    assert max(later - earlier for earlier, later in itertools.pairwise(visits)) <= 7


def test_a_resumed_measurement_draws_new_orders() -> None:
    earlier = [current.order(range(20)) for current in rounds(StopRule(most_rounds=3), seed=5)]
    resumed = list(rounds(StopRule(most_rounds=6), seed=5, first=3))
    whole = [current.order(range(20)) for current in rounds(StopRule(most_rounds=6), seed=5)]
    assert [current.number for current in resumed] == [3, 4, 5]
    assert earlier + [current.order(range(20)) for current in resumed] == whole


def test_warming_up_visits_each_alternative_once_a_round_and_does_not_count() -> None:
    measured = list(rounds(StopRule(most_rounds=1), warm_up=2))
    assert [current.counted for current in measured] == [False, False, True]
    assert [current.order(["b", "a", "b"]) for current in measured[:2]] == [["b", "a"], ["b", "a"]]
    assert Counter(measured[2].order(["b", "a", "b"])) == {"a": 1, "b": 2}


# When it stops.


@given(
    round_s=st.floats(0.01, 10),
    most_s=st.floats(0, 100),
    least=st.integers(1, 8),
    warm_up=st.integers(0, 3),
    spent_s=st.floats(0, 50),
)
def test_it_stops_after_the_first_round_that_ends_beyond_the_budget(
    round_s: float, most_s: float, least: int, warm_up: int, spent_s: float
) -> None:
    stop = StopRule(least_rounds=least, most_s=most_s)
    taken, seconds = counted_rounds(stop, lambda _: round_s, warm_up=warm_up, spent_s=spent_s)
    assert len(taken) >= least and spent_s + seconds >= most_s - 1e-6
    if len(taken) > least:
        assert spent_s + seconds - round_s < most_s + 1e-6


@given(times_s=st.lists(st.floats(0.01, 10), min_size=1, max_size=30), most_s=st.floats(0, 100))
def test_whole_rounds_stay_within_the_budget(times_s: list[float], most_s: float) -> None:
    stop = StopRule(least_rounds=2, most_rounds=40, most_s=most_s, whole_rounds=True)
    taken, seconds = counted_rounds(stop, lambda number: times_s[number % len(times_s)])
    if len(taken) > 2:  # a round can only take longer than foreseen if it is the longest so far
        last_s = times_s[(len(taken) - 1) % len(times_s)]
        longest_s = max(times_s[number % len(times_s)] for number in range(len(taken) - 1))
        assert seconds < most_s + max(0.0, last_s - longest_s) + 1e-6


@pytest.mark.parametrize(("enough_after", "expected"), [(0, 4), (6, 6), (100, 8)])
def test_samples_that_suffice_end_it_between_the_least_and_the_most_time(enough_after: int, expected: int) -> None:
    done: list[int] = []

    def suffice() -> bool:
        done.append(len(taken))
        return len(taken) >= enough_after

    taken: list[Round] = []
    clock = FakeClock()
    for current in rounds(StopRule(least_rounds=2, least_s=4.0, most_s=8.0), suffice=suffice, clock=clock):
        clock.work(1.0)
        taken.append(current)
    assert len(taken) == expected
    assert done == list(range(4, min(expected, 7) + 1)), "asked only where it decides"


def test_it_never_ends_before_the_least_rounds_nor_goes_on_after_the_most() -> None:
    assert len(counted_rounds(StopRule(least_rounds=5, most_s=1.0), lambda _: 10.0)[0]) == 5
    assert len(counted_rounds(StopRule(most_rounds=7, most_s=1e9), lambda _: 0.0)[0]) == 7
    resumed, _ = counted_rounds(StopRule(least_rounds=6, most_s=1.0), lambda _: 1.0, first=4, spent_s=50.0)
    assert [current.number for current in resumed] == [4, 5]


@pytest.mark.parametrize(
    "limits",
    [{"least_rounds": 0}, {"most_rounds": 0}, {"least_rounds": 3, "most_rounds": 2}, {"least_s": 2.0, "most_s": 1.0}],
)
def test_limits_that_contradict_each_other_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="upper limits that are not below"):
        StopRule(**limits)


def test_a_round_knows_the_seconds_of_the_whole_measurement() -> None:
    clock = FakeClock()
    spent_s = []
    for current in rounds(StopRule(most_rounds=2), warm_up=1, spent_s=5.0, clock=clock):
        clock.work(2.0)
        spent_s.append(current.spent_s())
    assert spent_s == [7.0, 9.0, 11.0]


def test_rank_0_alone_decides() -> None:
    decisions: list[Any] = []
    asked: list[int] = []
    numbers = []
    for rank in range(2):

        def suffice(rank: int = rank) -> bool:
            asked.append(rank)
            return len(asked) >= 3

        numbers.append([now.number for now in rounds(StopRule(), suffice=suffice, comm=Rank(rank, decisions))])
    assert numbers == [[0, 1, 2]] * 2 and asked == [0, 0, 0]


# Steps of a visit.


@given(
    ranks=st.integers(1, 4),
    durations_s=st.lists(st.lists(st.floats(0.0, 9.0), min_size=4, max_size=4), min_size=4, max_size=9),
)
def test_a_step_lasts_from_the_slowest_ranks_end_to_the_next_ones(ranks: int, durations_s: list[list[float]]) -> None:
    ends = [list(itertools.accumulate(row[rank] for row in durations_s)) for rank in range(ranks)]
    times_s = step_times_s(ends, warm_up=2)
    assert len(times_s) == len(durations_s) - 2
    slowest = [max(column) for column in zip(*ends, strict=True)]
    assert math.fsum(times_s) == pytest.approx(slowest[-1] - slowest[1])
    assert times_s == pytest.approx([later - earlier for earlier, later in itertools.pairwise(slowest)][1:])


def test_each_alternative_is_visited_once_a_round_in_changing_order_and_warm_up_does_not_count() -> None:
    visited: list[str] = []

    def visit(name: str) -> Callable[[], int]:
        def sample() -> int:
            visited.append(name)
            return len(visited)

        return sample

    samples = in_turns({name: visit(name) for name in "abc"}, StopRule(least_rounds=8, most_rounds=8), warm_up=2)
    turns = [tuple(visited[i : i + 3]) for i in range(0, len(visited), 3)]
    assert len(turns) == 10 and {frozenset(turn) for turn in turns} == {frozenset("abc")}
    assert len(set(turns[2:])) > 1
    assert sorted(n for taken in samples.values() for n in taken) == list(range(7, 31))


def test_it_ends_when_the_samples_suffice_and_reports_each_round_that_counts() -> None:
    said: list[str] = []
    samples = in_turns(
        {"a": lambda: 1.0},
        StopRule(least_rounds=2, most_s=100),
        suffice=lambda taken: len(taken["a"]) == 3,
        report=said.append,
    )
    assert samples == {"a": [1.0] * 3}
    assert [line.partition(":")[0] for line in said] == ["round 1", "round 2", "round 3"]
