"""``Timeline``: what happened or will happen. Events of one or many steps, the same type on both sides."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dpsim.codec import Noun
from dpsim.errors import FileFormatError
from dpsim.jit import jit, quickest
from dpsim.schedule import COMMUNICATION_LANE, COMPUTE_LANE, KINDS, OTHER_EVENT

SCHEMA = "dpsim.timeline/1"
EXPOSED_S = len(KINDS)
_FEW_EVENTS = 5000
_WHOLE = ("step", "rank", "lane", "operation", "size_bytes")
_SECONDS = ("start_s", "end_s", "asked_s")

Clock = Literal["host", "device"]
"""What read the times of events: the host's clock, or a device that reached marks in its streams."""


@jit
def step_sums(kind, lane, start_s, end_s, blocking):  # type: ignore[no-untyped-def]
    """Seconds of one step on one rank: of each of ``KINDS``, and then (``EXPOSED_S``) of exposed communication.

    Exposed communication is the time of the communication lane outside the compute lane. ``blocking`` says that events
    of the communication lane interrupt those of the compute lane that they lie in: they are then exposed, and their
    time is not the computation's. The events of the compute lane stand in order of time and do not overlap.
    """
    sums = np.zeros(EXPOSED_S + 1)
    sent = np.nonzero(lane == COMMUNICATION_LANE)[0]
    if (np.diff(start_s[sent]) < 0).any():
        sent = sent[np.argsort(start_s[sent], kind="mergesort")]
    low, high = np.empty(len(sent)), np.empty(len(sent))  # the lane as disjoint intervals
    total, reach = 0.0, -np.inf
    for place in range(len(sent)):
        i = sent[place]
        sums[kind[i]] += end_s[i] - start_s[i]
        low[place] = max(start_s[i], reach)
        high[place] = reach = max(end_s[i], low[place])
        total += high[place] - low[place]
    hidden = 0.0
    first = 0
    for i in range(len(kind)):
        if lane[i] != COMPUTE_LANE:
            continue
        sums[kind[i]] += end_s[i] - start_s[i]
        while first < len(sent) and high[first] <= start_s[i]:
            first += 1
        place = first
        while place < len(sent) and low[place] < end_s[i]:
            both = max(0.0, min(end_s[i], high[place]) - max(start_s[i], low[place]))
            if blocking:
                sums[kind[i]] -= both
            else:
                hidden += both
            place += 1
    sums[EXPOSED_S] = max(0.0, total - hidden)
    return sums


def kind_of(operation: str) -> int:
    """The kind of an operation by its name, as an index into ``KINDS``: ``backward`` for ``backward dense2``."""
    return next((code for code, kind in enumerate(KINDS) if f"{operation} ".startswith(f"{kind} ")), OTHER_EVENT)


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
    emulated_compute: bool = False
    asked_s: tuple[float, ...] = ()
    schema: str = SCHEMA


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """Events as arrays of one length.

    ``operation`` indexes ``operations`` (names such as ``backward dense2``, ``allreduce 3``, ``update``,
    ``step overhead``), and ``kind`` (of each event) indexes ``KINDS``; ``lane`` is ``schedule.COMPUTE_LANE`` or
    ``schedule.COMMUNICATION_LANE``; times are seconds on one clock for all ranks, the first step starting near 0;
    ``size_bytes`` is 0 for computations. The events of a rank stand in the order of their starts.

    ``asked_s``, where a device read the times: when the host had asked the device for all of an operation, which may
    have several events, or for the first part of what is communicated; on the same clock.
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
    emulated_compute: bool = False
    asked_s: NDArray[np.float64] | None = None

    @property
    def clock(self) -> Clock:
        """What read the times of the events, of a timeline that was measured."""
        return "host" if self.asked_s is None else "device"

    def select(self, *, step: int | None = None, rank: int | None = None) -> Timeline:
        """The events of one step and/or one rank."""
        keep = np.ones(len(self.step), bool)
        if step is not None:
            keep &= self.step == step
        if rank is not None:
            keep &= self.rank == rank
        columns: dict[str, Any] = {name: column[keep] for name, column in self._columns().items()}
        return dataclasses.replace(self, **columns)

    def _columns(self) -> dict[str, NDArray[Any]]:
        values = {name: getattr(self, name) for name in (*_WHOLE, *_SECONDS)}
        return {name: column for name, column in values.items() if column is not None}

    @functools.cached_property
    def kind(self) -> NDArray[np.int64]:
        """The kind of each event."""
        return np.array([kind_of(name) for name in self.operations], np.int64)[self.operation]

    def sums_s(self) -> NDArray[np.float64]:
        """``step_sums`` of the events of one step and one rank (see ``select``)."""
        sums = quickest(step_sums, few=len(self.operation) <= _FEW_EVENTS)
        result: NDArray[np.float64] = sums(self.kind, self.lane, self.start_s, self.end_s, False)
        return result

    def exposed_communication_s(self) -> float:
        """Communication time not hidden by computation, of the events of one step and one rank (see ``select``)."""
        return float(self.sums_s()[EXPOSED_S])

    def to_record(self) -> TimelineRecord:
        """The stored form; times rounded to 10 ns."""

        columns: dict[str, Any] = {
            name: tuple(np.round(column, 8).tolist() if name in _SECONDS else column.tolist())
            for name, column in self._columns().items()
        }
        return TimelineRecord(
            source=self.source,
            operations=self.operations,
            emulated_network=self.emulated_network,
            emulated_compute=self.emulated_compute,
            **columns,
        )

    @staticmethod
    def from_record(record: TimelineRecord) -> Timeline:
        """Back from the stored form. Raises ``FileFormatError`` for numbers out of range or lists that do not fit."""
        if any(abs(n) >= 2**62 for name in _WHOLE for n in getattr(record, name)):
            raise FileFormatError("a timeline with a number out of range", allowed="64-bit whole numbers")
        if not all(np.isfinite(getattr(record, name)).all() for name in _SECONDS):
            raise FileFormatError("a timeline with a time that is not finite", allowed="finite seconds")
        if not {*record.lane} <= {COMPUTE_LANE, COMMUNICATION_LANE}:
            raise FileFormatError("a timeline with an unknown lane", allowed=f"{COMPUTE_LANE} or {COMMUNICATION_LANE}")
        columns: dict[str, Any] = {
            name: np.array(getattr(record, name), np.float64 if name in _SECONDS else np.int64)
            for name in (*_WHOLE, *_SECONDS)
            if name != "asked_s" or record.asked_s
        }
        if len({len(c) for c in columns.values()}) != 1:
            raise FileFormatError("a timeline whose lists differ in length", allowed="one entry an event in each list")
        operation = columns["operation"]
        if len(operation) and not 0 <= operation.min() <= operation.max() < len(record.operations):
            raise FileFormatError("a timeline with an operation that has no name", allowed="indices into operations")
        return Timeline(
            source=record.source,
            operations=record.operations,
            emulated_network=record.emulated_network,
            emulated_compute=record.emulated_compute,
            **columns,
        )
