"""``Timeline``: what happened or will happen. Events of one or many steps, the same type on both sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dpsim.codec import Noun
from dpsim.errors import FileFormatError
from dpsim.schedule import COMMUNICATION, COMPUTE

SCHEMA = "dpsim.timeline/1"


class TimelineRecord(Noun, frozen=True):
    """A timeline as it is stored: parallel lists, one entry an event."""

    source: Literal["measured", "predicted"]
    operations: tuple[str, ...]
    step: tuple[int, ...]
    rank: tuple[int, ...]
    lane: tuple[int, ...]
    operation: tuple[int, ...]
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    size_bytes: tuple[int, ...]
    emulated_network: bool = False
    schema: str = SCHEMA


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """Events as arrays of one length.

    ``operation`` indexes ``operations`` (names such as ``backward dense2``, ``allreduce 3``, ``update``,
    ``step overhead``); ``lane`` is ``schedule.COMPUTE`` or ``schedule.COMMUNICATION``; times are seconds
    on one clock for all ranks, the first step starting near 0; ``size_bytes`` is 0 for compute.
    """

    source: Literal["measured", "predicted"]
    operations: tuple[str, ...]
    step: NDArray[np.int64]
    rank: NDArray[np.int64]
    lane: NDArray[np.int64]
    operation: NDArray[np.int64]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    size_bytes: NDArray[np.int64]
    emulated_network: bool = False

    def select(self, *, step: int | None = None, rank: int | None = None) -> Timeline:
        """The events of one step and/or one rank."""
        keep = np.ones(len(self.step), bool)
        if step is not None:
            keep &= self.step == step
        if rank is not None:
            keep &= self.rank == rank
        return Timeline(
            source=self.source,
            operations=self.operations,
            step=self.step[keep],
            rank=self.rank[keep],
            lane=self.lane[keep],
            operation=self.operation[keep],
            start_s=self.start_s[keep],
            end_s=self.end_s[keep],
            size_bytes=self.size_bytes[keep],
            emulated_network=self.emulated_network,
        )

    def exposed_communication_s(self) -> float:
        """Communication time not hidden by computation: the measure of the communication lane outside the compute lane.

        Meant for the events of one step and one rank (see ``select``).
        """
        communication = _union(self.start_s[self.lane == COMMUNICATION], self.end_s[self.lane == COMMUNICATION])
        compute = _union(self.start_s[self.lane == COMPUTE], self.end_s[self.lane == COMPUTE])
        both = _union(np.concatenate([communication[0], compute[0]]), np.concatenate([communication[1], compute[1]]))
        return max(0.0, _length(both) - _length(compute))

    def to_record(self) -> TimelineRecord:
        """The stored form; times rounded to 10 ns."""

        def whole(values: NDArray[np.int64]) -> tuple[int, ...]:
            return tuple(int(v) for v in values)

        return TimelineRecord(
            source=self.source,
            operations=self.operations,
            step=whole(self.step),
            rank=whole(self.rank),
            lane=whole(self.lane),
            operation=whole(self.operation),
            start_s=tuple(round(float(t), 8) for t in self.start_s),
            end_s=tuple(round(float(t), 8) for t in self.end_s),
            size_bytes=whole(self.size_bytes),
            emulated_network=self.emulated_network,
        )

    @staticmethod
    def from_record(record: TimelineRecord) -> Timeline:
        """Back from the stored form. Raises ``FileFormatError`` for numbers out of range or lists that do not fit."""
        numbers = (*record.step, *record.rank, *record.lane, *record.operation, *record.size_bytes)
        if any(abs(n) >= 2**62 for n in numbers):
            raise FileFormatError("a timeline with a number out of range", allowed="64-bit whole numbers")
        if not np.isfinite((*record.start_s, *record.end_s)).all():
            raise FileFormatError("a timeline with a time that is not finite", allowed="finite seconds")
        if not {*record.lane} <= {COMPUTE, COMMUNICATION}:
            raise FileFormatError("a timeline with an unknown lane", allowed=f"{COMPUTE} or {COMMUNICATION}")
        columns: dict[str, Any] = {
            name: np.array(getattr(record, name), np.int64)
            for name in ("step", "rank", "lane", "operation", "size_bytes")
        }
        columns |= {name: np.array(getattr(record, name), np.float64) for name in ("start_s", "end_s")}
        if len({len(c) for c in columns.values()}) != 1:
            raise FileFormatError("a timeline whose lists differ in length", allowed="one entry an event in each list")
        operation = columns["operation"]
        if len(operation) and not 0 <= operation.min() <= operation.max() < len(record.operations):
            raise FileFormatError("a timeline with an operation that has no name", allowed="indices into operations")
        return Timeline(
            source=record.source, operations=record.operations, emulated_network=record.emulated_network, **columns
        )


def _union(start: NDArray[np.float64], end: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Disjoint intervals that cover the same times."""
    if len(start) == 0:
        return start, end
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.ones(len(start), bool)
    first[1:] = start[1:] > reach[:-1]
    last = np.ones(len(start), bool)
    last[:-1] = first[1:]
    return start[first], reach[last]


def _length(intervals: tuple[NDArray[np.float64], NDArray[np.float64]]) -> float:
    return float(np.sum(intervals[1] - intervals[0]))
