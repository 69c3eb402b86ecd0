"""What a step is on a device: marks in its streams tell when work was done, and one fetch brings all results.

Marks are read when somebody wants to know (``StepMarks.settle``), and never within a step, except for the few around
what computation waited for. They are converted to the host's clock by the anchor: a mark that is asked for and waited
for when the device has nothing to do, right after the one fetch of the step, so that the host knows when it was
reached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpsim.comm.clock import now
from dpsim.comm.transport import Span
from dpsim.memory import Mark, Memory
from dpsim.replica import Array, BatchSums, DeferredSums
from dpsim.runtime.recorder import AskedTimes, StepMarks
from dpsim.schedule import SYNCHRONISE_EVENT


class FetchedGradients:
    """The finite check of gradients in a device's memory: what ``probe`` says comes with the one fetch of the step."""

    agrees = False

    def __init__(self, probe: Array) -> None:
        self._probe, self._finite = probe, True

    def ask(self) -> Any:
        """Return whether all are finite: an array without axes in the device's memory (for NumPy a scalar)."""
        return np.isfinite(self._probe).all()

    def fetch(
        self, memory: Memory, parts: Sequence[BatchSums | DeferredSums], measured: Array
    ) -> tuple[list[BatchSums], Array]:
        """Return the sums of each pass and what was ``measured``, in one fetch, with the answer of the probe."""
        deferred = [sums for sums in parts if isinstance(sums, DeferredSums)]
        finite, on_host, *fetched = memory.fetch([self.ask(), measured, *(sums.values for sums in deferred)])
        self._finite = bool(finite)
        values = iter(fetched)
        return [each.of(next(values)) if isinstance(each, DeferredSums) else each for each in parts], on_host

    def __call__(self, loss: float, sums: NDArray[np.float64]) -> bool:
        return self._finite


class _Asked(NamedTuple):
    """The time when the host came to a point, and where that is in the device's work."""

    at_s: float
    mark: Mark


class DeviceClock:
    """A clock that records a step in marks; see the top of this file."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.begin(0.0)

    def begin(self, begin_s: float) -> None:
        self.marks = StepMarks(begin_s, asked_times=AskedTimes())
        self._step = _DeviceStep()
        self.marks.unread = self._step.read

    def timestamp(self) -> _Asked:
        return _Asked(now(), self._memory.mark())

    def computed(self, operation: int, at: _Asked | None = None) -> float:
        at = self.timestamp() if at is None else at
        assert self.marks.asked_times is not None
        self.marks.asked_times.compute.append((operation, at.at_s))
        self._step.computed.append(at.mark)
        return at.at_s

    def ready(self, layer: int) -> None:
        self._step.ready.append((layer, self._memory.mark()))

    def paused(self, since: _Asked, size_bytes: int | None = None, kind: int = SYNCHRONISE_EVENT) -> _Asked:
        until = self.timestamp()
        self._step.pauses.append((since, until))
        if size_bytes is not None:
            span = Span(since.mark, until.mark, since.at_s)
            self._step.collectives.append(((kind, -1, size_bytes), span))
        return until

    def reduced(self, collective: tuple[int, int, int], start_s: float, end_s: float, span: Span | None) -> None:
        if span is not None:
            self._step.collectives.append((collective, span))

    def fetched(self) -> None:
        step, marks = self._step, self.marks
        assert marks.asked_times is not None
        step.before_anchor = len(step.computed)
        step.anchor = self._memory.mark()
        step.anchor.wait()
        step.anchor_s = now()
        for since, until in step.pauses:
            marks.pauses.append((step.earlier_s(since.mark), step.earlier_s(until.mark)))
            marks.asked_times.pauses.append(since.at_s)


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
        """Return when a mark from before the anchor was reached, on the host's clock."""
        assert self.anchor is not None
        return self.anchor_s - self.anchor.seconds_since(mark)

    def later_s(self, mark: Mark) -> float:
        """Return the same of a mark from after it; waits for that."""
        mark.wait()
        return self.anchor_s + mark.seconds_since(self.anchor)

    def read(self, marks: StepMarks) -> None:
        """Put the times of everything but pauses into the marks of the step."""
        assert marks.asked_times is not None
        for number, ((operation, _), mark) in enumerate(zip(marks.asked_times.compute, self.computed, strict=True)):
            when: Callable[[Mark], float] = self.earlier_s if number < self.before_anchor else self.later_s
            marks.compute.append((operation, when(mark)))
        for layer, mark in self.ready:
            marks.ready.append((layer, self.earlier_s(mark)))
        for collective, span in self.collectives:
            marks.collectives.append((*collective, self.earlier_s(span.began), self.earlier_s(span.ended)))
            marks.asked_times.collectives.append(span.asked_s)
