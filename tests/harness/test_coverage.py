"""The coverage of predicted intervals over many calibrations, on made-up points with a known one."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from report_factory import sweep

from dpsim import codec
from dpsim.errors import ConfigError
from dpsim.harness.sweep.compare import compare
from dpsim.harness.sweep.coverage import (
    by_other_studies,
    coverage_by_stratum,
    covered_points,
    interval_scores,
    residuals,
)
from dpsim.records.coverage import CoveredPoint, StratumCoverage
from dpsim.report.sweep.tables import band_name

DEVIATIONS = 1.6449


def points(widths: float, calibrations: int = 400, each: int = 3, changing: bool = False) -> list[CoveredPoint]:
    """Points of 1 s whose intervals are ``widths`` times as wide as their errors' deviation asks for at 90 %.

    Two thirds of the variance is common to a calibration. Deviations are 5 %, or with ``changing`` from 2 to 20 %.
    """
    random = np.random.default_rng(1)
    made = []
    for calibration in range(calibrations):
        deviation = float(random.uniform(0.02, 0.2)) if changing else 0.05
        common = random.normal() * math.sqrt(2 / 3)
        for _ in range(each):
            error = deviation * (common + random.normal() * math.sqrt(1 / 3))
            half = widths * DEVIATIONS * deviation
            made.append(
                CoveredPoint(
                    calibration=str(calibration),
                    stratum="node, 2 devices",
                    low_s=math.exp(-half),
                    high_s=math.exp(half),
                    predicted_s=1.0,
                    measured_s=math.exp(error),
                )
            )
    return made


def only(made: list[CoveredPoint]) -> StratumCoverage:
    (coverage,) = coverage_by_stratum(made)
    return coverage


def test_right_intervals_have_their_nominal_coverage_and_halved_ones_do_not() -> None:
    right, halved = only(points(1.0)), only(points(0.5))
    assert right.coverage == pytest.approx(0.9, abs=0.03)
    assert right.coverage_low < 0.9 < right.coverage_high
    assert halved.coverage_high < 0.75
    assert right.interval_score < halved.interval_score and right.interval_score < only(points(2.0)).interval_score
    assert right.calibrations == 400 and right.points == 1200 and right.level == 0.9
    assert right.median_width == pytest.approx(DEVIATIONS * 0.05)


def test_whole_calibrations_are_resampled_because_their_errors_are_common() -> None:
    common = [point for point in points(0.7, calibrations=60, each=1) for _ in range(10)]
    alone = points(0.7, calibrations=600, each=1)
    widths = [c.coverage_high - c.coverage_low for c in (only(common), only(alone))]
    assert widths[0] > 2 * widths[1]


def test_intervals_that_follow_the_errors_beat_the_best_constant_width() -> None:
    following = only(points(1.0, changing=True))
    assert following.interval_score < 0.9 * following.constant_score
    steady = only(points(1.0))
    assert steady.interval_score == pytest.approx(steady.constant_score, rel=0.03)
    assert steady.constant_width == pytest.approx(DEVIATIONS * 0.05, rel=0.15)


def test_the_score_is_the_width_and_ten_times_the_miss() -> None:
    low, high, measured = np.array([1.0, 1.0]), np.array([2.0, 2.0]), np.array([1.5, 4.0])
    assert interval_scores(low, high, measured, 0.8) == pytest.approx([1 / 1.5, (1 + 10 * 2) / 4])


def test_a_constant_width_is_chosen_on_the_other_calibrations() -> None:
    made = [
        msgspec.structs.replace(points(1.0)[0], calibration=name, measured_s=math.exp(error))
        for name, error in (("a", 0.1), ("b", 0.1), ("c", 0.5))
    ]
    coverage = only(made)
    assert coverage.constant_width == pytest.approx(0.5, rel=0.01)
    by_others = [2 * math.sinh(0.5) / math.exp(0.1)] * 2
    missed = (2 * math.sinh(0.1) + 20 * (math.exp(0.5) - math.exp(0.1))) / math.exp(0.5)
    assert coverage.constant_score == pytest.approx(np.mean([*by_others, missed]), rel=0.01)
    alone = only([msgspec.structs.replace(point, calibration="one") for point in made])
    assert alone.constant_score < coverage.constant_score


def test_strata_are_apart_and_a_wrong_level_is_refused() -> None:
    made = points(1.0, calibrations=4)
    other = [CoveredPoint(calibration="0", stratum="x", low_s=1, high_s=2, predicted_s=1, measured_s=3)]
    first, second = coverage_by_stratum(made + other)
    assert (first.stratum, second.stratum, second.coverage) == ("node, 2 devices", "x", 0.0)
    assert coverage_by_stratum([]) == ()
    with pytest.raises(ConfigError, match="level"):
        coverage_by_stratum(made, level=90)
    with pytest.raises(ConfigError, match="predicted"):
        CoveredPoint(calibration="0", stratum="x", low_s=2, high_s=3, predicted_s=1, measured_s=3)


def test_a_sweep_states_the_level_of_its_intervals_only_where_past_studies_tell_their_width() -> None:
    predictions, results = sweep()
    assumed = compare(predictions, results)
    assert assumed.interval_level is None and assumed.interval_studies == 0 and band_name(assumed) == "assumed interval"
    learnt = msgspec.structs.replace(
        predictions,
        points=tuple(
            msgspec.structs.replace(point, interval_level=0.9, interval_factor=2.0, interval_studies=12)
            for point in predictions.points
        ),
    )
    comparison = compare(learnt, msgspec.structs.replace(results, predictions_sha256=codec.digest(learnt)))
    assert comparison.interval_level == 0.9 and comparison.interval_studies == 12
    assert band_name(comparison) == "90% interval"
    assert comparison.interval is not None and comparison.interval.points == len(comparison.points)
    halved, whole = (residuals(each)[0].ratios for each in (assumed, comparison))
    assert whole == pytest.approx([2 * ratio for ratio in halved], rel=1e-3)
    strata = {point.stratum for point in covered_points(comparison.points, "a")}
    assert strata == {part.stratum for part in comparison.intervals} and "node, 2 devices" in strata


def studied(count: int, rng: np.random.Generator, claimed: float = 0.01) -> list[CoveredPoint]:
    """Studies whose four points share an error that their intervals know nothing of."""
    points = []
    for study in range(count):
        shared = rng.normal(0, 0.05)
        points += [
            CoveredPoint(
                calibration=str(study),
                stratum="here",
                low_s=math.exp(-claimed),
                high_s=math.exp(claimed),
                predicted_s=1.0,
                measured_s=math.exp(shared + rng.normal(0, 0.01)),
            )
            for _ in range(4)
        ]
    return points


def test_intervals_by_other_studies_hold_as_often_as_they_say_whatever_they_claimed() -> None:
    rng = np.random.default_rng(3)
    inside = []
    for _ in range(40):
        points = by_other_studies(studied(20, rng, claimed=float(rng.uniform(0.001, 0.1))))
        inside += [point.low_s <= point.measured_s <= point.high_s for point in points]
    assert 0.87 <= np.mean(inside) <= 0.96


def test_nine_other_studies_are_needed_and_ones_own_measurement_counts_for_nothing() -> None:
    rng = np.random.default_rng(4)
    points = studied(10, rng)
    assert by_other_studies(points[:-4]) == ()
    judged = by_other_studies(points)
    assert len(judged) == len(points)
    far = [msgspec.structs.replace(p, measured_s=50.0) if p.calibration == "0" else p for p in points]
    assert [p.low_s for p in by_other_studies(far) if p.calibration == "0"] == [
        p.low_s for p in judged if p.calibration == "0"
    ]
    assert max(p.high_s for p in by_other_studies(far) if p.calibration == "1") > 40
