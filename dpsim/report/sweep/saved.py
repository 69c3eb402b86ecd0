"""A sweep as data: its samples, its timelines, its main figure, and what a terminal shows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dpsim.codec import to_builtins
from dpsim.errors import ConfigError
from dpsim.records.columns import run_values, without_threshold
from dpsim.records.comparison import SweepData
from dpsim.records.sweep import MeasuredPoint, PredictedPoint
from dpsim.report.charts import Panel
from dpsim.report.saved import Samples
from dpsim.report.sweep.question import QUESTIONS
from dpsim.report.sweep.verdict import verdict
from dpsim.report.words import counted
from dpsim.schedule import KINDS, LANE_NAMES
from dpsim.timeline import Timeline


def title(data: SweepData) -> str:
    """Return what was swept, where and when."""
    points = data.comparison.points
    devices = sorted({point.devices for point in points})
    networks = dict.fromkeys(point.network for point in points)
    models = " and ".join(dict.fromkeys(each.name for each in data.predictions.workloads))
    return (
        f"sweep of {models} on {', '.join(map(str, devices))} devices, network "
        f"{' and '.join(networks)}: {counted(len(points), 'point')}, measured from {data.results.measured_from}"
    )


def points(data: SweepData) -> list[dict[str, Any]]:
    """Return the points of ``--json``. Without a threshold it is null, as on one device; infinity is ``"inf"``."""
    return [to_builtins(without_threshold(point.values(), point.setting)) for point in data.comparison.points]


def summary(data: SweepData) -> dict[str, Any]:
    """Return the summary of ``--json``: the scores of each network, then those of the groups with their verdicts."""
    comparison = data.comparison
    parts: dict[str, Any] = to_builtins(msgspec.structs.replace(comparison, points=(), quality=None))
    names = [
        "single_device_median_abs_error",
        "overlap",
        "chosen_overlap",
        "predictions_sha256",
        "predicted_at",
        "measured_from",
        "measured_until",
        "not_measured",
        "relative_uncertainty",
        "blind_predicted_at",
        "beforehand_median_abs_error",
        "machine_change",
    ]
    summary: dict[str, Any] = {
        "networks": [_flat(each) for each in parts["networks"]],
        "groups": [
            of | {"verdict": verdict(comparison, group).values(comparison)}
            for of, group in zip(parts["groups"], comparison.groups, strict=True)
        ],
    }
    summary |= {name: parts[name] for name in names} | {"share_clean": comparison.share_clean}
    digests = ("inputs_sha256", "blind_sha256", "model_version")
    summary |= {name: getattr(data.results, name) for name in digests}
    interval = comparison.interval
    summary |= {
        "interval_level": comparison.interval_level,
        "interval_studies": comparison.interval_studies,
        "coverage": interval.coverage if interval else None,
        "interval_score": interval.interval_score if interval else None,
        "constant_interval_score": interval.constant_score if interval else None,
        "intervals": parts["intervals"],
    }
    if comparison.experiment.question == "devices":
        first = comparison.points[0]
        summary["scaling"] = {
            "kind": "weak" if comparison.experiment.weak else "strong",
            "batch_norm": first.batch_norm,
            "leaves": first.leaves,
            "steps": comparison.experiment.steps,
        }
        summary |= {name: parts[name] for name in ("identical", "drift_predictions_sha256")}
    return summary


def _flat(network: dict[str, Any]) -> dict[str, Any]:
    """Return the scores of a network with those of its step times at the top."""
    step: dict[str, Any] = network["step"]
    return {"network": network["network"]} | step | {name: network[name] for name in network if name != "step"}


def samples(data: SweepData) -> Samples:
    """Return each measured step: its setting, its round, and its times in seconds."""
    runs = data.results.points
    lengths = [len(run.step_s) for run in runs]
    values = {
        "round": [number for run in runs for number in run.round],
        "step": _joined([range(length) for length in lengths], np.int64),
        "step_s": _joined([run.step_s for run in runs]),
        "exposed_communication_s": _joined([run.exposed_communication_s for run in runs]),
        "loss": _joined([_filled(run.losses, len(run.step_s)) for run in runs]),
        "clean": _joined([_filled(run.clean, len(run.step_s)) for run in runs]),
    }
    return [run_values(run.setting) for run in runs], lengths, values


def timeline(data: SweepData) -> Samples:
    """Return each event of the timelines that were kept, measured and predicted: those of the scored predictions."""
    points: list[MeasuredPoint | PredictedPoint] = [*data.results.points, *data.scored.points]
    settings = [(point.setting, Timeline.from_record(point.timeline)) for point in points if point.timeline is not None]
    rows = [
        run_values(setting) | {name: getattr(events, name) for name in ("source", "emulated_network", "clock")}
        for setting, events in settings
    ]
    timelines = [events for _, events in settings]
    integers = ("step", "rank", "size_bytes")
    values: dict[str, Any] = {
        name: _joined([getattr(each, name) for each in timelines], np.int64 if name in integers else np.float64)
        for name in (*integers, "start_s", "end_s")
    }
    asked_s = [np.full(len(each.step), np.nan) if each.asked_s is None else each.asked_s for each in timelines]
    values["asked_s"] = _joined(asked_s)
    values["lane"] = [LANE_NAMES[lane] for each in timelines for lane in each.lane]
    values["operation"] = [each.operations[number] for each in timelines for number in each.operation]
    values["kind"] = [KINDS[kind] for each in timelines for kind in each.kind]
    return rows, [len(each.step) for each in timelines], values


def panel(data: SweepData, *, network: str | None = None, devices: int | None = None) -> Panel:
    """Return the main figure of the report: step time against the fusion threshold, speedup against the number of
    devices, or the samples per second of each setting.

    It is drawn for one ``network`` (the first that was swept), and unless devices are compared for one number of
    ``devices`` (the largest). Raises ``ConfigError`` for one that was not swept.
    """
    comparison = data.comparison
    groups = comparison.groups
    network = _chosen("network", network, [group.network for group in groups])
    counts = sorted((group.devices for group in groups if group.network == network), reverse=True)
    if devices is not None and not any(counts):
        raise ConfigError(
            f"devices={devices} for the speedup, which is drawn against the number of devices",
            allowed="network",
        )
    devices = _chosen("devices", devices, counts)
    chosen = [(group.network, group.devices) for group in groups].index((network, devices))
    return QUESTIONS.find(comparison.experiment.question).chart(comparison).panels[chosen]


def write(folder: Path, data: SweepData, pages: Collection[str]) -> list[Path]:
    """Write the report; returns the paths. Raises ``ConfigError``."""
    from dpsim.report.sweep.write import write_report

    return write_report(folder, data, pages)


def show(data: SweepData, page: Path | None, verbose: bool) -> Iterator[Any]:
    """Yield the summary of a sweep, and before it with ``verbose`` all tables."""
    from dpsim.report.sweep.content import for_terminal
    from dpsim.report.sweep.summary import Summary

    if verbose:
        yield for_terminal(data.comparison)
    if page is not None:
        yield Summary(comparison=data.comparison, folder=page.parent, page=page.name)


def _joined(parts: Sequence[Any], dtype: Any = np.float64) -> Any:
    """Return the parts one after the other as one array."""
    return np.concatenate([np.asarray(part, dtype) for part in parts]) if parts else np.empty(0, dtype)


def _filled(values: Sequence[float | None], length: int) -> Sequence[float | None]:
    """Return the values, or where a record of an earlier version has none as many that are missing."""
    return values if len(values) == length else [np.nan] * length


def _chosen(name: str, given: Any, allowed: Sequence[Any]) -> Any:
    """Return what was given, or else the first that is allowed. Raises ``ConfigError``."""
    if not allowed:
        raise ConfigError("the sweep ran on one device alone", allowed="a figure of a sweep on 2 devices or more")
    if given is None:
        return allowed[0]
    if given not in allowed:
        raise ConfigError(f"{name} {given!r} was not swept", allowed=", ".join(map(str, dict.fromkeys(allowed))))
    return given
