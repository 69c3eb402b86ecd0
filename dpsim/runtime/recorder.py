"""Marks taken while a step runs, and the Timeline made of them afterwards."""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from dpsim.comm.clock import now
from dpsim.schedule import COMMUNICATION_LANE, COMPUTE_LANE, KINDS, WAIT_EVENT
from dpsim.timeline import Clock, Timeline


@dataclass(slots=True)
class AskedTimes:
    """The times when the host asked a device for what ``StepMarks`` lists, in its order; operations by number."""

    compute: list[tuple[int, float]] = field(default_factory=list)
    collectives: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)


@dataclass(slots=True)
class StepMarks:
    """Moments of one step on one rank, in seconds on the machine's clock. Recording costs one list entry each.

    ``compute`` holds (operation of the schedule, end) in the order of the computing thread: each operation starts where
    the one before it ended, the first at ``begin_s``. ``collectives`` holds (kind of ``KINDS``, bucket, bytes, start,
    end), with bucket -1 for a sum that computation waits for. ``pauses`` are the times in which the computing thread
    did nothing but communicate or wait for communication, and ``ready`` when a layer's gradients were final.

    Of a step on a device these are the device's times on the machine's clock, and ``asked_times`` has the host's.
    Before ``settle`` it has ``begin_s``, ``pauses`` and ``end_s`` alone, the latter when the host had asked for all.
    """

    begin_s: float
    compute: list[tuple[int, float]] = field(default_factory=list)
    collectives: list[tuple[int, int, int, float, float]] = field(default_factory=list)
    pauses: list[tuple[float, float]] = field(default_factory=list)
    ready: list[tuple[int, float]] = field(default_factory=list)
    end_s: float = 0.0
    asked_times: AskedTimes | None = None
    unread: Callable[[StepMarks], None] | None = None

    @property
    def clock(self) -> Clock:
        """What read the times."""
        return "host" if self.asked_times is None else "device"

    def settle(self) -> StepMarks:
        """Wait until a device has done all work of the step, and read when it did; the same marks. Once is enough."""
        unread, self.unread = self.unread, None
        if unread is not None:
            unread(self)
        return self

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """Return what is sent to another process: times, and no device's events."""
        self.settle()
        return None, {each.name: getattr(self, each.name) for each in fields(self)}

    @property
    def last_operation(self) -> int | None:
        """The last operation that the computing thread has finished, or asked a device for; None before the first."""
        done = self.compute if self.asked_times is None else self.asked_times.compute
        return done[-1][0] if done else None

    @property
    def events(self) -> int:
        return len(self.compute) + len(self.collectives) + len(self.pauses) + len(self.ready)


def exposed_s(marks: StepMarks) -> float:
    """Return ``Timeline.exposed_communication_s`` of a step that has no Timeline: the sum of its pauses."""
    return sum(end - start for start, end in marks.pauses)


def seconds_per_event(events: int = 1000, repeats: int = 20) -> float:
    """Measure the median time of recording one event: the call, the clock read and the list entry."""
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
    """Return the events of some steps: ``steps[k][r]`` are step k's marks on rank r. The first starts near 0.

    ``names`` are the names of the schedule's operations. What a pause holds besides collectives is an event ``wait``.
    """
    origin_s = min(marks.begin_s for marks in steps[0])
    codes: dict[str, int] = {}
    rows: list[tuple[int, int, int, int, float, float, int, float]] = []
    reached_s = [-math.inf] * len(steps[0])
    for number, ranks in enumerate(steps):
        for rank, marks in enumerate(ranks):
            events = sorted(_events(marks.settle(), names, reached_s[rank]), key=operator.itemgetter(0, 1))
            for start_s, end_s, lane, operation, size, asked_s in events:
                code = codes.setdefault(operation, len(codes))
                times_s = (start_s - origin_s, end_s - origin_s)
                rows.append((number, rank, lane, code, *times_s, size, asked_s - origin_s))
            reached_s[rank] = marks.compute[-1][1]
    step, rank_column, lane_column, operation_column, start, end, size_bytes, asked_times = zip(*rows, strict=True)
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
        asked_s=np.array(asked_times) if steps[0][0].clock == "device" else None,
        emulated_network=emulated_network,
        emulated_compute=emulated_compute,
    )


_Event = tuple[float, float, int, str, int, float]
"""Start and end in seconds, lane, operation, bytes, and when the host asked for it."""


def _events(marks: StepMarks, names: Sequence[str], earliest_s: float) -> Iterator[_Event]:
    """Yield the events of a rank's step. A device may still be in the last step's update, until ``earliest_s``."""
    start_s = marks.begin_s if marks.asked_times is None else max(marks.begin_s, earliest_s)
    of_compute: Sequence[float] = [0.0] * len(marks.compute)
    of_collectives: Sequence[float] = [0.0] * len(marks.collectives)
    of_pauses: Sequence[float] = [0.0] * len(marks.pauses)
    if marks.asked_times is not None:
        of_compute = [asked_s for _, asked_s in marks.asked_times.compute]
        of_collectives, of_pauses = marks.asked_times.collectives, marks.asked_times.pauses
    waits = sorted(zip(marks.pauses, of_pauses, strict=True))
    pauses = [pause for pause, _ in waits]
    for (operation, end_s), asked_s in zip(marks.compute, of_compute, strict=True):
        for low_s, high_s in _outside(start_s, end_s, pauses):
            yield low_s, high_s, COMPUTE_LANE, names[operation], 0, asked_s
        start_s = end_s
    for (kind, bucket, size, low_s, high_s), asked_s in zip(marks.collectives, of_collectives, strict=True):
        name = f"{KINDS[kind]} {bucket}" if bucket >= 0 else KINDS[kind]
        yield low_s, high_s, COMMUNICATION_LANE, name, size, asked_s
    sent = sorted((low_s, high_s) for *_, low_s, high_s in marks.collectives)
    for pause, asked_s in waits:
        for low_s, high_s in _outside(*pause, sent):
            yield low_s, high_s, COMMUNICATION_LANE, KINDS[WAIT_EVENT], 0, asked_s


def _outside(start_s: float, end_s: float, intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the parts of ``start_s`` to ``end_s`` outside the intervals, which are in order of time."""
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
