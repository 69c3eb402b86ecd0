"""A device whose work is done when the host fetches values and not before, as one of two ranks: the host's view."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from memory_transport import Mailbox, MemoryTransport

from dpsim.comm.transport import Array, CollectiveSteps, Enqueued, SteppedAllreduce
from dpsim.memory import HostMemory


class QueuedMark:
    """A point in a queue of the device; waiting for it is an error."""

    def __init__(self, log: list[str], name: str = "mark") -> None:
        self.reached, self.name = False, name
        log.append(name)

    def done(self) -> bool:
        return self.reached

    def due_s(self) -> float | None:
        return None

    def wait(self) -> NoReturn:
        raise AssertionError(f"the host waits for {self.name}")

    def seconds_since(self, earlier: Any) -> float:
        raise NotImplementedError


class QueuedMemory(HostMemory):
    """``log`` says what the host asked for, in order: allreduces, fetches, and which marks computation follows."""

    deferred = True
    stream = types.SimpleNamespace(launch=0)

    def __init__(self) -> None:
        self.log: list[str] = []
        self.marks: list[QueuedMark] = []

    def mark(self, name: str = "mark") -> Any:
        self.marks.append(QueuedMark(self.log, name))
        return self.marks[-1]

    def follow(self, mark: Any) -> None:
        self.log.append(f"follow {mark.name}")

    def fetch(self, arrays: Sequence[Array]) -> list[Array]:
        self.log.append("fetch")
        for mark in self.marks:
            mark.reached = True
        return [np.array(array) for array in arrays]


class QueuedTransport(MemoryTransport):
    """Rank 0 of two, which puts allreduces into a queue of the device and reduces nothing."""

    def __init__(self, memory: QueuedMemory) -> None:
        super().__init__(Mailbox(2, eager=True), 0, 2)
        self.memory = memory
        self._queued = memory

    def prepare(self, data: Array, *others: Any, **options: Any) -> Any:
        def begin() -> CollectiveSteps:
            yield Enqueued([self._queued.mark("allreduce")])

        return SteppedAllreduce(self, begin)
