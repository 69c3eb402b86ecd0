"""Who records a step: the host reads its own clock; on a device, marks in its streams tell when work was done.

A device's marks are read when somebody wants to know (``StepMarks.settle``), and never within a step, except for the
few around what computation waited for. They are converted to the host's clock by the anchor: a mark that is asked for
and waited for when the device has nothing to do, right after the one fetch of the step, so that the host knows when it
was reached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from dpsim.comm.clock import now
from dpsim.comm.transport import Span
from dpsim.memory import Mark, Memory
from dpsim.runtime.recorder import AskedTimes, StepMarks
from dpsim.schedule import SYNCHRONISE_EVENT


class StepClock(Protocol):
    """Records one step after another into ``marks``. A moment is what ``moment`` returns, on the host its time."""

    marks: StepMarks

    def begin(self, begin_s: float) -> None:
        """A new step, which began at ``begin_s`` on the host."""

    def moment(self) -> Any:
        """A point after all computation so far."""

    def computed(self, operation: int, at: Any = None) -> float:
        """All computation since the one before was this operation, up to ``at``; returns when the host came to it."""

    def ready(self, layer: int) -> None:
        """The gradients of a layer are final."""

    def paused(self, since: Any, size_bytes: int | None = None) -> Any:
        """Computation has waited for communication; with ``size_bytes`` for a sum between layers. The end of it."""

    def reduced(self, collective: tuple[int, int, int], start_s: float, end_s: float, span: Span | None) -> None:
        """(kind, bucket, bytes) was communicated: on the host from ``start_s`` to ``end_s``, on a device in a span."""

    def fetched(self) -> None:
        """The host has waited for all work."""


class HostClock:
    """Everything happens when the host says so."""

    def __init__(self) -> None:
        self.marks = StepMarks(0.0)

    def begin(self, begin_s: float) -> None:
        self.marks = StepMarks(begin_s)

    def moment(self) -> float:
        return now()

    def computed(self, operation: int, at: float | None = None) -> float:
        end_s = now() if at is None else at
        self.marks.compute.append((operation, end_s))
        return end_s

    def ready(self, layer: int) -> None:
        self.marks.ready.append((layer, now()))

    def paused(self, since: float, size_bytes: int | None = None) -> float:
        end_s = now()
        self.marks.pauses.append((since, end_s))
        if size_bytes is not None:
            self.marks.collectives.append((SYNCHRONISE_EVENT, -1, size_bytes, since, end_s))
        return end_s

    def reduced(self, collective: tuple[int, int, int], start_s: float, end_s: float, span: Span | None) -> None:
        self.marks.collectives.append((*collective, start_s, end_s))

    def fetched(self) -> None:
        pass


class _Asked(NamedTuple):
    """When the host came to a point, and where that is in the device's work."""

    at_s: float
    mark: Mark


class DeviceClock:
    """See the top of this file."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.begin(0.0)

    def begin(self, begin_s: float) -> None:
        self.marks = StepMarks(begin_s, asked=AskedTimes())
        self._step = _DeviceStep()
        self.marks.unread = self._step.read

    def moment(self) -> _Asked:
        return _Asked(now(), self._memory.mark())

    def computed(self, operation: int, at: _Asked | None = None) -> float:
        at = self.moment() if at is None else at
        assert self.marks.asked is not None
        self.marks.asked.compute.append((operation, at.at_s))
        self._step.computed.append(at.mark)
        return at.at_s

    def ready(self, layer: int) -> None:
        self._step.ready.append((layer, self._memory.mark()))

    def paused(self, since: _Asked, size_bytes: int | None = None) -> _Asked:
        until = self.moment()
        self._step.pauses.append((since, until))
        if size_bytes is not None:
            span = Span(since.mark, until.mark, since.at_s)
            self._step.collectives.append(((SYNCHRONISE_EVENT, -1, size_bytes), span))
        return until

    def reduced(self, collective: tuple[int, int, int], start_s: float, end_s: float, span: Span | None) -> None:
        if span is not None:
            self._step.collectives.append((collective, span))

    def fetched(self) -> None:
        step, marks = self._step, self.marks
        assert marks.asked is not None
        step.before_anchor = len(step.computed)
        step.anchor = self._memory.mark()
        step.anchor.wait()
        step.anchor_s = now()
        for since, until in step.pauses:
            marks.pauses.append((step.earlier_s(since.mark), step.earlier_s(until.mark)))
            marks.asked.pauses.append(since.at_s)


class _DeviceStep:
    """The marks of one step, and how to read them."""

    def __init__(self) -> None:
        self.computed: list[Mark] = []
        self.ready: list[tuple[int, Mark]] = []
        self.pauses: list[tuple[_Asked, _Asked]] = []
        self.collectives: list[tuple[tuple[int, int, int], Span]] = []
        self.anchor: Mark | None = None
        self.anchor_s = 0.0
        self.before_anchor = 0

    def earlier_s(self, mark: Mark) -> float:
        """When a mark from before the anchor was reached, on the host's clock."""
        assert self.anchor is not None
        return self.anchor_s - self.anchor.seconds_since(mark)

    def later_s(self, mark: Mark) -> float:
        """The same of a mark from after it; waits for that."""
        mark.wait()
        return self.anchor_s + mark.seconds_since(self.anchor)

    def read(self, marks: StepMarks) -> None:
        """Put the times of everything but pauses into the marks of the step."""
        assert marks.asked is not None
        for place, ((operation, _), mark) in enumerate(zip(marks.asked.compute, self.computed, strict=True)):
            when: Callable[[Mark], float] = self.earlier_s if place < self.before_anchor else self.later_s
            marks.compute.append((operation, when(mark)))
        for layer, mark in self.ready:
            marks.ready.append((layer, self.earlier_s(mark)))
        for collective, span in self.collectives:
            marks.collectives.append((*collective, self.earlier_s(span.began), self.earlier_s(span.ended)))
            marks.asked.collectives.append(span.asked_s)


def step_clock(memory: Memory) -> StepClock:
    """Who records the steps of a replica that computes in this memory."""
    return DeviceClock(memory) if memory.deferred else HostClock()
