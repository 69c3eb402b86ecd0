"""A device whose work is done when the host fetches values and not before, as one of two ranks: the host's view."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import numpy as np
from memory_transport import Mailbox, MemoryTransport

from dpsim.comm.clock import now
from dpsim.comm.transport import Array, CollectiveSteps, Enqueued, Span, SteppedAllreduce
from dpsim.memory import HostMemory


class QueuedMark:
    """A point in a queue of the device, reached when the host has waited for it or for values that come later.

    Reading its time is an error before, and so is waiting for it while the device has work: the host would idle.
    """

    def __init__(self, name: str, *, number: int, idle: bool) -> None:
        self.name, self.number, self._idle = name, number, idle
        self.reached = False

    def done(self) -> bool:
        return self.reached

    def due_s(self) -> float | None:
        return None

    def wait(self) -> None:
        assert self.reached or self._idle, f"the host waits for {self.name}"
        self.reached = True

    def seconds_since(self, earlier: Any) -> float:
        assert self.reached and earlier.reached and earlier.number <= self.number
        return 1e-6 * (self.number - earlier.number)


class QueuedMemory(HostMemory):
    """``log`` says what the host asked for, in order: allreduces, fetches, and which marks computation follows."""

    deferred = True
    stream = types.SimpleNamespace(launch=0)

    def __init__(self) -> None:
        self.log: list[str] = []
        self.marks: list[QueuedMark] = []
        self._idle = False

    def mark(self, name: str = "mark") -> Any:
        self.log.append(name)
        self.marks.append(QueuedMark(name, number=len(self.marks), idle=self._idle))
        self._idle = False  # it has something to do again
        return self.marks[-1]

    def follow(self, mark: Any) -> None:
        self.log.append(f"follow {mark.name}")

    def fetch(self, arrays: Sequence[Array]) -> list[Array]:
        self.log.append("fetch")
        for mark in self.marks:
            mark.reached = True
        self._idle = True
        return [np.array(array) for array in arrays]


class QueuedTransport(MemoryTransport):
    """Rank 0 of two, which puts allreduces into a queue of the device and reduces nothing."""

    def __init__(self, memory: QueuedMemory) -> None:
        super().__init__(Mailbox(2, eager=True), 0, 2)
        self.memory = memory
        self._queued = memory

    def prepare(self, data: Array, *others: Any, **options: Any) -> Any:
        spans: list[Span] = []

        def begin() -> CollectiveSteps:
            spans.append(Span(self._queued.mark(), self._queued.mark("allreduce"), now()))
            yield Enqueued([spans[-1].ended])

        return SteppedAllreduce(self, begin, span=lambda: spans[-1])
