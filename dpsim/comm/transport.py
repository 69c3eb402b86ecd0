"""The vocabulary of communication: ``Transport``, messages as ``Request``s, and allreduces that are prepared once."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dpsim.collective import CollectiveKind
from dpsim.comm.clock import SLEEP_LEAD_S, now, sleep_until
from dpsim.comm.compression import Compression
from dpsim.kernels.allreduce.tree import PartialSums
from dpsim.machine import Network
from dpsim.memory import ALIGNMENT_BYTES as ALIGNMENT_BYTES
from dpsim.memory import Mark, Memory
from dpsim.memory import aligned_bytes as aligned_bytes
from dpsim.replica import OrderedSum

Array = NDArray[Any]


class Request(Protocol):
    """A message under way."""

    def done(self) -> bool:
        """Return whether its buffer may be used again. Makes progress and never waits."""

    def due_s(self) -> float | None:
        """Return when it will be done, on the shared clock, where that is known already."""


class PersistentRound(Protocol):
    """Messages between the same arrays that are sent again and again, one time after another."""

    def start(self) -> Request:
        """Start all of them."""

    def run(self) -> None:
        """Start all of them, and return when they are done."""


CollectiveSteps = Generator[Sequence[Request], None, None]
"""Yields the messages of one round after another; the data is reduced when it ends."""


class QueueEvent(Request, Mark, Protocol):
    """A point in a device's queue."""


class Enqueued(tuple[QueueEvent, ...]):
    """The last step of a collective whose work is all in a device's queue: the next may start before it is done.

    The queue keeps their order, and all ranks must start them in the same order.
    """

    __slots__ = ()


class SummationOrder(NamedTuple):
    """The fixed order of addition: the partial sums of all ranks, and this rank's own besides the first one.

    ``slots`` are the partial sums. All ranks have as many ``extra`` arrays, as long as the first; those that hold no
    partial sum of a rank are not used.
    """

    slots: PartialSums
    extra: tuple[Array, ...] = ()


class PersistentAllreduce(Protocol):
    """An allreduce of one array, prepared once and run again and again, one run at a time."""

    def run(self) -> None:
        """Run it in place and return when it is done."""

    def start(self) -> CollectiveSteps:
        """Run it in place by steps; nothing moves before the first ``next``."""


def nothing() -> None:
    """Do nothing when data is complete, as most transports."""


class Span(NamedTuple):
    """A collective in a device's stream: marks where it began and ended, and when the host had asked for it."""

    began: Mark
    ended: Mark
    asked_s: float


def no_span() -> Span | None:
    """Return None: most collectives know nothing of a device's stream."""
    return None


class SteppedAllreduce:
    """A ``PersistentAllreduce`` made of its steps alone: ``begin()`` starts them.

    The computing thread may call ``complete()`` before a run, once the data is computed or is in a device's queue; the
    run reduces the data as it is then. ``span()`` is the last run's part of a device's stream, or None.
    """

    def __init__(
        self,
        transport: Transport,
        begin: Callable[[], CollectiveSteps],
        complete: Callable[[], None] = nothing,
        span: Callable[[], Span | None] = no_span,
    ) -> None:
        self._transport = transport
        self.start, self.complete, self.span = begin, complete, span

    def run(self) -> None:
        for pending in self.start():
            wait(self._transport, pending)


class Transport(Protocol):
    """Point-to-point messages between the ranks of one group, in order for each pair.

    ``oversubscribed``: there are more ranks than cores here, so waiting ranks must let the others have the core.
    ``nap_s``: waiting ranks sleep, so long at a time while nothing is known to be due; 0: they never sleep.
    ``devices_a_node``: rank r is on node r // devices_a_node of the layout; 1 in a flat one.
    ``memory``: where the arrays lie that it allocates, and with them what is computed. Messages are of host arrays.
    """

    rank: int
    size: int
    network: Network
    oversubscribed: bool
    nap_s: float
    devices_a_node: int
    memory: Memory

    def allocate(self, size_bytes: int) -> NDArray[np.uint8]:
        """Allocate zeroed, ``ALIGNMENT_BYTES`` aligned memory for gradients; collective, equal sizes on all ranks."""

    def prepare(
        self,
        data: Array,
        algorithm: str,
        compression: Compression | None,
        order: SummationOrder | None = None,
        kind: CollectiveKind = "allreduce",
        replicas: int = 1,
    ) -> PersistentAllreduce | None:
        """Prepare this transport's own collective of ``data``, or return None if messages or MPI do it.

        In memory that the ranks share it is ``one-shot``, ``two-shot``, or ``auto`` for the faster one at that size;
        reduce-scatter and all-gather are the two halves of ``two-shot``, and so are all collectives of ``replicas``.
        The data (and what is extra in ``order``) must be a part of allocated memory, the same on every rank.
        """

    def sums_between_layers(self, sums: PartialSums, most_elements: Mapping[str, int]) -> OrderedSum | None:
        """Return what adds arrays of a device's ``memory`` that a step needs at once; None where messages do it.

        It is made ready for so many elements of each dtype. Collective.
        """

    def prepare_round(
        self, receives: Sequence[tuple[Array, int]], sends: Sequence[tuple[Array, int]]
    ) -> PersistentRound | None:
        """Prepare messages of arrays from and to ranks, or return None where each must be sent anew. Moves nothing."""

    def send(self, data: Array, to: int) -> Request: ...

    def receive(self, data: Array, source: int) -> Request: ...

    def native_allreduce(self, data: Array) -> None:
        """Run the MPI library's own allreduce, in place, blocking. Raises ``ConfigError`` where there is none."""

    def start_native_allreduce(self, data: Array) -> Request:
        """Start the same, non-blocking."""

    def close(self) -> None:
        """Give back memory that other ranks may be using. Collective, as ``allocate`` is; nothing may be under way."""


def wait(t: Transport, pending: Sequence[Request], *, yielding_s: float = 0.0) -> None:
    """Return when every message is done.

    Waiting asks again and again without a pause, for a yielded core may go to any other program for milliseconds; only
    where ranks share cores does it yield or sleep (``pause``), so that the others can send. Ranks that would sleep
    only yield for the first ``yielding_s``.
    """
    waiting = [message for message in pending if not message.done()]
    until_s = now() + yielding_s if waiting and yielding_s else 0.0
    while waiting:
        if until_s and now() < until_s:
            os.sched_yield()
        else:
            pause(t, waiting)
        waiting = [message for message in waiting if not message.done()]


def pause(t: Transport, waiting: Sequence[Request]) -> None:
    """Pause between two looks at messages that are not done, all of which the rank waits for.

    Where ranks sleep, it sleeps until shortly before the last one is due, or for a nap if that is not known of all.
    """
    if t.nap_s:
        due_s = [message.due_s() for message in waiting]
        due_times = [moment_s for moment_s in due_s if moment_s is not None]
        moment_s = max(due_times) - SLEEP_LEAD_S if len(due_times) == len(due_s) > 0 else now() + t.nap_s
        if moment_s > now():
            sleep_until(moment_s)
    elif t.oversubscribed:
        os.sched_yield()


def all_done(pending: Sequence[Request]) -> bool:
    """Return whether every message is done. Asks each of them, for progress."""
    finished = True
    for message in pending:
        if not message.done():
            finished = False
    return finished
