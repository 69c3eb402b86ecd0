"""The verdicts of a report, and the numbers in its sentences."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from report_factory import PACED, sweep
from rich.console import Console

from dpsim.columns import columns_of
from dpsim.harness.sweep.compare import compare
from dpsim.records.compared_point import ComparedPoint
from dpsim.records.comparison import Comparison
from dpsim.records.sweep import read_predictions, read_results
from dpsim.report.sweep.cells import PointColumns
from dpsim.report.sweep.content import answer
from dpsim.report.sweep.facts import rules
from dpsim.report.sweep.summary import Summary
from dpsim.report.sweep.verdict import verdict
from dpsim.report.sweep.warnings import warnings
from dpsim.report.words import counted, devices_name, skill_text

ROOT = Path(__file__).parents[2]
CLEAN = compare(*sweep(rounds=30, noise=0.002))


def changed(network: str, speedup: float | None = None, **group: Any) -> str:
    """The answer of a network, with another group and another speedup of its best point."""
    old = next(one for one in CLEAN.groups if one.network == network)
    new = msgspec.structs.replace(old, **group)
    points = tuple(
        p.replaced(alone=p.alone.replaced(measured_step_s=speedup * p.measured_step_s))
        if speedup and p.alone and p.network == network
        else p
        for p in CLEAN.points
    )
    groups = tuple(new if one is old else one for one in CLEAN.groups)
    comparison: Comparison = msgspec.structs.replace(CLEAN, points=points, groups=groups)
    return answer(comparison, new)


def test_devices_that_are_slower_than_one_are_advised_against_first() -> None:
    assert changed(PACED, speedup=0.91).startswith(f"On {PACED} (emulated), 2 devices: do not use 2 devices")
    assert "do not use" not in changed(PACED, speedup=1.5)
    assert "do not use" not in changed(PACED, speedup=0.99, noise=0.05)


def test_a_threshold_that_does_not_matter_is_said_not_to() -> None:
    text = changed("node", below_noise=True, effect=0.03, noise_floor=0.04)
    assert "The threshold makes no difference that can be seen" in text and "The model" not in text
    text = changed("node", below_noise=True, effect=1.45, noise_floor=1.61)
    assert "nothing can be said: the medians are only known to 161%" in text


def test_intermediate_noise_leaves_no_threshold_surely_best() -> None:
    text = changed("node", below_noise=False, effect=0.17, noise=0.14, noise_floor=0.14)
    assert "No threshold is surely best: they differ by 17.0%, and two runs of one setting by 14.0%" in text
    assert "trained fastest" not in text and "The model had chosen" not in text


def test_a_disturbed_run_has_no_verdict() -> None:
    assert "nothing can be said: two runs of one setting differ by 376%" in changed("node", noise=3.76)


def test_a_single_setting_is_called_neither_best_nor_chosen() -> None:
    group = next(one for one in CLEAN.groups if one.network == PACED)
    only = CLEAN.best_measured(group).replaced(is_best_predicted=True)
    others = (point for point in CLEAN.points if point.group != group.name)
    comparison = msgspec.structs.replace(CLEAN, points=(only, *others))
    text = answer(comparison, group).partition(" The median error")[0]
    assert text.endswith("times as fast as 1. Only one setting was measured.")
    assert not re.search("best|fastest|whatever|difference|the model had", text, re.IGNORECASE)
    assert verdict(comparison, group).mark(only) == ""


@pytest.mark.parametrize("of_the_same_minutes", ["", "2026-11-28T12:00:00Z"])
def test_a_report_says_which_of_its_predictions_are_scored(of_the_same_minutes: str) -> None:
    first, *_ = rules(msgspec.structs.replace(CLEAN, blind_predicted_at=of_the_same_minutes))
    assert "before the first sample was taken" in first
    assert ("The scored ones are others: they were made after the last sample" in first) == bool(of_the_same_minutes)


def test_what_the_model_predicts_alike_is_a_tie_and_no_choice() -> None:
    group = next(one for one in CLEAN.groups if one.network == PACED)
    first, second = CLEAN.best_predicted(group), next(p for p in CLEAN.members(group) if not p.is_best_predicted)
    same = second.replaced(predicted_step_s=first.predicted_step_s)
    comparison = msgspec.structs.replace(CLEAN, points=tuple(same if p is second else p for p in CLEAN.points))
    assert all(point in verdict(comparison, group).chosen for point in (first, same))
    text = answer(comparison, group)
    assert "the model had predicted the same for " in text.lower() and "the model had chosen" not in text.lower()


def test_the_cost_of_the_choice_is_that_of_the_numbers_beside_it() -> None:
    group = next(one for one in CLEAN.groups if one.network == PACED)
    points = [p for p in CLEAN.members(group) if not p.is_best_measured]
    slowest = max(points, key=lambda point: point.measured_step_s)
    other = tuple(p.replaced(is_best_predicted=p == slowest) if p.network == PACED else p for p in CLEAN.points)
    text = answer(msgspec.structs.replace(CLEAN, points=other), msgspec.structs.replace(group, regret=-0.004))
    assert "slower than the best" in text and "regret" not in text


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_the_summary_fits_one_screen(width: int, rows: int) -> None:
    groups = (CLEAN.groups * rows)[:rows]
    out = io.StringIO()
    summary = Summary(comparison=msgspec.structs.replace(CLEAN, groups=groups), folder=Path("reports/one"))
    Console(file=out, width=width, color_system=None).print(summary)
    lines = out.getvalue().splitlines()
    assert len(lines) <= 20 and max(map(len, lines)) <= width
    assert "reports/one/index.html" in out.getvalue() and "Predictions:" in out.getvalue()


def shown(comparison: Comparison, width: int = 100) -> str:
    """The summary as the terminal shows it, in one line."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(Summary(comparison=comparison, folder=Path("one")))
    return " ".join(out.getvalue().split())


@pytest.mark.parametrize(("report", "head"), [("batch-norm", "statistics add"), ("local-batch", "from batch")])
def test_the_summary_has_a_column_for_what_its_question_asks(report: str, head: str) -> None:
    """It is what the sweep is made for, and sentences may not fit."""
    folder = ROOT / "reports" / report
    comparison = compare(read_predictions(folder / "predictions.json"), read_results(folder / "results.json"))
    assert head in shown(comparison, width=160)


def test_verdicts_that_do_not_fit_are_told_in_a_short_line_for_each_group() -> None:
    group = next(one for one in CLEAN.groups if one.network == PACED)
    noisy = msgspec.structs.replace(group, noise=0.5)
    text = shown(msgspec.structs.replace(CLEAN, groups=(group,) * 5))
    assert text.count("Everywhere: ") == 1 and "trained fastest" not in text and "more sentence" not in text
    text = shown(msgspec.structs.replace(CLEAN, groups=(group, noisy, group, group)))
    assert text.count("nothing can be said.") == 1 and text.count(", as predicted.") == 3


@pytest.mark.parametrize(("change", "told"), [(0.13, True), (0.1, False), (0.0, False)])
def test_a_profile_whose_times_changed_is_told(change: float, told: bool) -> None:
    unsteady = msgspec.structs.replace(CLEAN, relative_uncertainty=change)
    texts = [warning.text for warning in warnings(unsteady) if warning.kind == "unsteady"]
    assert len(texts) == told and all("mean times differ by 13%" in text for text in texts)
    assert ("The machine changed its speed by itself while it was profiled, by about 13" in shown(unsteady)) == told


def test_a_compute_slowdown_that_is_not_known_well_is_said() -> None:
    wide = msgspec.structs.replace(CLEAN, compute_slowdown_half_width=0.05)
    assert "within 5.0%" in next(warning.text for warning in warnings(wide) if warning.kind == "wide-slowdown")


@pytest.mark.parametrize(
    ("best", "text"),
    [
        (math.inf, "One bucket (threshold inf) trained fastest"),
        (0.0, "One bucket for each tensor (threshold 0) trained fastest"),
        (32768.0, "A threshold of 32 KiB trained fastest"),
    ],
)
def test_the_ends_of_the_thresholds_are_named_by_their_buckets(best: float, text: str) -> None:
    points = []
    for point in CLEAN.points:
        fastest = point.devices > 1 and point.fusion_threshold_bytes == best
        factor = 0.5 if fastest else 1.0
        points.append(
            point.replaced(
                measured_step_s=0.004 * factor if point.devices > 1 else point.measured_step_s,
                is_best_measured=fastest,
            )
        )
    groups = tuple(msgspec.structs.replace(group, below_noise=False, effect=1.0) for group in CLEAN.groups)
    assert text in shown(msgspec.structs.replace(CLEAN, points=tuple(points), groups=groups), width=120)


def test_a_summary_of_one_device_chooses_nothing() -> None:
    alone = tuple(point for point in CLEAN.points if point.devices == 1)
    out = io.StringIO()
    comparison = msgspec.structs.replace(CLEAN, points=alone, groups=())
    Console(file=out, width=80, color_system=None).print(Summary(comparison=comparison, folder=Path("one")))
    assert "there is nothing to choose" in out.getvalue()


@pytest.mark.parametrize(("skill", "text"), [(-5935.8, "below -10"), (-0.001, "0.00"), (0.6, "0.60"), (None, "none")])
def test_skill_is_written_so_that_it_means_something(skill: float | None, text: str) -> None:
    assert skill_text(skill) == text


def test_one_of_a_kind_has_no_plural() -> None:
    assert [counted(1, "point"), counted(2, "point"), devices_name(1)] == ["1 point", "2 points", "1 device"]
    first = CLEAN.points[0].replaced(samples=3)
    (actual,) = warnings(msgspec.structs.replace(CLEAN, points=(first, *CLEAN.points[1:])))
    assert actual.text.startswith("1 point with fewer than 10 samples") and "1 devices" not in actual.text


def test_every_declared_column_of_a_point_can_be_shown_in_a_table() -> None:
    show = PointColumns(comparison=CLEAN)
    names = [name for name, column in columns_of(ComparedPoint).items() if not column.prefix]
    shown = {name: [show(name).cell(point) for point in CLEAN.scored] for name in names}
    assert all(isinstance(cell, str) for cells in shown.values() for cell in cells)
    (alone,) = (i for i, p in enumerate(CLEAN.scored) if p.devices == 1 and p.network == CLEAN.scored[0].network)
    assert shown["measured_speedup"][alone] == "" and any(cell.endswith("x") for cell in shown["measured_speedup"])
    assert show("measured_step_s").head == "measured ms"
