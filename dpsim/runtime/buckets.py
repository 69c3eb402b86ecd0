"""Which buckets are complete, and when: decided before the run (static rules) or while it runs (Horovod's cycle)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dpsim.comm.clock import now
from dpsim.comm.transport import Request, Transport, all_done
from dpsim.lowering.horovod import HorovodCycle
from dpsim.runtime.program import QueuedCollective, StepProgram
from dpsim.schedule import ALLREDUCE_EVENT, Schedule


class Message(NamedTuple):
    """A collective, of a kind of ``KINDS``, of neighbouring buckets of the arena: ``first`` to ``stop - 1``.

    A broadcast is of one ``tensor`` alone, by forward index.
    """

    kind: int
    first: int
    stop: int
    tensor: int = -1

    @classmethod
    def of(cls, queued: QueuedCollective) -> Message:
        """Return the message of a collective of the program."""
        return cls(queued.kind, queued.bucket, queued.bucket + 1, queued.tensor)


class BucketPolicy(Protocol):
    """A rule that takes what has been computed and says which messages may start. All ranks get the same order."""

    def begin(self) -> None:
        """Begin a new step."""

    def ready(self, released: Sequence[int], operation: int) -> Sequence[Message]:
        """Return the messages that may start now, in order: an operation is done, or gradients are final.

        ``released`` are the positions in the program's queue that wait for it.
        """

    def rest(self) -> Iterable[Message]:
        """Backward is over: all messages before the update that are not handed out yet, each as soon as it may start.

        Start one before asking for the next: another rank may wait for it before it says what comes next.
        """


class ScheduledBuckets:
    """The collectives of the Schedule, in its order, each as soon as all that it waits for is done."""

    def __init__(self, program: StepProgram) -> None:
        self._waits, self._before_update = [each.waits for each in program.queue], program.before_update
        self._queue = tuple(map(Message.of, program.queue))
        self.begin()

    def begin(self) -> None:
        self._left = list(self._waits)
        self._head = 0

    def ready(self, released: Sequence[int], operation: int) -> Sequence[Message]:
        for position in released:
            self._left[position] -= 1
        first = head = self._head
        while head < len(self._queue) and not self._left[head]:
            head += 1
        self._head = head
        return self._queue[first:head]

    def rest(self) -> Iterable[Message]:
        first, self._head = self._head, max(self._head, self._before_update)
        return self._queue[first : self._before_update]


class CycleBuckets:
    """Horovod's cycle: rank 0 packs what is ready at each tick and tells the others, who follow in the same order.

    Decisions travel as messages of the same network. Tensors of one bucket that are not neighbours in memory
    travel as several messages, since gradients are never copied.
    """

    def __init__(self, schedule: Schedule, program: StepProgram, control: Transport) -> None:
        order = schedule.workload.ready_order
        self._sizes = [int(size) for size in order.size_bytes]
        self._dtype_codes = [int(code) for code in order.dtype_code]
        self._of_operation: dict[int, list[int]] = {}
        for position, layer in enumerate(order.layer.tolist()):
            self._of_operation.setdefault(program.backward[-1][layer], []).append(position)
        self._cycle = HorovodCycle(threshold_bytes=schedule.plan.threshold_bytes, cycle_s=schedule.plan.cycle_s)
        self._control = control
        self._ready: set[int] = set()
        self._waiting: list[int] = []
        self._decided: list[tuple[int, ...]] = []
        self._given = 0
        self._tick_s = 0.0
        self._sending: list[tuple[list[Request], NDArray[np.int64]]] = []
        self._receiving: tuple[Request, NDArray[np.int64]] | None = None

    def begin(self) -> None:
        self._ready, self._waiting, self._decided, self._given = set(), [], [], 0
        self._tick_s = now() + self._cycle.cycle_s

    def ready(self, released: Sequence[int], operation: int) -> Sequence[Message]:
        final = self._of_operation.get(operation)
        if final is None:  # of an earlier micro-batch: no gradient is final, and no cycle has begun
            return []
        self._ready.update(final)
        self._waiting += final
        if self._control.rank == 0:
            if now() >= self._tick_s:
                self._decide()
        else:
            self._listen()
        return self._startable()

    def rest(self) -> Iterator[Message]:
        if self._control.rank == 0:
            if self._waiting:
                self._decide()
            yield from self._startable()
            while self._sending and not self._sent():
                pass
        else:
            yield from self._startable()
            while self._given < len(self._sizes):
                self._listen()
                yield from self._startable()

    def _decide(self) -> None:
        packed = self._cycle.pack(
            [self._sizes[i] for i in self._waiting], [self._dtype_codes[i] for i in self._waiting]
        )
        buckets = [tuple(self._waiting[i] for i in bucket) for bucket in packed]
        message = np.full(len(self._sizes), -1, np.int64)
        flat = [(number, position) for number, bucket in enumerate(buckets) for position in bucket]
        for number, position in flat:
            message[position] = number
        pending = [self._control.send(message, rank) for rank in range(1, self._control.size)]
        self._sending.append((pending, message))
        self._sent()
        self._decided += buckets
        self._waiting = []
        self._tick_s = self._cycle.next_tick_s(self._tick_s, now())

    def _sent(self) -> bool:
        self._sending = [(pending, message) for pending, message in self._sending if not all_done(pending)]
        return not self._sending

    def _listen(self) -> None:
        """Take decisions that have arrived, without waiting."""
        while self._told() < len(self._sizes):
            if self._receiving is None:
                message = np.empty(len(self._sizes), np.int64)
                self._receiving = (self._control.receive(message, 0), message)
            pending, message = self._receiving
            if not pending.done():
                return
            self._receiving = None
            numbers = message
            for number in range(int(numbers.max()) + 1):
                self._decided.append(tuple(int(p) for p in np.flatnonzero(numbers == number)))

    def _told(self) -> int:
        return self._given + sum(len(bucket) for bucket in self._decided)

    def _startable(self) -> list[Message]:
        runs: list[Message] = []
        while self._decided and self._ready.issuperset(self._decided[0]):
            bucket = self._decided.pop(0)
            self._given += len(bucket)
            runs += [Message(ALLREDUCE_EVENT, *run) for run in _neighbours(bucket)]
        return runs


def _neighbours(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Return ascending runs of consecutive positions: (1, 2, 3, 7) -> (1, 4), (7, 8)."""
    runs: list[tuple[int, int]] = []
    for position in sorted(positions):
        if runs and runs[-1][1] == position:
            runs[-1] = (runs[-1][0], position + 1)
        else:
            runs.append((position, position + 1))
    return runs


def bucket_policy(schedule: Schedule, program: StepProgram, control: Transport) -> BucketPolicy:
    """Return the policy that a schedule names; ``control`` is a separate transport for decisions while running."""
    return CycleBuckets(schedule, program, control) if schedule.dynamic else ScheduledBuckets(program)
