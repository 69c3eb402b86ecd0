"""What measuring the advice of ``tune`` shows: gains over the default, regret, and what is pasted in the end."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from report_factory import sweep, workload

from dpsim.frameworks import FRAMEWORKS
from dpsim.harness.sweep.compare import compare
from dpsim.harness.sweep.scores import measured_regret
from dpsim.machine import Link, Machine
from dpsim.model.ranking import Tuned
from dpsim.model.rows import PredictedRow, Ratio
from dpsim.plan import Plan
from dpsim.records.compared_point import ComparedPoint
from dpsim.records.comparison import Comparison
from dpsim.report import tuning as report

MACHINE = Machine(name="m", link=Link(latency_s=1e-5, bandwidth_bytes_per_s=1e9))


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return compare(*sweep(networks=("node",)))


def points(comparison: Comparison) -> list[ComparedPoint]:
    return sorted((point for point in comparison.scored if point.devices > 1), key=lambda p: p.measured_step_s)


def tuned(comparison: Comparison, default: int, advised: int) -> Tuned:
    """Advice on the measured caps: those with these places from the fastest on; the advised one is predicted first."""
    plans = [point.setting.plan for point in points(comparison)]
    options = [PredictedRow(workload=workload(), machine=MACHINE, plan=plan) for plan in plans]
    for place, option in enumerate(options):
        option.gain = Ratio(1.5, 1.4, 1.6) if place == advised else Ratio(1.0, 1.0, 1.0)
    first = options[default]
    caps = (options[advised], *(option for place, option in enumerate(options) if place != advised))
    return Tuned(default=first, caps=caps, batches=(first,), accumulations=(first,), together=options[advised])


def test_gains_are_over_the_measured_default(comparison: Comparison) -> None:
    rows = report.measured_records(comparison, tuned(comparison, default=3, advised=0))
    default = points(comparison)[3].measured_step_s
    assert rows[0]["default"] and rows[0]["gain"] == 1 and len(rows) == len(points(comparison))
    for row in rows:
        assert row["gain"] == pytest.approx(default / row["measured_step_s"])
        assert row["noise"] >= row["aa"] > 0


def test_regret_is_what_the_advised_cap_loses_to_the_best(comparison: Comparison) -> None:
    first, *_, last = (point.measured_step_s for point in points(comparison))
    right, wrong = (tuned(comparison, default=3, advised=place) for place in (0, -1 % len(points(comparison))))
    assert measured_regret(comparison, right.caps, right.advised) == pytest.approx(0, abs=0.02)
    assert measured_regret(comparison, wrong.caps, wrong.advised) == pytest.approx(last / first - 1, abs=0.05)


def test_the_measured_batch_and_accumulation_are_named_where_they_are_faster_than_the_noise() -> None:
    default = Plan(devices=2, global_batch=64, fusion_rule="ddp")
    batch, accumulated = replace(default, global_batch=128), replace(default, global_batch=256, accumulate=4)
    both = replace(batch, fusion_threshold_bytes=0.0)
    gains = {default: 1.0, batch: 1.05, accumulated: 1.8, both: 2.0}
    rows = [{"plan": plan, "default": plan is default, "gain": gain, "noise": 0.1} for plan, gain in gains.items()]
    (sentence,) = report.measured_batches(rows)
    assert "measured, 4 micro-batches a step (no_sync) train 1.80 times (noise 10.0%)" in sentence
    assert "local batch" not in sentence
    assert not [*report.measured_batches(rows[:2])]


def test_what_is_pasted_is_decided_by_the_measurement(comparison: Comparison) -> None:
    worst = len(points(comparison)) - 1
    rows = report.measured_records(comparison, tuned(comparison, default=worst, advised=1))
    sentence, line = report.measured_answer(rows, FRAMEWORKS["ddp"], workload())
    best = points(comparison)[0].setting.plan
    assert "measured, 2 devices train" in sentence and line == report.paste(best, FRAMEWORKS["ddp"], workload())
    rows = report.measured_records(comparison, tuned(comparison, default=0, advised=worst))
    sentence, line = report.measured_answer(rows, FRAMEWORKS["ddp"], workload())
    assert sentence.endswith("by more than the noise: leave it.") and not line
