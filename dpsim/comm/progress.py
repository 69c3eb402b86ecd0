"""Collectives that overlap computation: which thread makes them progress, and when. They run one after another.

One queue takes collectives of any kind, in the same order on all ranks: reduce-scatters and all-gathers may alternate.

Where a device keeps them in a queue of its own (``Enqueued``), the next one is enqueued before the last one is done.

``poll``: the computing thread polls the communication whenever a layer is done or its gradients are ready. ``thread``:
a second thread does, sleeping until the next message is due. In both the computing thread finishes what is left after
backward. ``inline`` runs each allreduce at once on the computing thread.

Where gradients are in the memory of a device, the host waits for no kernel: ``enqueue`` says what the device's own
computation must wait for, and ``finish`` comes after the host has waited for that anyway.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from dpsim.collective import CollectiveKind
from dpsim.comm.allreduce import prepare
from dpsim.comm.clock import SLEEP_LEAD_S, now, sharpen_sleep, sleep_until
from dpsim.comm.compression import Compression
from dpsim.comm.transport import (
    Array,
    CollectiveSteps,
    Enqueued,
    PersistentAllreduce,
    Request,
    Span,
    SteppedAllreduce,
    SummationOrder,
    Transport,
    no_span,
    nothing,
    pause,
)
from dpsim.memory import Mark

LOOK_S = 40e-6
"""How long the communication thread sleeps when nothing is due at a known time."""

Finished = Callable[[int, int, float, float], None]
"""Called with (bucket, size_bytes, start_s, end_s) when a bucket's collective is done, and before it counts as ended.

Under ``thread`` it may be called by the communication thread, during computation: whatever it copies out of the bucket
is complete when ``finish_until`` or ``finish`` returns.
"""


class BucketAllreduce(NamedTuple):
    """A prepared allreduce, the bytes that it adds up, and what to call when the bucket is handed in.

    ``complete`` is called by the computing thread in ``submit``, before the collective can start: it may copy data into
    the bucket, if no earlier collective that is still under way uses the same memory.
    ``span``: see ``SteppedAllreduce``.
    """

    prepared: PersistentAllreduce
    size_bytes: int
    complete: Callable[[], None] = nothing
    span: Callable[[], Span | None] = no_span


class Progress(Protocol):
    """A mechanism that takes buckets during backward and has them reduced. ``bucket`` is the one under way, or -1."""

    @property
    def bucket(self) -> int: ...

    def prepare(
        self,
        data: Array,
        order: SummationOrder | None = None,
        kind: CollectiveKind = "allreduce",
        replicas: int = 1,
    ) -> BucketAllreduce:
        """Prepare the allreduce of some memory, to be submitted again and again. Moves nothing."""

    def submit(self, bucket: int, allreduce: BucketAllreduce) -> None:
        """Hand in a bucket whose gradients are final: its allreduce may start."""

    def poll(self) -> None:
        """Make progress: called by the computing thread after each layer's backward (``StepRunner.backward_done``)."""

    def enqueue(self) -> Mark | None:
        """Return when every submitted allreduce is done, or in a device's queue: then with the mark at its end."""

    def finish_until(self, count: int) -> None:
        """Return when the first ``count`` collectives submitted since the last ``finish`` have ended, or all have."""

    def finish(self) -> None:
        """Return when every submitted allreduce is done. ``finish_until`` counts from here again."""

    def close(self) -> None:
        """End; no allreduce may be under way."""


class Inline:
    """Each allreduce runs at once, on the calling thread."""

    def __init__(
        self, transport: Transport, algorithm: str, finished: Finished, compression: Compression | None = None
    ) -> None:
        self._transport, self._algorithm, self._compression = transport, algorithm, compression
        self._finished = finished
        self.bucket = -1

    def prepare(
        self,
        data: Array,
        order: SummationOrder | None = None,
        kind: CollectiveKind = "allreduce",
        replicas: int = 1,
    ) -> BucketAllreduce:
        allreduce = prepare(self._transport, data, self._algorithm, self._compression, order, kind, replicas)
        if isinstance(allreduce, SteppedAllreduce):
            return BucketAllreduce(allreduce, data.nbytes, allreduce.complete, allreduce.span)
        return BucketAllreduce(allreduce, data.nbytes)

    def submit(self, bucket: int, allreduce: BucketAllreduce) -> None:
        allreduce.complete()
        self.bucket = bucket
        begin_s = now()
        allreduce.prepared.run()
        self._finished(bucket, allreduce.size_bytes, begin_s, now())
        self.bucket = -1

    def poll(self) -> None:
        pass

    def enqueue(self) -> Mark | None:
        return None

    def finish_until(self, count: int) -> None:
        pass

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Started(NamedTuple):
    """An allreduce that was started while an earlier one was under way, and what its first step waits for."""

    bucket: int
    size_bytes: int
    begin_s: float
    steps: CollectiveSteps
    pending: list[Request]
    enqueued: bool


class Polled(Inline):
    """A queue of allreduces that moves on whenever ``poll`` is called.

    One is under way at a time, except where a device has all of its work in a queue of its own (``Enqueued``): then the
    next ones are started behind it.
    """

    def __init__(
        self, transport: Transport, algorithm: str, finished: Finished, compression: Compression | None = None
    ) -> None:
        super().__init__(transport, algorithm, finished, compression)
        self._queue: deque[tuple[int, BucketAllreduce]] = deque()
        self._steps: CollectiveSteps | None = None
        self._pending: list[Request] = []
        self._size_bytes, self._begin_s = 0, 0.0
        self._enqueued = False
        self._behind: deque[_Started] = deque()
        self._last: Mark | None = None
        self._ended = 0

    def submit(self, bucket: int, allreduce: BucketAllreduce) -> None:
        allreduce.complete()
        self._queue.append((bucket, allreduce))
        self._advance()

    def poll(self) -> None:
        if self._steps is not None:
            self._advance()

    def enqueue(self) -> Mark | None:
        while not (self._advance() or self._all_enqueued()):
            pause(self._transport, self._pending)
        return self._last

    def finish_until(self, count: int) -> None:
        while self._ended < count and not self._advance():
            if self._ended < count:
                pause(self._transport, self._pending)

    def finish(self) -> None:
        while not self._advance():
            pause(self._transport, self._pending)
        self._last, self._ended = None, 0

    def _all_enqueued(self) -> bool:
        """Return whether all that is left to do is in a device's queue."""
        return self._enqueued and not self._queue and all(started.enqueued for started in self._behind)

    def _advance(self) -> bool:
        """Take every step that needs no waiting, and return whether no allreduce is left."""
        while True:
            if self._enqueued and self._queue:
                self._start_behind()
            if self._pending:
                self._pending = [message for message in self._pending if not message.done()]
                if self._pending:
                    return False
            if self._steps is None:
                if not self._queue:
                    return True
                self.bucket, allreduce = self._queue.popleft()
                self._size_bytes = allreduce.size_bytes
                self._begin_s = now()
                self._steps = allreduce.prepared.start()
            step = next(self._steps, None)
            if step is None:
                self._end()
            else:
                self._pending = list(step)
                self._enqueued = self._is_enqueued(step)

    def _end(self) -> None:
        """Report the allreduce that is done, and go on with the one behind it, which has not begun before."""
        end_s = now()
        self._finished(self.bucket, self._size_bytes, self._begin_s, end_s)
        self._ended += 1
        if self._behind:
            self.bucket, self._size_bytes, begin_s, self._steps, self._pending, self._enqueued = self._behind.popleft()
            self._begin_s = max(begin_s, end_s)
        else:
            self.bucket, self._steps, self._enqueued = -1, None, False

    def _start_behind(self) -> None:
        """Start what was handed in, until one is not enqueued as a whole."""
        while self._queue and (not self._behind or self._behind[-1].enqueued):
            bucket, allreduce = self._queue.popleft()
            begin_s, steps = now(), allreduce.prepared.start()
            step = next(steps, ())
            enqueued = self._is_enqueued(step) or not step
            self._behind.append(_Started(bucket, allreduce.size_bytes, begin_s, steps, list(step), enqueued))

    def _is_enqueued(self, step: Sequence[Request]) -> bool:
        if not isinstance(step, Enqueued):
            return False
        self._last = step[-1]
        return True

    def _due_s(self) -> float:
        """Return when the messages under way will be done, as far as known; 0 if unknown."""
        known_times = [due_s for message in self._pending if (due_s := message.due_s()) is not None]
        return max(known_times, default=0.0)


class Threaded(Polled):
    """The same queue moved on by a thread of its own while the calling thread computes."""

    def __init__(
        self, transport: Transport, algorithm: str, finished: Finished, compression: Compression | None = None
    ) -> None:
        super().__init__(transport, algorithm, finished, compression)
        self._turn = threading.Lock()
        self._work = threading.Semaphore(0)
        self._computing = True
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="dpsim-communication", daemon=True)
        self._thread.start()

    def submit(self, bucket: int, allreduce: BucketAllreduce) -> None:
        allreduce.complete()
        self._computing = True
        with self._turn:
            idle = self._steps is None or self._waits_for_a_device()
            self._queue.append((bucket, allreduce))
        if idle:
            self._work.release()

    def poll(self) -> None:
        pass

    def enqueue(self) -> Mark | None:
        self._computing = False
        with self._turn:
            self._raise_error()
            return super().enqueue()

    def finish_until(self, count: int) -> None:
        if self._ended >= count:
            return
        self._computing = False
        with self._turn:
            self._raise_error()
            super().finish_until(count)
            self._computing = True
            left = (self._steps is not None or self._queue) and not self._waits_for_a_device()
        if left:
            self._work.release()

    def finish(self) -> None:
        self._computing = False
        with self._turn:
            self._raise_error()
            super().finish()

    def close(self) -> None:
        self._closed = True
        self._computing = False
        self._work.release()
        self._thread.join()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _serve(self) -> None:
        sharpen_sleep()
        while not self._closed:
            self._work.acquire()
            try:
                self._drive()
            except BaseException as error:  # handed to the computing thread, which raises it
                self._error = error
                return

    def _waits_for_a_device(self) -> bool:
        """Return whether only a device is waited for: its computation follows what is in its queue."""
        return self._transport.memory.deferred and self._all_enqueued()

    def _drive(self) -> None:
        """Move on until the queue is empty or the computing thread takes over."""
        while self._computing:
            polled_s = now()
            with self._turn:
                if not self._computing or self._advance() or self._waits_for_a_device():
                    return
                due_s = self._due_s()
            if self._transport.nap_s:
                pause(self._transport, self._pending)
            elif due_s - now() > SLEEP_LEAD_S:
                sleep_until(due_s - SLEEP_LEAD_S)
            elif due_s < polled_s:  # only MPI is still awaited; a message that became due since is done at once
                sleep_until(now() + LOOK_S)


def progress(
    transport: Transport, algorithm: str, overlap: str, finished: Finished, compression: Compression | None = None
) -> Progress:
    """Return the mechanism of an ``overlap`` token (``off`` is ``inline``: the caller hands buckets in after backward).

    Gradients on a device are reduced ``inline`` from a queue too: the caller lets computation wait for its end.
    """
    inline = Polled if transport.memory.deferred else Inline
    kinds: dict[str, type[Inline]] = {"off": inline, "inline": inline, "poll": Polled, "thread": Threaded}
    return kinds[overlap](transport, algorithm, finished, compression)
