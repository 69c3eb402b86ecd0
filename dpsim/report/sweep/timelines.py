"""The stored timelines of a sweep: the step that a report draws, and the parts of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dpsim.records.comparison import ComparedPoint
from dpsim.records.sweep import Predictions, Results
from dpsim.schedule import (
    BACKWARD_EVENT,
    COMMUNICATION_LANE,
    COMPUTE_LANE,
    FORWARD_EVENT,
    KINDS,
    UPDATE_EVENT,
    WAIT_EVENT,
)
from dpsim.setting import Setting
from dpsim.timeline import Timeline, TimelineRecord

PARTS = ("forward", "backward", "update", "exposed communication", "other")


@dataclass(frozen=True, kw_only=True)
class Timelines:
    """Measured and predicted timelines by configuration, where the records have them: those of both A/A runs."""

    measured: Mapping[Setting, tuple[TimelineRecord, ...]]
    predicted: Mapping[Setting, TimelineRecord]

    @staticmethod
    def of(predictions: Predictions, results: Results) -> Timelines:
        """Return the timelines of the two records."""
        measured: dict[Setting, tuple[TimelineRecord, ...]] = {}
        predicted: dict[Setting, TimelineRecord] = {}
        for run in results.points:
            if run.timeline is not None and run.timeline.operation:
                setting = run.setting.first_run
                measured[setting] = (*measured.get(setting, ()), run.timeline)
        for point in predictions.points:
            if point.timeline is not None and point.timeline.operation:
                predicted.setdefault(point.setting.first_run, point.timeline)
        return Timelines(measured=measured, predicted=predicted)

    def both(self, point: ComparedPoint) -> tuple[Timeline, Timeline] | None:
        """Return a measured and the predicted step of a point, or ``None`` unless both were kept.

        The measured step is the one nearest to the measured median, on all ranks. The predicted one is that of the rank
        class of the rank that was ready last.
        """
        setting = point.setting
        if setting not in self.measured or setting not in self.predicted:
            return None
        measured = [Timeline.from_record(record) for record in self.measured[setting]]
        predicted = _steps(Timeline.from_record(self.predicted[setting]))[0]
        step = nearest_step(measured, point.measured_step_s)
        last = int(ready_last(step).rank[0])
        return step, [of_rank for of_rank in _ranks(predicted) if of_rank.rank[0] <= last][-1]


def nearest_step(timelines: Sequence[Timeline], step_s: float) -> Timeline:
    """Return the step, on all ranks, whose length is nearest to ``step_s``."""
    return min((step for timeline in timelines for step in _steps(timeline)), key=lambda s: abs(length_s(s) - step_s))


def _steps(timeline: Timeline) -> list[Timeline]:
    return [timeline.select(step=int(step)) for step in np.unique(timeline.step)]


def _ranks(step: Timeline) -> list[Timeline]:
    return [step.select(rank=int(rank)) for rank in np.unique(step.rank)]


def length_s(step: Timeline) -> float:
    """Return the seconds of a step on the slowest rank."""
    return max(float(of_rank.end_s.max() - of_rank.start_s.min()) for of_rank in _ranks(step))


def ready_last(step: Timeline) -> Timeline:
    """Return the events of the rank with the least exposed communication, for which the other ranks wait."""
    return min(_ranks(step), key=Timeline.exposed_communication_s)


def waits_for_ranks_s(step: Timeline, rank: int) -> list[tuple[float, float]]:
    """Return when a rank is in a collective that another rank has not begun yet: its starts and ends in seconds."""
    spans: list[tuple[float, float]] = []
    sent = (step.lane == COMMUNICATION_LANE) & (step.kind != WAIT_EVENT)
    for operation in np.unique(step.operation[sent & (step.rank == rank)]):
        same = sent & (step.operation == operation)
        starts = [step.start_s[same & (step.rank == r)] for r in np.unique(step.rank)]
        if len({len(times) for times in starts}) > 1:
            continue
        own = same & (step.rank == rank)
        begun = np.minimum(np.max(starts, axis=0), step.end_s[own])
        spans += [(float(a), float(b)) for a, b in zip(step.start_s[own], begun, strict=True) if b > a]
    return spans


def parts_s(step: Timeline, step_s: float, exposed_s: float) -> dict[str, float]:
    """Return the seconds of a step by part, which add up to ``step_s``.

    Exposed communication is ``exposed_s``. The rest is divided as the computation of the rank that was ready last is:
    into forward, backward, update, and ``other``, which is the loss and the beginning of the step.
    """
    of_rank = ready_last(step)
    computing_s = max(0.0, step_s - exposed_s)
    compute = of_rank.lane == COMPUTE_LANE
    busy_s = float((of_rank.end_s - of_rank.start_s)[compute].sum())
    scale = computing_s / busy_s if busy_s else 0.0
    sums_s = of_rank.sums_s() * scale
    parts = {KINDS[kind]: float(sums_s[kind]) for kind in (FORWARD_EVENT, BACKWARD_EVENT, UPDATE_EVENT)}
    other_s = max(0.0, computing_s - sum(parts.values()))
    return parts | {"exposed communication": exposed_s, "other": other_s}
