"""The verdicts of a report, and the numbers in its sentences."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from report_factory import PACED, sweep

from dpsim.harness.sweep.compare import compare
from dpsim.records.comparison import Comparison
from dpsim.report.sweep.threshold import answer
from dpsim.report.sweep.warnings import warnings
from dpsim.report.words import counted, devices_name, skill_text

CLEAN = compare(*sweep(rounds=30, noise=0.002))


def changed(network: str, speedup: float | None = None, **group: Any) -> str:
    """The answer of a network, with another group and another speedup of its best point."""
    old = next(one for one in CLEAN.groups if one.network == network)
    new = msgspec.structs.replace(old, **group)
    points = tuple(
        msgspec.structs.replace(p, measured_speedup=speedup) if speedup and p.network == network else p
        for p in CLEAN.points
    )
    groups = tuple(new if one is old else one for one in CLEAN.groups)
    comparison: Comparison = msgspec.structs.replace(CLEAN, points=points, groups=groups)
    return answer(comparison, new)


def test_devices_that_are_slower_than_one_are_advised_against_first() -> None:
    assert changed(PACED, speedup=0.91).startswith(f"Do not use 2 devices on {PACED} (emulated): at the best threshold")
    assert "Do not use" not in changed(PACED, speedup=1.5)
    assert "Do not use" not in changed(PACED, speedup=0.99, noise_floor=0.05)


def test_a_threshold_that_does_not_matter_is_said_not_to() -> None:
    text = changed("node", below_noise=True, effect=0.03, noise_floor=0.04)
    assert "the threshold does not matter here" in text and "The model chose" not in text
    text = changed("node", below_noise=True, effect=1.45, noise_floor=1.61)
    assert "too uncertain to tell" in text and "uncertainty of these medians is 161%" in text


def test_the_regret_of_the_text_is_that_of_the_table() -> None:
    group = next(one for one in CLEAN.groups if one.network == PACED)
    points = [p for p in CLEAN.members(group) if not p.is_best_measured]
    other = tuple(
        msgspec.structs.replace(p, is_best_predicted=p == points[0]) if p.network == PACED else p for p in CLEAN.points
    )
    text = answer(msgspec.structs.replace(CLEAN, points=other), msgspec.structs.replace(group, regret=-0.004))
    assert "(regret -0.4%)" in text


@pytest.mark.parametrize(("skill", "text"), [(-5935.8, "below -10"), (-0.001, "0.00"), (0.6, "0.60"), (None, "none")])
def test_skill_is_written_so_that_it_means_something(skill: float | None, text: str) -> None:
    assert skill_text(skill) == text


def test_one_of_a_kind_has_no_plural() -> None:
    assert [counted(1, "point"), counted(2, "point"), devices_name(1)] == ["1 point", "2 points", "1 device"]
    first = msgspec.structs.replace(CLEAN.points[0], samples=3)
    (actual,) = warnings(msgspec.structs.replace(CLEAN, points=(first, *CLEAN.points[1:])))
    assert actual.text.startswith("1 point with fewer than 10 samples") and "1 devices" not in actual.text
