"""The stored timelines of a sweep: the step that a report draws, and the parts of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dpsim.records.compared_point import ComparedPoint
from dpsim.records.sweep import Predictions, Results
from dpsim.report.charts import Bucket
from dpsim.schedule import (
    ALLREDUCE_EVENT,
    BACKWARD_EVENT,
    COMMUNICATION_LANE,
    COMPUTE_LANE,
    FORWARD_EVENT,
    KINDS,
    REDUCE_SCATTER_EVENT,
    UPDATE_EVENT,
    WAIT_EVENT,
)
from dpsim.setting import Setting
from dpsim.timeline import Timeline, TimelineRecord

PARTS = ("forward", "backward", "update", "exposed communication", "other")


@dataclass(frozen=True, kw_only=True)
class Timelines:
    """Measured and predicted timelines by configuration, where the records have them: those of both A/A runs.

    ``gradient_bytes`` of a configuration are the bytes of each layer's gradients, by its name.
    """

    measured: Mapping[Setting, tuple[TimelineRecord, ...]]
    predicted: Mapping[Setting, TimelineRecord]
    gradient_bytes: Mapping[Setting, Mapping[str, int]]

    @staticmethod
    def of(predictions: Predictions, results: Results) -> Timelines:
        """Return the timelines of the two records: of the results, and of the predictions that they are scored by."""
        measured: dict[Setting, tuple[TimelineRecord, ...]] = {}
        predicted: dict[Setting, TimelineRecord] = {}
        gradient_bytes: dict[Setting, Mapping[str, int]] = {}
        layers = [
            {layer.name: sum(tensor.size_bytes for tensor in layer.tensors) for layer in workload.layers}
            for workload in predictions.workloads
        ]
        for run in results.points:
            if run.timeline is not None and run.timeline.operation:
                setting = run.setting.first_run
                measured[setting] = (*measured.get(setting, ()), run.timeline)
        for point in predictions.points:
            if point.timeline is not None and point.timeline.operation:
                predicted.setdefault(point.setting.first_run, point.timeline)
                gradient_bytes.setdefault(point.setting.first_run, layers[point.workload])
        return Timelines(measured=measured, predicted=predicted, gradient_bytes=gradient_bytes)

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


def buckets(step: Timeline, gradient_bytes: Mapping[str, int]) -> list[Bucket]:
    """Return how backward fills the buckets on one rank, given the bytes of each layer's gradients.

    A layer's gradients count when its (last) backward ends, and fill the buckets in the order in which they are sent. A
    bucket is full when the bytes of all so far are reached, at the latest when it is sent. The list is empty where the
    collectives do not sum all gradients, each of them once, or one is sent before backward reaches its gradients.
    """
    scattered = step.kind == REDUCE_SCATTER_EVENT  # replicas add up their shards behind it
    sent = scattered if scattered.any() else step.kind == ALLREDUCE_EVENT
    order = [int(i) for i in dict.fromkeys(step.operation[sent])]
    sizes = [int(step.size_bytes[sent & (step.operation == i)].sum()) for i in order]
    sent_s = [float(step.start_s[sent & (step.operation == i)].min()) for i in order]
    last = {step.operations[step.operation[i]]: i for i in np.flatnonzero(step.kind == BACKWARD_EVENT)}
    filled = [(i, gradient_bytes.get(name.partition(" ")[2], 0)) for name, i in last.items()]
    filled = sorted(((i, size) for i, size in filled if size), key=lambda each: float(step.end_s[each[0]]))
    ends = np.cumsum([size for _, size in filled])
    if not order or not filled or sum(sizes) != ends[-1]:
        return []
    found, begin_s = [], float(step.start_s[filled[0][0]])
    for reached, size, at_s in zip(np.cumsum(sizes), sizes, sent_s, strict=True):
        layer = filled[int(np.searchsorted(ends, reached))][0]
        if at_s < step.start_s[layer]:
            return []
        full_s = min(float(step.end_s[layer]), at_s)
        found.append(Bucket(begin_s=min(begin_s, full_s), full_s=full_s, sent_s=at_s, size_bytes=size))
        begin_s = full_s
    return found


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
