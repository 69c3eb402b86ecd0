"""Timelines as Chrome trace events: open the file in Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpsim.codec import to_json, write_text
from dpsim.errors import ConfigError
from dpsim.records.sweep import MeasuredPoint, PredictedPoint, Predictions, Results, clean_values
from dpsim.schedule import LANE_NAMES
from dpsim.setting import FIELDS, Setting
from dpsim.timeline import Timeline

STEPS = 3
SCHEMA = "dpsim.trace/1"
"""Stands in the file beside its events, so that it is known as dpsim's own; viewers take it for a remark."""


def step_of(
    results: Results | None, predictions: Predictions, conditions: Mapping[str, object]
) -> tuple[Setting, list[Timeline]]:
    """Return the setting that trains fastest on the most devices, of those that meet the conditions, and its timelines.

    They are measured and predicted, as far as they are there. Raises ``ConfigError``.
    """
    points: list[MeasuredPoint | PredictedPoint] = [] if results is None else [*results.points]
    points = [point for point in (*points, *predictions.points) if point.timeline is not None]
    setting = fastest(points, conditions)
    timelines = [point.timeline for point in points if point.setting == setting and point.timeline is not None]
    return setting, [Timeline.from_record(timeline) for timeline in timelines]


def fastest(points: Sequence[MeasuredPoint | PredictedPoint], conditions: Mapping[str, object]) -> Setting:
    """Return the setting that trains fastest on the most devices, of those that meet the conditions.

    Raises ``ConfigError``.
    """
    step_s = {
        point.setting: float(np.median(clean_values([point]) if isinstance(point, MeasuredPoint) else point.step_s))
        for point in reversed(points)
    }
    settings = sorted(
        dict.fromkeys(point.setting for point in points),
        key=lambda setting: (-setting.plan.devices, step_s[setting] / setting.plan.global_batch),
    )
    for setting in settings:
        if all(setting.value(name) == value for name, value in conditions.items()):
            return setting
    present = {name: dict.fromkeys(setting.text(name) for setting in settings) for name in FIELDS}
    raise ConfigError(
        "no setting of this sweep has timelines"
        + "".join(f" and {name} = {value}" for name, value in conditions.items()),
        allowed="; ".join(
            f"{name} {', '.join(values)}" for name, values in present.items() if name in conditions or len(values) > 1
        ),
        remedy="choose one of these, like --set devices=2",
    )


def trace_events(timelines: Sequence[Timeline], *, steps: int = STEPS) -> dict[str, Any]:
    """Return the first ``steps`` steps of each timeline as a Trace Event Format object.

    Each rank of a timeline is a process, each lane a thread, and each operation a complete event (``ph`` X) with ``ts``
    and ``dur`` in microseconds. Every timeline starts at 0, so that measured and predicted line up.
    """
    events: list[dict[str, Any]] = []
    pid = 0
    for timeline in timelines:
        chosen = np.isin(timeline.step, np.unique(timeline.step)[:steps])
        origin = float(timeline.start_s[chosen].min()) if chosen.any() else 0.0
        emulated = [
            what
            for what, is_emulated in (
                ("network", timeline.emulated_network),
                ("computation", timeline.emulated_compute),
            )
            if is_emulated
        ]
        label = timeline.source + (" by the device's clock" if timeline.clock == "device" else "")
        label += f" (emulated {' and '.join(emulated)})" if emulated else ""
        for rank in np.unique(timeline.rank[chosen]):
            of_rank = chosen & (timeline.rank == rank)
            lanes = [int(lane) for lane in np.unique(timeline.lane[of_rank])]
            events += _names(pid, f"{label}, rank {rank}", lanes)
            events += [_event(timeline, int(i), pid, origin) for i in np.flatnonzero(of_rank)]
            pid += 1
    return {"schema": SCHEMA, "traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(path: Path, timelines: Sequence[Timeline]) -> None:
    """Write ``trace_events`` as a JSON file that Perfetto opens."""
    write_text(path, to_json(trace_events(timelines), indent=None) + "\n")


def _names(pid: int, process: str, lanes: Sequence[int]) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}},
    ]
    for lane in lanes:
        name = LANE_NAMES[lane] if 0 <= lane < len(LANE_NAMES) else f"lane {lane}"
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": lane, "args": {"name": name}})
    return events


def _event(timeline: Timeline, index: int, pid: int, origin: float) -> dict[str, Any]:
    start, end = float(timeline.start_s[index]), float(timeline.end_s[index])
    name = timeline.operations[int(timeline.operation[index])]
    arguments: dict[str, Any] = {"step": int(timeline.step[index])}
    if timeline.size_bytes[index]:
        arguments["size_bytes"] = int(timeline.size_bytes[index])
    if timeline.asked_s is not None:
        arguments["asked_us"] = round((float(timeline.asked_s[index]) - origin) * 1e6, 3)
    return {
        "ph": "X",
        "name": name,
        "cat": name.split(" ")[0],
        "pid": pid,
        "tid": int(timeline.lane[index]),
        "ts": round((start - origin) * 1e6, 3),
        "dur": round(max(0.0, end - start) * 1e6, 3),
        "args": arguments,
    }
