"""The stored timelines of a sweep, and the parts of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dpsim.records.comparison import ComparedPoint
from dpsim.records.sweep import Predictions, Results
from dpsim.schedule import BACKWARD_EVENT, FORWARD_EVENT, KINDS, UPDATE_EVENT
from dpsim.setting import Setting
from dpsim.timeline import Timeline, TimelineRecord

PARTS = ("forward", "backward", "update", "exposed communication", "other")


@dataclass(frozen=True, kw_only=True)
class Timelines:
    """Measured and predicted timelines by configuration, where the records have them."""

    measured: Mapping[Setting, TimelineRecord]
    predicted: Mapping[Setting, TimelineRecord]

    @staticmethod
    def of(predictions: Predictions, results: Results) -> Timelines:
        """Return the timelines of the two records; of an A/A pair those of the first run."""
        measured: dict[Setting, TimelineRecord] = {}
        predicted: dict[Setting, TimelineRecord] = {}
        for run in results.points:
            if run.timeline is not None and run.timeline.operation:
                measured.setdefault(run.setting.first_run, run.timeline)
        for point in predictions.points:
            if point.timeline is not None and point.timeline.operation:
                predicted.setdefault(point.setting.first_run, point.timeline)
        return Timelines(measured=measured, predicted=predicted)

    def both(self, point: ComparedPoint) -> tuple[Timeline, Timeline] | None:
        """Return the measured and the predicted timeline of a point, or ``None`` unless both were kept."""
        setting = point.setting
        if setting not in self.measured or setting not in self.predicted:
            return None
        return Timeline.from_record(self.measured[setting]), Timeline.from_record(self.predicted[setting])


def typical_step(timeline: Timeline) -> Timeline:
    """Return the lowest rank's step of median length."""
    of_rank = timeline.select(rank=int(timeline.rank.min()))
    steps = [of_rank.select(step=int(step)) for step in np.unique(of_rank.step)]
    lengths = [float(step.end_s.max() - step.start_s.min()) for step in steps]
    return steps[int(np.argsort(lengths, kind="stable")[(len(lengths) - 1) // 2])]


def parts_s(timeline: Timeline, step_s: float, exposed_s: float) -> dict[str, float]:
    """Return the seconds of a step by part.

    Forward, backward and update are medians over the timeline's steps on the lowest rank, exposed communication is
    ``exposed_s``, and ``other`` is the rest of ``step_s``.
    """
    of_rank = timeline.select(rank=int(timeline.rank.min()))
    sums_s = np.array([of_rank.select(step=int(step)).sums_s() for step in np.unique(of_rank.step)])
    parts = {KINDS[kind]: float(np.median(sums_s[:, kind])) for kind in (FORWARD_EVENT, BACKWARD_EVENT, UPDATE_EVENT)}
    parts["exposed communication"] = exposed_s
    return parts | {"other": max(0.0, step_s - sum(parts.values()))}
