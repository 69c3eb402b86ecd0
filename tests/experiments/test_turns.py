"""Alternatives take turns: each once a round, in changing order, and none of the rounds that warm up counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dpsim.errors import ConfigError
from dpsim.experiments import command
from dpsim.experiments.cases import ratio_lines
from dpsim.study.loop import StopRule, in_turns


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


def test_a_ratio_stands_beside_its_interval_and_its_limit() -> None:
    plain, slower = ratio_lines({"plain": [1e-3] * 3, "slower": [2e-3] * 3}, "plain", {"slower": 1.5})
    assert plain.split() == ["plain", "1.000", "ms", "1.000", "(1.000", "to", "1.000)"]
    assert slower.split() == ["slower", "2.000", "ms", "2.000", "(2.000", "to", "2.000)", "limit", "1.50"]


@pytest.mark.parametrize(("ending", "code"), [(None, 0), (3, 3), (ConfigError("3 ranks", allowed="2"), 2)])
def test_a_command_ends_with_its_code_or_an_explanation(
    ending: object, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> int | None:
        if isinstance(ending, ConfigError):
            raise ending
        return ending if isinstance(ending, int) else None

    assert command.ended("name", run) == code
    assert capsys.readouterr().err.startswith("name: 3 ranks" if code == 2 else "")
