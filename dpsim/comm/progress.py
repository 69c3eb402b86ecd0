"""Allreduces that overlap computation: which thread makes them progress, and when. They run one after another.

Where a device keeps them in a queue of its own (``Enqueued``), the next one is enqueued before the last one is done.

``poll``: the computing thread polls the communication whenever a layer is done. ``thread``: a second thread does,
sleeping until the next message is due. In both the computing thread finishes what is left after backward.
``inline`` runs each allreduce at once on the computing thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from dpsim.collective import CollectiveKind
from dpsim.comm.allreduce import prepare
from dpsim.comm.clock import SLEEP_LEAD_S, now, sharpen_sleep, sleep_until
from dpsim.comm.compression import Compression
from dpsim.comm.transport import Array, Enqueued, PersistentAllreduce, Request, SummationOrder, Transport, pause

LOOK_S = 40e-6
"""How long the communication thread sleeps when nothing is due at a known time."""

Finished = Callable[[int, int, float, float], None]
"""Called with (bucket, size_bytes, start_s, end_s) when a bucket's allreduce is done."""


class BucketAllreduce(NamedTuple):
    """A prepared allreduce, and the bytes that it adds up."""

    prepared: PersistentAllreduce
    size_bytes: int


class Progress(Protocol):
    """Takes buckets during backward and has them reduced. ``bucket`` is the one under way, or -1."""

    @property
    def bucket(self) -> int: ...

    def prepare(
        self, data: Array, order: SummationOrder | None = None, kind: CollectiveKind = "allreduce"
    ) -> BucketAllreduce:
        """Prepare the allreduce of some memory, to be submitted again and again. Moves nothing."""

    def submit(self, bucket: int, allreduce: BucketAllreduce) -> None:
        """Hand in a bucket whose gradients are final: its allreduce may start."""

    def poll(self) -> None:
        """Called by the computing thread now and then."""

    def finish(self) -> None:
        """Return when every submitted allreduce is done."""

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
        self, data: Array, order: SummationOrder | None = None, kind: CollectiveKind = "allreduce"
    ) -> BucketAllreduce:
        allreduce = prepare(self._transport, data, self._algorithm, self._compression, order, kind)
        return BucketAllreduce(allreduce, data.nbytes)

    def submit(self, bucket: int, allreduce: BucketAllreduce) -> None:
        self.bucket = bucket
        begin_s = now()
        allreduce.prepared.run()
        self._finished(bucket, allreduce.size_bytes, begin_s, now())
        self.bucket = -1

    def poll(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Underway:
    """A collective that has started: what it waits for, and whether the next one may start before it is done."""

    def __init__(self, bucket: int, allreduce: BucketAllreduce) -> None:
        self.bucket, self.size_bytes = bucket, allreduce.size_bytes
        self.begin_s = now()
        self.pending: list[Request] = []
        self.enqueued = False
        self._steps = allreduce.prepared.start()

    def advance(self) -> bool:
        """Take every step that needs no waiting, and return whether it is done."""
        while True:
            if self.pending:
                self.pending = [message for message in self.pending if not message.done()]
                if self.pending:
                    return False
            step = next(self._steps, None)
            if step is None:
                return True
            self.pending, self.enqueued = list(step), isinstance(step, Enqueued)


class Polled(Inline):
    """A queue of allreduces that moves on whenever ``poll`` is called.

    One is under way at a time, except where a device has all their work in its own queue (``Enqueued``).
    """

    def __init__(
        self, transport: Transport, algorithm: str, finished: Finished, compression: Compression | None = None
    ) -> None:
        super().__init__(transport, algorithm, finished, compression)
        self._queue: deque[tuple[int, BucketAllreduce]] = deque()
        self._underway: deque[_Underway] = deque()
        self._end_s = 0.0

    def submit(self, bucket: int, allreduce: BucketAllreduce) -> None:
        self._queue.append((bucket, allreduce))
        self._advance()

    def poll(self) -> None:
        if self._underway:
            self._advance()

    def finish(self) -> None:
        while not self._advance():
            pause(self._transport, self._pending)

    @property
    def _pending(self) -> list[Request]:
        """What the oldest collective under way waits for."""
        return self._underway[0].pending if self._underway else []

    def _advance(self) -> bool:
        """Take every step that needs no waiting, and return whether no allreduce is left."""
        while True:
            while self._may_start():
                self._underway.append(_Underway(*self._queue.popleft()))
                self.bucket = self._underway[0].bucket
                if len(self._underway) > 1:
                    self._underway[-1].advance()
            if not self._underway:
                return True
            if self._underway[0].advance():
                self._end()
            elif not self._may_start():
                return False

    def _may_start(self) -> bool:
        return bool(self._queue) and (not self._underway or self._underway[-1].enqueued)

    def _end(self) -> None:
        """Report the oldest one, which is done. It has not begun before the one before it was done."""
        done = self._underway[0]
        begin_s, self._end_s = max(done.begin_s, self._end_s), now()
        self._finished(done.bucket, done.size_bytes, begin_s, self._end_s)
        self._underway.popleft()
        self.bucket = self._underway[0].bucket if self._underway else -1

    def _due_s(self) -> float:
        """When the messages under way will be done, as far as that is known; 0 while nothing is known."""
        known = [due_s for message in self._pending if (due_s := message.due_s()) is not None]
        return max(known, default=0.0)


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
        self._computing = True
        with self._turn:
            self._queue.append((bucket, allreduce))
            idle = not self._underway
        if idle:
            self._work.release()

    def poll(self) -> None:
        pass

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

    def _drive(self) -> None:
        """Move on until the queue is empty or the computing thread takes over."""
        while self._computing:
            polled_s = now()
            with self._turn:
                if not self._computing or self._advance():
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
    """The mechanism of an ``overlap`` token (``off`` is ``inline``: the caller hands buckets in after backward)."""
    kinds: dict[str, type[Inline]] = {"off": Inline, "inline": Inline, "poll": Polled, "thread": Threaded}
    return kinds[overlap](transport, algorithm, finished, compression)
