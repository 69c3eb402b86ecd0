"""Marks taken while a step runs, and the Timeline made of them afterwards."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

import numpy as np

from dpsim.comm.clock import now
from dpsim.schedule import COMMUNICATION, COMPUTE
from dpsim.timeline import Timeline


@dataclass(slots=True)
class StepMarks:
    """Moments of one step on one rank, in seconds on the machine's clock.

    ``compute`` holds (operation name, end) in the order of the computing thread: each operation starts where
    the one before it ended, the first at ``begin_s``. ``collectives`` holds (bucket, bytes, start, end), with bucket
    -1 for a synchronisation,
    ``pauses`` when the computing thread did nothing but communicate, ``ready`` when a layer's gradients were
    final. Appending one entry is all that
    recording costs.
    """

    begin_s: float
    compute: list[tuple[str, float]] = field(default_factory=list)
    collectives: list[tuple[int, int, float, float]] = field(default_factory=list)
    pauses: list[tuple[float, float]] = field(default_factory=list)
    ready: list[tuple[int, float]] = field(default_factory=list)
    end_s: float = 0.0

    @property
    def events(self) -> int:
        return len(self.compute) + len(self.collectives) + len(self.pauses) + len(self.ready)


def exposed_s(marks: StepMarks) -> float:
    """Seconds in which a step's computing thread did nothing but communicate or wait for communication."""
    return sum(end - start for start, end in marks.pauses)


def seconds_per_event(events: int = 1000, repeats: int = 20) -> float:
    """What recording one event costs: the call, the clock read and the list entry, the median of some measurements."""
    marks, found = StepMarks(0.0), []

    def done() -> None:
        marks.compute.append(("event", now()))

    for _ in range(repeats):
        marks.compute.clear()
        start_s = now()
        for _ in range(events):
            done()
        found.append((now() - start_s) / events)
    return statistics.median(found)


def timeline(steps: list[list[StepMarks]], *, emulated_network: bool) -> Timeline:
    """The events of some steps: ``steps[k][r]`` are the marks of step k on rank r. The first step starts near 0."""
    origin_s = min(marks.begin_s for marks in steps[0])
    names: dict[str, int] = {}
    rows: list[tuple[int, int, int, int, float, float, int]] = []
    for number, ranks in enumerate(steps):
        for rank, marks in enumerate(ranks):
            start_s = marks.begin_s
            pauses = sorted(marks.pauses)
            for name, end_s in marks.compute:
                code = names.setdefault(name, len(names))
                for low_s, high_s in _outside(start_s, end_s, pauses):
                    rows.append((number, rank, COMPUTE, code, low_s - origin_s, high_s - origin_s, 0))
                start_s = end_s
            for bucket, size, low_s, high_s in marks.collectives:
                code = names.setdefault(f"allreduce {bucket}" if bucket >= 0 else "synchronise", len(names))
                rows.append((number, rank, COMMUNICATION, code, low_s - origin_s, high_s - origin_s, size))
    columns = list(zip(*rows, strict=True))
    step, rank_column, lane, operation, start, end, size_bytes = columns
    return Timeline(
        source="measured",
        operations=tuple(names),
        step=np.array(step, np.int64),
        rank=np.array(rank_column, np.int64),
        lane=np.array(lane, np.int64),
        operation=np.array(operation, np.int64),
        start_s=np.array(start),
        end_s=np.array(end),
        size_bytes=np.array(size_bytes, np.int64),
        emulated_network=emulated_network,
    )


def _outside(start_s: float, end_s: float, pauses: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The parts of an interval in which the computing thread was not waiting for communication."""
    parts = []
    for low_s, high_s in pauses:
        if high_s <= start_s or low_s >= end_s:
            continue
        if low_s > start_s:
            parts.append((start_s, low_s))
        start_s = max(start_s, high_s)
    if end_s > start_s:
        parts.append((start_s, end_s))
    return parts
