"""Records when the parts of a step happen: by the host's clock, or on a device by marks (``device_step``)."""

from __future__ import annotations

from typing import Any, Protocol

from dpsim.comm.clock import now
from dpsim.comm.transport import Span
from dpsim.memory import Memory
from dpsim.runtime.device_step import DeviceClock
from dpsim.runtime.recorder import StepMarks
from dpsim.schedule import SYNCHRONISE_EVENT


class StepClock(Protocol):
    """A clock that records one step after another into ``marks``. A timestamp is on the host its time."""

    marks: StepMarks

    def begin(self, begin_s: float) -> None:
        """Begin a new step, which began at ``begin_s`` on the host."""

    def timestamp(self) -> Any:
        """Mark the current end of the compute queue."""

    def computed(self, operation: int, at: Any = None) -> float:
        """Record what was computed since the last operation as this one, up to ``at``; return the host's time."""

    def ready(self, layer: int) -> None:
        """Record that the gradients of a layer are final."""

    def paused(self, since: Any, size_bytes: int | None = None, kind: int = SYNCHRONISE_EVENT) -> Any:
        """Record a wait for communication, with ``size_bytes`` for a sum between layers or a message; its end."""

    def reduced(self, collective: tuple[int, int, int], start_s: float, end_s: float, span: Span | None) -> None:
        """Record a communication (kind, bucket, bytes): on the host ``start_s`` to ``end_s``, on a device a span."""

    def fetched(self) -> None:
        """Record that the host has waited for all work."""


class HostClock:
    """A clock that records everything when the host says so."""

    def __init__(self) -> None:
        self.marks = StepMarks(0.0)

    def begin(self, begin_s: float) -> None:
        self.marks = StepMarks(begin_s)

    def timestamp(self) -> float:
        return now()

    def computed(self, operation: int, at: float | None = None) -> float:
        end_s = now() if at is None else at
        self.marks.compute.append((operation, end_s))
        return end_s

    def ready(self, layer: int) -> None:
        self.marks.ready.append((layer, now()))

    def paused(self, since: float, size_bytes: int | None = None, kind: int = SYNCHRONISE_EVENT) -> float:
        end_s = now()
        self.marks.pauses.append((since, end_s))
        if size_bytes is not None:
            self.marks.collectives.append((kind, -1, size_bytes, since, end_s))
        return end_s

    def reduced(self, collective: tuple[int, int, int], start_s: float, end_s: float, span: Span | None) -> None:
        self.marks.collectives.append((*collective, start_s, end_s))

    def fetched(self) -> None:
        pass


def step_clock(memory: Memory) -> StepClock:
    """Return what records the steps of a replica that computes in this memory."""
    return DeviceClock(memory) if memory.deferred else HostClock()
