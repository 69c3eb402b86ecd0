from typing import Any

import msgspec
import pytest
from report_factory import sweep

from dpsim.harness.sweep.compare import compare
from dpsim.records.comparison import Comparison
from dpsim.report.sweep.warnings import warnings

CLEAN = compare(*sweep(rounds=30, noise=0.002))


def _kinds(comparison: Comparison) -> set[str]:
    return {w.kind for w in warnings(comparison)}


def _point(**changes: Any) -> Comparison:
    first = CLEAN.points[-1].replaced(**changes)
    return msgspec.structs.replace(CLEAN, points=(*CLEAN.points[:-1], first))


def _group(**changes: Any) -> Comparison:
    first = msgspec.structs.replace(CLEAN.groups[0], **changes)
    return msgspec.structs.replace(CLEAN, groups=(first, *CLEAN.groups[1:]))


def test_a_clean_sweep_warns_of_nothing() -> None:
    assert _kinds(CLEAN) == set()


@pytest.mark.parametrize(
    ("doubtful", "kind"),
    [
        (_point(samples=3), "few-samples"),
        (_point(measured_high_s=1.0), "wide-interval"),
        (_point(extrapolated=True), "extrapolated"),
        (_point(predicted_buckets=99), "other-buckets"),
        (_point(slow_samples=0.2), "busy"),
        (_group(below_noise=True), "below-noise"),
        (_group(noise=None), "no-noise"),
        (_group(drift=-0.3), "drift"),
        (_group(regret_halves=0), "one-half"),
        (msgspec.structs.replace(CLEAN, measured_from="2024-01-01T00:00:00+00:00"), "predicted-after-measured"),
        (msgspec.structs.replace(CLEAN, measured_from="yesterday"), "no-time"),
        (msgspec.structs.replace(CLEAN, not_measured=("a point",)), "not-measured"),
        (msgspec.structs.replace(CLEAN, same_environment=False), "other-environment"),
        (msgspec.structs.replace(CLEAN, harness_warnings=("another process was busy",)), "run"),
    ],
)
def test_each_doubt_is_named_with_a_remedy(doubtful: Comparison, kind: str) -> None:
    actual = warnings(doubtful)
    assert {w.kind for w in actual} == {kind}
    assert all(w.text and w.remedy for w in actual)


def test_times_with_and_without_a_zone_compare() -> None:
    assert _kinds(msgspec.structs.replace(CLEAN, predicted_at="2025-01-01T09:00:00")) == set()


def test_a_run_that_slows_down_drifts() -> None:
    predictions, results = sweep(networks=("node",), noise=1e-4)
    runs = tuple(
        msgspec.structs.replace(r, step_s=tuple(s * (1 + 0.02 * n) for s, n in zip(r.step_s, r.round, strict=True)))
        for r in results.points
    )
    actual = compare(predictions, msgspec.structs.replace(results, points=runs))
    assert "drift" in _kinds(actual)
    assert actual.groups[0].drift is not None
    assert actual.groups[0].drift > 0.1


def test_an_effect_within_the_noise_is_flagged() -> None:
    predictions, results = sweep(networks=("node",))
    runs = tuple(
        msgspec.structs.replace(r, step_s=(0.0100 + 0.0001 * (r.setting.repeat > 0),) * len(r.step_s))
        for r in results.points
    )
    group = compare(predictions, msgspec.structs.replace(results, points=runs)).groups[0]
    assert group.below_noise
    assert group.effect < group.noise_floor
