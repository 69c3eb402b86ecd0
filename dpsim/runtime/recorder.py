"""Marks taken while a step runs, and the Timeline made of them afterwards."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dpsim.comm.clock import now
from dpsim.schedule import COMMUNICATION_LANE, COMPUTE_LANE, KINDS, WAIT_EVENT
from dpsim.timeline import Timeline


@dataclass(slots=True)
class StepMarks:
    """Moments of one step on one rank, in seconds on the machine's clock. Recording costs one list entry each.

    ``compute`` holds (operation of the schedule, end) in the order of the computing thread: each operation starts where
    the one before it ended, the first at ``begin_s``. ``collectives`` holds (kind of ``KINDS``, bucket, bytes, start,
    end), with bucket -1 for a sum that computation waits for. ``pauses`` are the times in which the computing thread
    did nothing but communicate or wait for communication, and ``ready`` when a layer's gradients were final.
    """

    begin_s: float
    compute: list[tuple[int, float]] = field(default_factory=list)
    collectives: list[tuple[int, int, int, float, float]] = field(default_factory=list)
    pauses: list[tuple[float, float]] = field(default_factory=list)
    ready: list[tuple[int, float]] = field(default_factory=list)
    end_s: float = 0.0

    @property
    def events(self) -> int:
        return len(self.compute) + len(self.collectives) + len(self.pauses) + len(self.ready)


def exposed_s(marks: StepMarks) -> float:
    """``Timeline.exposed_communication_s`` of a step that has not become a Timeline: the sum of its pauses."""
    return sum(end - start for start, end in marks.pauses)


def seconds_per_event(events: int = 1000, repeats: int = 20) -> float:
    """What recording one event costs: the call, the clock read and the list entry, the median of some measurements."""
    marks, samples = StepMarks(0.0), []

    def done() -> None:
        marks.compute.append((0, now()))

    for _ in range(repeats):
        marks.compute.clear()
        start_s = now()
        for _ in range(events):
            done()
        samples.append((now() - start_s) / events)
    return statistics.median(samples)


def timeline(
    steps: Sequence[Sequence[StepMarks]],
    names: Sequence[str],
    *,
    emulated_network: bool,
    emulated_compute: bool = False,
) -> Timeline:
    """The events of some steps: ``steps[k][r]`` are the marks of step k on rank r. The first step starts near 0.

    ``names`` are the names of the schedule's operations. What a pause holds beside collectives is an event ``wait``.
    """
    origin_s = min(marks.begin_s for marks in steps[0])
    codes: dict[str, int] = {}
    rows: list[tuple[int, int, int, int, float, float, int]] = []
    for number, ranks in enumerate(steps):
        for rank, marks in enumerate(ranks):
            events: list[tuple[float, float, int, str, int]] = []
            start_s = marks.begin_s
            pauses = sorted(marks.pauses)
            for operation, end_s in marks.compute:
                for low_s, high_s in _outside(start_s, end_s, pauses):
                    events.append((low_s, high_s, COMPUTE_LANE, names[operation], 0))
                start_s = end_s
            for kind, bucket, size, low_s, high_s in marks.collectives:
                name = f"{KINDS[kind]} {bucket}" if bucket >= 0 else KINDS[kind]
                events.append((low_s, high_s, COMMUNICATION_LANE, name, size))
            sent = sorted((low_s, high_s) for *_, low_s, high_s in marks.collectives)
            for pause in pauses:
                for low_s, high_s in _outside(*pause, sent):
                    events.append((low_s, high_s, COMMUNICATION_LANE, KINDS[WAIT_EVENT], 0))
            for low_s, high_s, lane, name, size in sorted(events, key=lambda event: event[:2]):
                code = codes.setdefault(name, len(codes))
                rows.append((number, rank, lane, code, low_s - origin_s, high_s - origin_s, size))
    step, rank_column, lane_column, operation_column, start, end, size_bytes = zip(*rows, strict=True)
    return Timeline(
        source="measured",
        operations=tuple(codes),
        step=np.array(step, np.int64),
        rank=np.array(rank_column, np.int64),
        lane=np.array(lane_column, np.int64),
        operation=np.array(operation_column, np.int64),
        start_s=np.array(start),
        end_s=np.array(end),
        size_bytes=np.array(size_bytes, np.int64),
        emulated_network=emulated_network,
        emulated_compute=emulated_compute,
    )


def _outside(start_s: float, end_s: float, intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The parts of the time from ``start_s`` to ``end_s`` outside the intervals, which stand in order of time."""
    parts = []
    for low_s, high_s in intervals:
        if high_s <= start_s or low_s >= end_s:
            continue
        if low_s > start_s:
            parts.append((start_s, low_s))
        start_s = max(start_s, high_s)
    if end_s > start_s:
        parts.append((start_s, end_s))
    return parts
