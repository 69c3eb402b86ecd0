"""The stored timelines of a sweep by point, and the parts of a step that they tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dpsim.records.comparison import ComparedPoint
from dpsim.records.sweep import PointKey, Predictions, Results
from dpsim.timeline import Timeline, TimelineRecord

KINDS = ("forward", "backward", "update", "allreduce")
PARTS = ("forward", "backward", "update", "exposed communication", "other")
Setting = tuple[object, ...]


@dataclass(frozen=True, kw_only=True)
class Timelines:
    """Measured and predicted timelines by setting, where the records kept them."""

    measured: Mapping[Setting, TimelineRecord]
    predicted: Mapping[Setting, TimelineRecord]

    @staticmethod
    def of(predictions: Predictions, results: Results) -> Timelines:
        """Those of the two records; of twins the first."""
        measured: dict[Setting, TimelineRecord] = {}
        predicted: dict[Setting, TimelineRecord] = {}
        for run in results.points:
            if run.timeline is not None and run.timeline.operation:
                measured.setdefault(_setting(run.key), run.timeline)
        for point in predictions.points:
            if point.timeline is not None and point.timeline.operation:
                predicted.setdefault(_setting(point.key), point.timeline)
        return Timelines(measured=measured, predicted=predicted)

    def both(self, point: ComparedPoint) -> tuple[Timeline, Timeline] | None:
        """A point's measured and predicted timelines, if both were kept."""
        key = _setting(point)
        if key not in self.measured or key not in self.predicted:
            return None
        return Timeline.from_record(self.measured[key]), Timeline.from_record(self.predicted[key])


def _setting(key: PointKey | ComparedPoint) -> Setting:
    return (
        key.network,
        key.devices,
        key.fusion_rule,
        key.fusion_threshold_bytes,
        key.algorithm,
        key.overlap,
        key.global_batch,
    )


def kind_of(operation: str) -> str:
    """``backward`` of ``backward dense2``; ``other`` for what is neither forward, backward, update nor allreduce."""
    kind = operation.split(" ", 1)[0]
    return kind if kind in KINDS else "other"


def typical_step(timeline: Timeline) -> Timeline:
    """Rank 0's step (the lowest rank's) of median length."""
    mine = timeline.select(rank=int(timeline.rank.min()))
    steps = [mine.select(step=int(s)) for s in np.unique(mine.step)]
    lengths = [float(s.end_s.max() - s.start_s.min()) for s in steps]
    return steps[int(np.argsort(lengths, kind="stable")[(len(lengths) - 1) // 2])]


def parts_s(timeline: Timeline, step_s: float, exposed_s: float) -> dict[str, float]:
    """Seconds of a step by part: forward, backward and update as medians over the timeline's steps (lowest rank),
    exposed communication as given, and ``other`` for what is left of ``step_s``."""
    mine = timeline.select(rank=int(timeline.rank.min()))
    kinds = np.array([kind_of(name) for name in mine.operations])[mine.operation]
    length = mine.end_s - mine.start_s
    found = {
        kind: float(np.median([length[(kinds == kind) & (mine.step == s)].sum() for s in np.unique(mine.step)]))
        for kind in ("forward", "backward", "update")
    }
    found["exposed communication"] = exposed_s
    return found | {"other": max(0.0, step_s - sum(found.values()))}
