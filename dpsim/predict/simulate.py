"""One step of a Schedule on two lanes, simulated exactly, in one kernel."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpsim.jit import jit
from dpsim.predict.cost import at
from dpsim.schedule import (
    ALL_GATHER_EVENT,
    ALLREDUCE_EVENT,
    BACKWARD_EVENT,
    FORWARD_EVENT,
    LOSS_EVENT,
    OVERHEAD_EVENT,
    REDUCE_SCATTER_EVENT,
    SYNCHRONISE_EVENT,
    UPDATE_EVENT,
    Schedule,
)
from dpsim.timeline import step_sums

OFF, INLINE, POLL, THREAD = 0, 1, 2, 3
MODES = {"off": OFF, "inline": INLINE, "poll": POLL, "thread": THREAD}


class Operations(NamedTuple):
    """A Schedule's arrays as the kernel takes them; ``kind`` is of ``dpsim.schedule.KINDS``.

    ``held`` allreduces start after the last backward at the earliest (what is left of Horovod's last cycle; false
    elsewhere).
    """

    kind: Any
    lane: Any
    layer: Any
    size_bytes: Any
    depends_start: Any
    depends_on: Any
    held: Any


def operations_of(schedule: Schedule, held: NDArray[np.bool_] | None = None) -> Operations:
    """The arrays of a schedule for the kernel."""
    return Operations(
        schedule.kind,
        schedule.lane,
        schedule.layer,
        schedule.size_bytes,
        schedule.depends_start,
        schedule.depends_on,
        np.zeros(len(schedule.kind), np.bool_) if held is None else held,
    )


class Prices(NamedTuple):
    """Seconds: ``layers`` (5, L) forward, backward, gradient, and the launches of forward and of backward;
    ``announces`` (L) which layers have tensors; ``fixed`` (4) overhead_s, update_s, poll_s, rounds; ``idle`` (2, K) and
    ``overlapped`` (3, K) curves (``cost.at``) of what adds up gradients, ``gather`` (2, K) of what brings parameters
    together, and ``sums`` (2, K) of the sums for which computation stops."""

    layers: Any
    announces: Any
    fixed: Any
    idle: Any
    overlapped: Any
    gather: Any
    sums: Any


class Lane(NamedTuple):
    """The communication lane. ``head`` is the progress of the allreduce at the head of the ``queue``: [0] its place;
    [1] under thread the fraction left (-1: not started), under poll the stages left (0: not started); [2] under poll
    the end of its stage. ``ready`` marks backwards whose gradients are ready, and other operations that have ended;
    ``awaits`` is the place in it that decides when an allreduce may start (``_last_awaited``)."""

    queue: Any
    awaits: Any
    ready: Any
    head: Any
    times: Any


@jit
def simulate(operations, prices, mode):  # type: ignore[no-untyped-def]
    """Start, end and gradients-ready instants of every operation of one step, its sums, and its length.

    step = overhead + computation and communication on two lanes + update + all-gathers, as follows. An allreduce may
    also be a reduce-scatter.

    Compute lane: the step's overhead, then the computation in array order, each operation not before the host has
    launched it (host time is the sum of the launches so far; the host runs ahead). A backward makes its gradients
    ready after ``gradient`` seconds of its own work. Updates come last, when the allreduce they wait for has ended.

    Communication lane: allreduces one after another in array order. One may start when all operations that it depends
    on have made their gradients ready, or have ended where they make none.

    - off: all after the last computation, each at its idle cost.
    - inline: on the calling thread at the gradients-ready instant; computation (and launching) stops meanwhile.
    - thread: a fluid. While computation runs, the active allreduce progresses at 1/overlapped and computation at
      max(0, 1 - loss/overlapped); while it does not, the allreduce progresses at 1/idle.
    - poll: an allreduce is ``rounds`` stages of idle/rounds seconds each. During computation the end of a stage is
      noticed, and the next stage or allreduce started, only at poll points: the gradients-ready instants of layers
      that have tensors, and the end of each layer's backward. A poll with something under way costs poll_s of
      compute, a start costs loss of compute. After the last computation stages follow one another at once.

    A synchronisation stops the compute lane for the cost of its sum, where it stands among the computation; that of no
    layer follows the last allreduce. It counts as exposed communication. All-gathers follow the update one after
    another.
    """
    kind, lane_of = operations.kind, operations.lane
    times = np.zeros((3, len(kind)))
    queue = np.nonzero((kind == ALLREDUCE_EVENT) | (kind == REDUCE_SCATTER_EVENT))[0]
    head = np.array([0.0, 0.0 if mode == POLL else -1.0, 0.0])
    ready = np.zeros(len(kind) + 1, np.bool_)
    ready[len(kind)] = True
    lane = Lane(queue, _last_awaited(operations, queue), ready, head, times)
    now = _compute(operations, prices, lane, mode)
    _drain(now, operations, prices, lane, mode)
    for i in range(len(kind)):
        late = kind[i] == SYNCHRONISE_EVENT and operations.layer[i] < 0
        if late or kind[i] == UPDATE_EVENT or kind[i] == ALL_GATHER_EVENT:
            for d in range(operations.depends_start[i], operations.depends_start[i + 1]):
                now = max(now, times[1, operations.depends_on[d]])
            times[0, i] = now
            if kind[i] == UPDATE_EVENT:
                now += prices.fixed[1]
            else:
                now += at(prices.sums if late else prices.gather, 1, operations.size_bytes[i])
            times[1, i] = now
    return times, step_sums(kind, lane_of, times[0], times[1], mode in (OFF, INLINE)), now


@jit
def _compute(operations, prices, lane, mode):  # type: ignore[no-untyped-def]
    """All that is computed before the update, with the communication beside it; the instant afterwards.

    An operation is three parts: the wait for its launch, the work until its gradients are ready (all of a forward),
    and the rest of a backward.
    """
    kind, layers = operations.kind, prices.layers
    ready, times = lane.ready, lane.times
    now = host = 0.0
    for i in range(len(kind)):
        if kind[i] == OVERHEAD_EVENT:
            times[0, i] = now
            now += prices.fixed[0]
            host = max(host, now)
        elif kind[i] == SYNCHRONISE_EVENT and operations.layer[i] >= 0:
            now = host = max(now, host)
            cost = at(prices.sums, 1, operations.size_bytes[i])
            times[0, i] = now
            if _engaged(operations, lane, mode):
                _flow(now, cost, False, operations, prices, lane)
            now = host = now + cost
        elif kind[i] == FORWARD_EVENT or kind[i] == BACKWARD_EVENT:
            layer = operations.layer[i]
            host += layers[3, layer] if kind[i] == FORWARD_EVENT else layers[4, layer]
            if host > now:
                if _engaged(operations, lane, mode):
                    _flow(now, host - now, False, operations, prices, lane)
                now = host
            times[0, i] = now
            work = layers[0, layer] if kind[i] == FORWARD_EVENT else layers[2, layer]
            if _engaged(operations, lane, mode):
                now = _flow(now, work, True, operations, prices, lane)
            else:
                now += work
            if kind[i] == BACKWARD_EVENT:
                times[2, i] = now
                ready[i] = True
                if mode == INLINE:
                    stopped = now
                    now = _stop(now, operations, prices, lane)
                    if now > stopped:
                        host = max(host, now)
                elif mode == POLL and prices.announces[layer]:
                    now = _poll(now, operations, prices, lane)
                rest = layers[1, layer] - layers[2, layer]
                if _engaged(operations, lane, mode):
                    now = _flow(now, rest, True, operations, prices, lane)
                else:
                    now += rest
                if mode == POLL:
                    now = _poll(now, operations, prices, lane)
        elif kind[i] == LOSS_EVENT:
            times[0, i] = now  # its time is part of the overhead
        else:
            continue
        times[1, i] = now
        ready[i] = True
    return now


@jit
def _last_awaited(operations, queue):  # type: ignore[no-untyped-def]
    """The last computation that each allreduce of the queue waits for, by operation; their number for none at all.

    Computations become ready in array order, so the others are ready by then, and so are the allreduces before it.
    """
    kind = operations.kind
    last = np.full(len(kind), len(kind))
    for k in queue:
        latest = -1
        for d in range(operations.depends_start[k], operations.depends_start[k + 1]):
            earlier = operations.depends_on[d]
            if kind[earlier] != ALLREDUCE_EVENT and kind[earlier] != REDUCE_SCATTER_EVENT:
                latest = max(latest, earlier)
        if latest >= 0:
            last[k] = latest
    return last


@functools.partial(jit, inline="always")
def _engaged(operations, lane, mode):  # type: ignore[no-untyped-def]
    """Whether a communication thread has something under way, or something that it may start."""
    place = int(lane.head[0])
    if mode != THREAD or place >= len(lane.queue):
        return False
    return lane.head[1] >= 0.0 or lane.ready[lane.awaits[lane.queue[place]]]


@jit
def _stop(now, operations, prices, lane):  # type: ignore[no-untyped-def]
    """Run every allreduce that may start, one after another; the instant afterwards."""
    queue, awaits, ready, head, times = lane
    while head[0] < len(queue):
        k = queue[int(head[0])]
        if operations.held[k] or not ready[awaits[k]]:
            break
        times[0, k] = now
        now += at(prices.idle, 1, operations.size_bytes[k])
        times[1, k] = now
        head[0] += 1
    return now


@jit
def _flow(now, work, computing, operations, prices, lane):  # type: ignore[no-untyped-def]
    """Advance both lanes until ``work`` seconds of computation (or of idling) are done; that instant."""
    queue, awaits, ready, head, times = lane
    size_bytes, held = operations.size_bytes, operations.held
    idle, overlapped = prices.idle, prices.overlapped
    while True:
        place = int(head[0])
        k = queue[place] if place < len(queue) else -1
        if head[1] < 0.0:
            if k < 0 or held[k] or not ready[awaits[k]]:
                return now + work
            head[1] = 1.0
            times[0, k] = now
        length = at(overlapped, 1, size_bytes[k]) if computing else at(idle, 1, size_bytes[k])
        left = head[1] * length
        speed = 1.0
        if computing and length > 0.0:
            speed = max(0.0, 1.0 - at(overlapped, 2, size_bytes[k]) / length)
        if speed * left > work or (work <= 0.0 and left > 0.0):
            spent = work / speed if work > 0.0 else 0.0
            head[1] -= spent / length
            return now + spent
        now += left
        work = max(0.0, work - speed * left)
        times[1, k] = now
        head[0] += 1
        head[1] = -1.0


@jit
def _poll(now, operations, prices, lane):  # type: ignore[no-untyped-def]
    """One look at the communication: notice a stage that has ended, start what may start; the instant afterwards."""
    queue, awaits, ready, head, times = lane
    size_bytes, held, idle = operations.size_bytes, operations.held, prices.idle
    poll_s, stages = prices.fixed[2], prices.fixed[3]
    if head[1] > 0.0:
        now += poll_s
    while head[0] < len(queue):
        k = queue[int(head[0])]
        if head[1] > 0.0:
            if head[2] > now:
                return now
            head[1] -= 1.0
            if head[1] > 0.0:
                head[2] = now + at(idle, 1, size_bytes[k]) / stages
            else:
                times[1, k] = now
                head[0] += 1
        elif ready[awaits[k]] and not held[k]:
            times[0, k] = now
            head[1] = stages
            head[2] = now + at(idle, 1, size_bytes[k]) / stages
            now += at(prices.overlapped, 2, size_bytes[k])
        else:
            return now
    return now


@jit
def _drain(now, operations, prices, lane, mode):  # type: ignore[no-untyped-def]
    """What is left after the last computation, one allreduce after another at its idle cost."""
    queue, _, _, head, times = lane
    size_bytes, idle = operations.size_bytes, prices.idle
    stages = prices.fixed[3]
    for place in range(int(head[0]), len(queue)):
        k = queue[place]
        cost = at(idle, 1, size_bytes[k])
        if mode == THREAD and head[1] >= 0.0:
            now += head[1] * cost
        elif mode == POLL and head[1] > 0.0:
            now = max(now, head[2]) + (head[1] - 1.0) * cost / stages
        else:
            times[0, k] = now
            now += cost
        head[1] = 0.0 if mode == POLL else -1.0
        times[1, k] = now
