"""Checks the records of a sweep, and joins the runs of each configuration with its prediction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from dpsim import codec
from dpsim.errors import FileFormatError
from dpsim.grouping import grouped
from dpsim.records.compared_point import ComparedPoint
from dpsim.records.sweep import MeasuredPoint, PredictedPoint, Predictions, Results, clean_values
from dpsim.report.sweep.warnings import instant
from dpsim.setting import Setting
from dpsim.study.statistics import median_interval
from dpsim.timeline import Timeline, TimelineRecord

_LONGEST_S, _SHORTEST_S = 1e9, 1e-12
_MOST = 10**12

Point = TypeVar("Point", PredictedPoint, MeasuredPoint)


def joined(
    predictions: Predictions, results: Results, blind: Predictions | None = None
) -> tuple[list[ComparedPoint], tuple[str, ...]]:
    """Return every measured configuration with its prediction, and the names of those predicted but not measured.

    The prediction is the ``blind`` one, if there are any. What compares a point with others is not known yet. Raises
    ``FileFormatError`` when the records do not belong together (hash, experiment, a point without a prediction), or
    hold values that cannot have been measured or predicted.
    """
    _check_hash(predictions, results)
    predicted = _by_setting(predictions.points, "predictions")
    measured = _by_setting(results.points, "results")
    for point in predicted.values():
        _check_predicted(point, predictions)
    for run in measured.values():
        _check_measured(run)
    runs = grouped(map(measured.__getitem__, sorted(measured, key=_order)), lambda run: run.setting.first_run)
    if not runs:
        raise FileFormatError("the results hold no point", allowed="1 or more", remedy="run the sweep again")
    later = predicted if blind is None else _blind_by_setting(blind, predicted)
    points = []
    for setting, members in runs.items():
        candidates = (predicted.get(candidate) for candidate in (setting, *(member.setting for member in members)))
        beforehand = next((candidate for candidate in candidates if candidate is not None), None)
        if beforehand is None:
            raise FileFormatError(
                f"the results hold a point that was not predicted: {setting.describe()}",
                allowed="a prediction for every measured point",
                remedy="run the sweep again: it predicts every point before it measures",
            )
        point = later[beforehand.setting]
        workload, machine = (blind or predictions).made_from(point)
        step = median_interval(clean_values(members))
        points.append(
            ComparedPoint(
                setting=setting,
                predicted=point,
                beforehand=beforehand,
                runs=tuple(members),
                machine=machine,
                emulated_compute=workload.emulated_compute,
                measured_step_s=step.median,
                measured_low_s=step.low,
                measured_high_s=step.high,
            )
        )
    missing = sorted({setting.first_run for setting in predicted} - set(runs), key=_order)
    return points, tuple(setting.describe() for setting in missing)


def _blind_by_setting(blind: Predictions, predicted: Mapping[Setting, PredictedPoint]) -> dict[Setting, PredictedPoint]:
    """Return the blind predictions. Raises ``FileFormatError`` unless they are of the ``predicted`` settings."""
    by_setting = {point.setting: point for point in blind.points}
    if by_setting.keys() != predicted.keys():
        raise FileFormatError(
            "the blind predictions are of other settings than those made beforehand",
            allowed="blind.json and predictions.json of one sweep",
            remedy="give the files of one report, or run the sweep again",
        )
    return by_setting


def _order(setting: Setting) -> tuple[Any, ...]:
    return setting.order


def _check_hash(predictions: Predictions, results: Results) -> None:
    try:
        sha256 = codec.digest(predictions)
        codec.to_json(results).encode()
    except UnicodeEncodeError as error:
        raise FileFormatError(f"the records hold text that is not Unicode: {error}", allowed="UTF-8") from error
    if sha256 != results.predictions_sha256:
        raise FileFormatError(
            f"the results were not measured against these predictions: their SHA-256 is {sha256[:12]}..., "
            f"the results name {results.predictions_sha256[:12]!r}...",
            allowed="the predictions.json that was written before the measurement, unchanged",
            remedy="give the two files of one report, or run the sweep again",
        )
    predicted, measured = instant(predictions.predicted_at), instant(results.measured_from)
    if results.predicted_at != predictions.predicted_at or (predicted and measured and measured < predicted):
        raise FileFormatError(
            f"the results were measured from {results.measured_from!r} on and name a prediction of "
            f"{results.predicted_at!r}; the predictions are of {predictions.predicted_at!r}",
            allowed="predictions that were made before the measurement",
            remedy="run the sweep again; if this recurs, check whether the clock is set back",
        )
    if predictions.experiment != results.experiment:
        raise FileFormatError(
            "the predictions and the results are of different experiments",
            allowed="equal `experiment` in both files",
            remedy="give the two files of one report, or run the sweep again",
        )


def _by_setting(points: Iterable[Point], what: str) -> dict[Setting, Point]:
    by_setting: dict[Setting, Point] = {}
    for point in points:
        _check_setting(point.setting, what)
        if point.setting in by_setting:
            raise FileFormatError(
                f"the {what} hold a point twice: {point.setting.describe()}", allowed="each point once"
            )
        by_setting[point.setting] = point
    return by_setting


def _check_setting(setting: Setting, what: str) -> None:
    for name, value in (("devices", setting.plan.devices), ("global_batch", setting.plan.global_batch)):
        if not 1 <= value <= _MOST:
            raise FileFormatError(f"a point of the {what} has {name} {value}", allowed=f"1 to {_MOST:.0e}")


def _check_seconds(where: str, name: str, values: Iterable[float], *, least: float) -> None:
    for value in values:
        if not (math.isfinite(value) and least <= value <= _LONGEST_S):
            raise FileFormatError(
                f"{where}: {name} holds {value!r}",
                allowed="finite seconds " + ("> 0" if least else ">= 0"),
                remedy="the file is damaged: run the sweep again",
            )


def _check_buckets(where: str, buckets: int) -> None:
    if not 0 <= buckets <= _MOST:
        raise FileFormatError(f"{where}: buckets is {buckets}", allowed="0 or more")


def _check_timeline(where: str, record: TimelineRecord | None) -> None:
    if record is not None:
        _check_seconds(where, "the timeline", (abs(t) for t in (*record.start_s, *record.end_s)), least=0.0)
        try:
            Timeline.from_record(record)
        except FileFormatError as error:
            raise FileFormatError(f"{where}: {error.given}", allowed=error.allowed) from error


def _check_predicted(point: PredictedPoint, predictions: Predictions) -> None:
    where = f"predicted point ({point.setting.describe()})"
    for name, known in (("workload", predictions.workloads), ("machine", predictions.machines)):
        if not 0 <= getattr(point, name) < len(known):
            raise FileFormatError(
                f"{where} was predicted from {name} {getattr(point, name)}",
                allowed=f"the number of one of the {len(known)} in the predictions, from 0 on",
                remedy="the file is damaged: run the sweep again",
            )
    for name in ("step_s", "low_s", "high_s"):
        _check_seconds(where, name, (getattr(point, name),), least=_SHORTEST_S)
    _check_seconds(where, "exposed_communication_s", (point.exposed_communication_s,), least=0.0)
    _check_seconds(where, "null_step_s", point.null_step_s.values(), least=0.0)
    _check_seconds(where, "null_exposed_s", point.null_exposed_s.values(), least=0.0)
    _check_buckets(where, point.buckets)
    _check_timeline(where, point.timeline)


def _check_measured(point: MeasuredPoint) -> None:
    where = f"measured point ({point.setting.describe()})"
    if not point.step_s:
        raise FileFormatError(f"{where} has no samples", allowed="1 or more", remedy="run the sweep again")
    for name in ("exposed_communication_s", "round"):
        if len(getattr(point, name)) != len(point.step_s):
            raise FileFormatError(
                f"{where} has {len(point.step_s)} samples but {len(getattr(point, name))} values of {name}",
                allowed="one value for each sample",
                remedy="the file is damaged: run the sweep again",
            )
    if len(point.clean) not in (0, len(point.step_s)):
        raise FileFormatError(
            f"{where} has {len(point.step_s)} samples but says of {len(point.clean)} whether they are clean",
            allowed="one value for each sample, or none",
            remedy="the file is damaged: run the sweep again",
        )
    _check_seconds(where, "step_s", point.step_s, least=_SHORTEST_S)
    _check_seconds(where, "exposed_communication_s", point.exposed_communication_s, least=0.0)
    _check_buckets(where, point.buckets)
    _check_timeline(where, point.timeline)
