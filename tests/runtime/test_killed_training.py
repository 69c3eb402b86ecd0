"""Reproducible trainings whose ranks are killed end in the bits of undisturbed ones, and leave nothing behind."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damage import attacked
from hypothesis import event, given
from hypothesis import strategies as st
from killed_training import TRAININGS, Result, killed_training

from dpsim import codec


@pytest.fixture(scope="module")
def expected() -> dict[int, Result]:
    """The results of undisturbed trainings, as they are needed."""
    return {}


@pytest.fixture
def ended(on_ranks: Callable[..., Any], expected: dict[int, Result], tmp_path: Path) -> Callable[[int, str], str]:
    """Kills ranks of a training, by its number and a seed; checks how it ends and returns what the kills were."""

    def run(number: int, seed: str) -> str:
        if number not in expected:
            argument = {"trainings": [dict(codec.to_builtins(TRAININGS[number]))]}
            ((digest, losses),) = on_ranks("killed_training:undisturbed", argument, devices=1)
            expected[number] = digest, tuple(losses)
        end = killed_training(TRAININGS[number], seed, Path(tempfile.mkdtemp(dir=tmp_path)) / "run")
        assert (end.result[0], tuple(end.result[1])) == expected[number]
        assert end.left == ""
        return end.kills

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "seed", "kills"),
    [
        (0, "1346 0", "1 killed after a checkpoint, which continued by itself"),
        (1, "1346 1", "2 killed after a checkpoint"),
    ],
)
def test_a_training_that_lost_ranks_continues_by_itself_or_is_resumed(
    number: int, seed: str, kills: str, ended: Callable[[int, str], str]
) -> None:
    assert ended(number, seed) == kills


@pytest.mark.slow
@attacked(few=1)
@given(number=st.integers(0, len(TRAININGS) - 1), seed=st.integers(0, 10**6))
def test_a_killed_training_ends_in_the_same_bits(number: int, seed: int, ended: Callable[[int, str], str]) -> None:
    event(ended(number, str(seed)))
