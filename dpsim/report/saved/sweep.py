"""A sweep as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dpsim.errors import ConfigError
from dpsim.records.columns.sweep import run_values
from dpsim.records.comparison import Comparison
from dpsim.records.reproduce import ReproduceRecord
from dpsim.records.sweep import MeasuredPoint, PredictedPoint, Predictions, Results
from dpsim.report.saved.result import SavedResult
from dpsim.report.sweep.result import points_json
from dpsim.report.words import counted
from dpsim.schedule import KINDS, LANE_NAMES
from dpsim.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class SavedSweep(SavedResult):
    """A sweep: its records, and what follows from them.

    ``comparison`` is ``dpsim.harness.sweep.compare.compare(predictions, results, drift)``.
    """

    kind: ClassVar[str] = "sweep"
    predictions: Predictions
    results: Results
    comparison: Comparison
    drift: ReproduceRecord | None = None

    @property
    def title(self) -> str:
        """What was swept, where and when."""
        devices = sorted({point.devices for point in self.comparison.points})
        networks = dict.fromkeys(point.network for point in self.comparison.points)
        models = " and ".join(dict.fromkeys(each.name for each in self.predictions.workloads))
        return (
            f"sweep of {models} on {', '.join(map(str, devices))} devices, network "
            f"{' and '.join(networks)}: {counted(len(self.comparison.points), 'point')}, measured from "
            f"{self.results.measured_from}"
        )

    def points(self) -> list[dict[str, Any]]:
        """Return the points as ``--json`` prints them."""
        return points_json(self.comparison)

    def samples(self) -> pd.DataFrame:
        """Return a row for each measured step: its setting, its round, and its times in seconds."""
        from dpsim.report.frames import repeated

        runs = self.results.points
        lengths = [len(run.step_s) for run in runs]
        values = {
            "round": [number for run in runs for number in run.round],
            "step": _joined([range(length) for length in lengths], np.int64),
            "step_s": _joined([run.step_s for run in runs]),
            "exposed_communication_s": _joined([run.exposed_communication_s for run in runs]),
            "loss": _joined([_filled(run.losses, len(run.step_s)) for run in runs]),
        }
        return repeated([run_values(run.setting) for run in runs], lengths, values, self.columns("samples"))

    def timeline(self) -> pd.DataFrame:
        """Return a row for each event of the timelines that were kept, measured and predicted."""
        from dpsim.report.frames import repeated

        points: list[MeasuredPoint | PredictedPoint] = [*self.results.points, *self.predictions.points]
        kept = [(point.setting, Timeline.from_record(point.timeline)) for point in points if point.timeline is not None]
        rows = [
            run_values(setting)
            | {"source": timeline.source, "emulated_network": timeline.emulated_network, "clock": timeline.clock}
            for setting, timeline in kept
        ]
        events = [timeline for _, timeline in kept]
        values: dict[str, Any] = {
            name: _joined([getattr(timeline, name) for timeline in events], dtype)
            for name, dtype in (
                ("step", np.int64),
                ("rank", np.int64),
                ("start_s", np.float64),
                ("end_s", np.float64),
                ("size_bytes", np.int64),
            )
        }
        asked = [timeline.asked_s for timeline in events]
        unknown = [np.full(len(timeline.step), np.nan) for timeline in events]
        values["asked_s"] = _joined(
            [a if a is not None else u for a, u in zip(asked, unknown, strict=True)], np.float64
        )
        values["lane"] = [LANE_NAMES[lane] for timeline in events for lane in timeline.lane]
        values["operation"] = [timeline.operations[number] for timeline in events for number in timeline.operation]
        values["kind"] = [KINDS[kind] for timeline in events for kind in timeline.kind]
        return repeated(rows, [len(timeline.step) for timeline in events], values, self.columns("timeline"))

    def plot(self, ax: Axes | None = None, *, network: str | None = None, devices: int | None = None) -> Axes:
        """Draw the main figure of the report: step time against the fusion threshold, speedup against the number of
        devices, or the samples per second of each setting.

        It is drawn for one ``network`` (the first that was swept), and unless devices are compared for one number of
        ``devices`` (the largest). Raises ``ConfigError`` for one that was not swept.
        """
        from dpsim.report.figures import settings, speedup, step_time
        from dpsim.report.figures.style import on_axes

        groups = self.comparison.groups
        network = _chosen("network", network, [group.network for group in groups])
        members = [group for group in groups if group.network == network]
        question = self.comparison.experiment.question
        if question == "devices":
            if devices is not None:
                raise ConfigError(
                    f"devices={devices} for the speedup, which is drawn against the number of devices",
                    allowed="network",
                )
            return on_axes(ax, lambda axis: speedup.panel(axis, self.comparison, members[0]))
        if question == "settings":
            of_devices = [group for group in members if devices in (None, group.devices)]
            _chosen("devices", devices, [group.devices for group in members])
            return on_axes(ax, lambda axis: settings.panel(axis, self.comparison, of_devices[0]))
        devices = _chosen("devices", devices, sorted((group.devices for group in members), reverse=True))
        panels = step_time.groups(self.comparison)
        points = next(p for p in panels if (p[0].network, p[0].devices) == (network, devices))
        return on_axes(ax, lambda axis: step_time.panel(axis, points))


def _joined(parts: Sequence[Any], dtype: Any = np.float64) -> Any:
    """Return the parts one after the other as one array."""
    return np.concatenate([np.asarray(part, dtype) for part in parts]) if parts else np.empty(0, dtype)


def _filled(values: Sequence[float], length: int) -> Sequence[float]:
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
