"""A sweep on a machine whose speed changes: measured steps, errors at equal speed, and the words for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from report_factory import PACED, sweep

from dpsim import codec
from dpsim.errors import FileFormatError
from dpsim.harness.sweep.compare import compare
from dpsim.machine import Speed
from dpsim.records.comparison import ComparedPoint, Comparison
from dpsim.records.sweep import MeasuredPoint, Predictions, Results, read_predictions, read_results
from dpsim.report.sweep.content import content
from dpsim.report.sweep.result import points_json, summary_json
from dpsim.report.sweep.warnings import warnings

SLOW = 1.4


def unsteady(
    share: float, *, calibrated_share: float | None = None, level: float = 1.0, seed: int = 3, **changes: Any
) -> tuple[Predictions, Results]:
    """A sweep without bias whose steps took 1.4 times as long in a share of the visits, predicted for a mixture.

    ``calibrated_share`` is the mixture's, the same unless given; ``level`` makes all of the measurement slower.
    """
    predictions, results = sweep(bias=0.0, noise=0.002, rounds=40, timelines=False, **changes)
    expected = 1 + (share if calibrated_share is None else calibrated_share) * (SLOW - 1)
    speed = tuple(
        Speed(
            devices=devices,
            reference_s=1e-3,
            slow_reference_s=SLOW * 1e-3,
            compute_factor=SLOW,
            slow_share=share if calibrated_share is None else calibrated_share,
        )
        for devices in (1, 2)
    )
    predictions = msgspec.structs.replace(
        predictions,
        machines=tuple(msgspec.structs.replace(machine, speed=speed) for machine in predictions.machines),
        points=tuple(
            msgspec.structs.replace(
                point,
                step_s=point.step_s * expected,
                full_speed_step_s=point.step_s,
                slow_speed_step_s=point.step_s * SLOW,
            )
            for point in predictions.points
        ),
    )
    random = np.random.default_rng(seed)
    points = tuple(_slowed(point, share, level, random) for point in results.points)
    return predictions, msgspec.structs.replace(results, points=points, predictions_sha256=codec.digest(predictions))


def _slowed(run: MeasuredPoint, share: float, level: float, random: np.random.Generator) -> MeasuredPoint:
    rounds = np.array(run.round)
    late = random.random(rounds.max() + 1) < share
    scale = level * np.where(late, SLOW, 1.0)[rounds]
    noise = random.normal(1.0, 0.01, rounds.max() + 1)[rounds]
    return msgspec.structs.replace(
        run,
        step_s=tuple((np.array(run.step_s) * scale).tolist()),
        exposed_communication_s=tuple((np.array(run.exposed_communication_s) * scale).tolist()),
        reference_s=tuple((1e-3 * scale * noise).tolist()),
    )


def _errors(comparison: Comparison) -> list[float]:
    return [point.error for point in comparison.points]


@pytest.mark.parametrize("share", [0.2, 0.45, 0.5, 0.55, 0.8])
def test_a_prediction_of_the_mean_over_speeds_meets_the_measured_step_at_any_share(share: float) -> None:
    """The median of such samples would be at one speed or the other, up to 40 % apart."""
    actual = compare(*unsteady(share))
    assert np.abs(_errors(actual)).max() < 0.04
    assert all(group.noise is not None and group.noise < 0.03 for group in actual.groups)
    assert all(point.slow_samples == 0 for point in actual.points)


def test_at_equal_speed_a_run_that_was_slow_for_longer_shows_no_error() -> None:
    actual = compare(*unsteady(0.7, calibrated_share=0.2))
    assert actual.groups[0].median_error == pytest.approx(1.08 / 1.28 - 1, abs=0.02)
    assert actual.groups[0].median_error_at_equal_speed == pytest.approx(0.0, abs=0.02)


def test_at_equal_speed_a_run_that_was_slower_throughout_shows_no_error() -> None:
    actual = compare(*unsteady(0.0, level=1.1))
    for point in actual.points:
        assert point.error == pytest.approx(1 / 1.1 - 1, abs=0.01)
        assert point.error_at_equal_speed == pytest.approx(0.0, abs=0.01)


def test_on_a_steady_machine_the_measured_step_is_the_median() -> None:
    predictions, results = unsteady(0.0)
    bare = tuple(msgspec.structs.replace(point, reference_s=()) for point in results.points)
    plain = compare(predictions, msgspec.structs.replace(results, points=bare))
    steps = [point.measured_step_s for point in compare(predictions, results).points]
    assert steps == [point.measured_step_s for point in plain.points]


def test_records_of_earlier_versions_are_read_and_have_no_error_at_equal_speed(tmp_path: Path) -> None:
    predictions, results = sweep(networks=(PACED,))
    new = {"reference_s", "full_speed_step_s", "slow_speed_step_s", "speed", "slow_factor", "half_width"}
    for name, record in (("predictions", predictions), ("results", results)):
        codec.write(tmp_path / f"{name}.json", _without(codec.to_builtins(record), new))
    actual = compare(read_predictions(tmp_path / "predictions.json"), read_results(tmp_path / "results.json"))
    assert actual.speeds == () and all(point.error_at_equal_speed is None for point in actual.points)
    assert actual == compare(predictions, results)
    assert not {warning.kind for warning in warnings(actual)} & {"speed-changed", "other-speed", "wide-slowdown"}


def _without(value: Any, names: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(each, names) for key, each in value.items() if key not in names}
    return [_without(each, names) for each in value] if isinstance(value, (list, tuple)) else value


def test_reference_times_without_a_sample_are_refused() -> None:
    predictions, results = unsteady(0.3)
    broken = msgspec.structs.replace(results.points[0], reference_s=results.points[0].reference_s[1:])
    with pytest.raises(FileFormatError, match="values of reference_s"):
        compare(predictions, msgspec.structs.replace(results, points=(broken, *results.points[1:])))


def test_the_report_says_in_words_when_and_by_how_much_the_speed_changed() -> None:
    actual = compare(*unsteady(0.5, calibrated_share=0.2))
    said = {warning.kind: warning.text for warning in warnings(actual)}
    assert said["speed-changed"].startswith("with 2 devices at work this machine changed its speed by itself: in the ")
    assert "calibration it was 1.40 times slower for 20% of the time, in the measurement 1.4" in said["speed-changed"]
    assert "slower in the measurement than in the calibration" in said["other-speed"]


def test_a_steady_machine_is_not_said_to_change() -> None:
    assert not {warning.kind for warning in warnings(compare(*unsteady(0.0)))} & {"speed-changed", "other-speed"}


def test_a_compute_slowdown_that_is_not_known_well_is_said() -> None:
    actual = msgspec.structs.replace(compare(*unsteady(0.0)), compute_slowdown_half_width=0.05)
    assert "within 5.0%" in next(w.text for w in warnings(actual) if w.kind == "wide-slowdown")


def test_errors_at_equal_speed_stand_in_the_table_and_in_json() -> None:
    actual = compare(*unsteady(0.5, calibrated_share=0.2))
    table = content(actual, (), ()).tables[0]
    column = [column.head for column in table.columns].index("error at equal speed")
    point: ComparedPoint = actual.scored[0]
    assert point.error_at_equal_speed is not None
    assert table.sections[0].rows[0][column] == f"{point.error_at_equal_speed:+.1%}"
    assert points_json(actual)[0]["predicted_at_run_speed_s"] == point.predicted_at_run_speed_s
    assert [speed["devices"] for speed in summary_json(actual)["speeds"]] == [1, 2]
