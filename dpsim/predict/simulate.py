"""One step of a Schedule on two lanes, simulated exactly, in one kernel."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from dpsim.kernels.jit import jit
from dpsim.predict.cost import at
from dpsim.schedule import ALLREDUCE, BACKWARD, FORWARD, SYNCHRONISE

OFF, INLINE, POLL, THREAD = 0, 1, 2, 3
MODES = {"off": OFF, "inline": INLINE, "poll": POLL, "thread": THREAD}
STEP, EXPOSED, FORWARDS, BACKWARDS, UPDATES = range(5)


class Operations(NamedTuple):
    """A Schedule's arrays as the kernel takes them; ``held`` allreduces start after the last backward at the earliest
    (what is left of Horovod's last cycle; false elsewhere)."""

    kind: Any
    layer: Any
    after: Any
    size_bytes: Any
    held: Any


class Prices(NamedTuple):
    """Seconds: ``layers`` (4, L) forward, backward, gradient, launch; ``announces`` (L) which layers have tensors;
    ``fixed`` (4) overhead_s, update_s, poll_s, rounds; ``solo`` (2, K) and ``beside`` (3, K) curves (``cost.at``)."""

    layers: Any
    announces: Any
    fixed: Any
    solo: Any
    beside: Any


class Lane(NamedTuple):
    """The communication lane. ``head`` is the progress of the allreduce at the head of the ``queue``: [0] its place;
    [1] under thread the fraction left (-1: not started), under poll the stages left (0: not started); [2] under poll
    the end of its stage. ``ready`` marks operations whose gradients are ready."""

    queue: Any
    ready: Any
    head: Any
    times: Any


@jit
def simulate(operations, prices, mode):  # type: ignore[no-untyped-def]
    """Start, end and gradients-ready instants of every operation of one step, and its sums.

    step = overhead + computation and communication on two lanes + update, as follows.

    Compute lane: the step's overhead, then the computation in array order, each operation not before the host has
    launched it (host time is the sum of the launches so far; the host runs ahead). A backward makes its gradients
    ready after ``gradient`` seconds of its own work. Updates come last, when the allreduce they wait for has ended.

    Communication lane: allreduces one after another in array order. One may start when the operation ``after`` has
    made its gradients ready.

    - off: all after the last computation, each at its solo cost.
    - inline: on the calling thread at the gradients-ready instant; computation (and launching) stops meanwhile.
    - thread: a fluid. While computation runs, the active allreduce progresses at 1/beside and computation at
      max(0, 1 - loss/beside); while it does not, the allreduce progresses at 1/solo.
    - poll: an allreduce is ``rounds`` stages of solo/rounds seconds each. During computation the end of a stage is
      noticed, and the next stage or allreduce started, only at poll points: the gradients-ready instants of layers
      that have tensors, and the end of each layer's backward. A poll with something under way costs poll_s of
      compute, a start costs loss of compute. After the last computation stages follow one another at once.

    A synchronisation stops the compute lane for its solo cost, where it stands among the computation; that of no layer
    follows the last allreduce. It counts as exposed communication.

    ``operations`` is an ``Operations``, ``prices`` a ``Prices``, ``mode`` a value of ``MODES``.
    Returns times (3, operations): start, end, ready; sums (5): step, exposed communication, forward, backward, update.
    """
    kind, after = operations.kind, operations.after
    times = np.zeros((3, len(kind)))
    queue = np.nonzero(kind == ALLREDUCE)[0]
    head = np.array([0.0, 0.0 if mode == POLL else -1.0, 0.0])
    lane = Lane(queue, np.zeros(len(kind), np.bool_), head, times)
    now, paused = _compute(operations, prices, lane, mode)
    _drain(now, operations, prices, lane, mode)
    for i in range(len(kind)):
        if kind[i] == SYNCHRONISE and operations.layer[i] < 0:
            times[0, i] = now if len(queue) == 0 else max(now, times[1, queue[-1]])
            now = times[1, i] = times[0, i] + at(prices.solo, 1, operations.size_bytes[i])
        elif kind[i] != FORWARD and kind[i] != BACKWARD and kind[i] != ALLREDUCE and kind[i] != SYNCHRONISE:
            times[0, i] = now if after[i] < 0 else max(now, times[1, after[i]])
            now = times[1, i] = times[0, i] + prices.fixed[1]
    sums = _sums(kind, queue, times, prices.fixed[0])
    sums[STEP] = now
    sums[BACKWARDS] -= paused
    if mode in (OFF, INLINE):
        sums[EXPOSED] = (times[1, queue] - times[0, queue]).sum()
    stops = np.nonzero(kind == SYNCHRONISE)[0]
    sums[EXPOSED] += (times[1, stops] - times[0, stops]).sum()
    return times, sums


@jit
def _compute(operations, prices, lane, mode):  # type: ignore[no-untyped-def]
    """All forwards and backwards, with the communication beside them; (the instant afterwards, seconds of pauses).

    An operation is three parts: the wait for its launch, the work until its gradients are ready (all of a forward),
    and the rest of a backward.
    """
    kind, layers = operations.kind, prices.layers
    ready, times = lane.ready, lane.times
    now = host = prices.fixed[0]
    paused = 0.0
    for i in range(len(kind)):
        if kind[i] == SYNCHRONISE and operations.layer[i] >= 0:
            now = host = max(now, host)
            cost = at(prices.solo, 1, operations.size_bytes[i])
            times[0, i] = now
            if _engaged(operations, lane, mode):
                _flow(now, cost, False, operations, prices, lane)
            now = host = times[1, i] = now + cost
        if kind[i] != FORWARD and kind[i] != BACKWARD:
            continue
        of = operations.layer[i]
        host += layers[3, of]
        if host > now:
            if _engaged(operations, lane, mode):
                _flow(now, host - now, False, operations, prices, lane)
            now = host
        times[0, i] = now
        work = layers[0, of] if kind[i] == FORWARD else layers[2, of]
        if _engaged(operations, lane, mode):
            now = _flow(now, work, True, operations, prices, lane)
        else:
            now += work
        if kind[i] == BACKWARD:
            times[2, i] = now
            ready[i] = True
            if mode == INLINE:
                stopped = now
                now = _stop(now, operations, prices, lane)
                if now > stopped:
                    paused += now - stopped
                    host = max(host, now)
            elif mode == POLL and prices.announces[of]:
                now = _poll(now, operations, prices, lane)
            rest = layers[1, of] - layers[2, of]
            if _engaged(operations, lane, mode):
                now = _flow(now, rest, True, operations, prices, lane)
            else:
                now += rest
            if mode == POLL:
                now = _poll(now, operations, prices, lane)
        times[1, i] = now
    return now, paused


@functools.partial(jit, inline="always")
def _engaged(operations, lane, mode):  # type: ignore[no-untyped-def]
    """Whether a communication thread has something under way, or something that it may start."""
    place = int(lane.head[0])
    if mode != THREAD or place >= len(lane.queue):
        return False
    return lane.head[1] >= 0.0 or lane.ready[operations.after[lane.queue[place]]]


@jit
def _stop(now, operations, prices, lane):  # type: ignore[no-untyped-def]
    """Run every allreduce that may start, one after another; the instant afterwards."""
    queue, ready, head, times = lane
    while head[0] < len(queue):
        k = queue[int(head[0])]
        if operations.held[k] or not ready[operations.after[k]]:
            break
        times[0, k] = now
        now += at(prices.solo, 1, operations.size_bytes[k])
        times[1, k] = now
        head[0] += 1
    return now


@jit
def _flow(now, work, computing, operations, prices, lane):  # type: ignore[no-untyped-def]
    """Advance both lanes until ``work`` seconds of computation (or of idling) are done; that instant."""
    queue, ready, head, times = lane
    size_bytes, held, solo = operations.size_bytes, operations.held, prices.solo
    after, beside = operations.after, prices.beside
    while True:
        place = int(head[0])
        k = queue[place] if place < len(queue) else -1
        if head[1] < 0.0:
            if k < 0 or held[k] or not ready[after[k]]:
                return now + work
            head[1] = 1.0
            times[0, k] = now
        length = at(beside, 1, size_bytes[k]) if computing else at(solo, 1, size_bytes[k])
        left = head[1] * length
        speed = 1.0
        if computing and length > 0.0:
            speed = max(0.0, 1.0 - at(beside, 2, size_bytes[k]) / length)
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
    queue, ready, head, times = lane
    size_bytes, held, solo = operations.size_bytes, operations.held, prices.solo
    after, poll_s, stages = operations.after, prices.fixed[2], prices.fixed[3]
    if head[1] > 0.0:
        now += poll_s
    while head[0] < len(queue):
        k = queue[int(head[0])]
        if head[1] > 0.0:
            if head[2] > now:
                return now
            head[1] -= 1.0
            if head[1] > 0.0:
                head[2] = now + at(solo, 1, size_bytes[k]) / stages
            else:
                times[1, k] = now
                head[0] += 1
        elif ready[after[k]] and not held[k]:
            times[0, k] = now
            head[1] = stages
            head[2] = now + at(solo, 1, size_bytes[k]) / stages
            now += at(prices.beside, 2, size_bytes[k])
        else:
            return now
    return now


@jit
def _drain(now, operations, prices, lane, mode):  # type: ignore[no-untyped-def]
    """What is left after the last computation, one allreduce after another at its solo cost."""
    queue, _, head, times = lane
    size_bytes, solo = operations.size_bytes, prices.solo
    stages = prices.fixed[3]
    for place in range(int(head[0]), len(queue)):
        k = queue[place]
        cost = at(solo, 1, size_bytes[k])
        if mode == THREAD and head[1] >= 0.0:
            now += head[1] * cost
        elif mode == POLL and head[1] > 0.0:
            now = max(now, head[2]) + (head[1] - 1.0) * cost / stages
        else:
            times[0, k] = now
            now += cost
        head[1] = 0.0 if mode == POLL else -1.0
        times[1, k] = now


@jit
def _sums(kind, queue, times, overhead_s):  # type: ignore[no-untyped-def]
    """Sums by kind, and the communication lane's time outside the compute lane (both lanes are in time order)."""
    sums = np.zeros(5)
    total = 0.0
    for k in queue:
        total += times[1, k] - times[0, k]
    hidden = 0.0
    place = 0
    for i in range(-1, len(kind)):
        if i >= 0 and kind[i] == ALLREDUCE:
            continue
        start, end = (0.0, overhead_s) if i < 0 else (times[0, i], times[1, i])
        if i >= 0 and kind[i] != SYNCHRONISE:
            sums[FORWARDS if kind[i] == FORWARD else BACKWARDS if kind[i] == BACKWARD else UPDATES] += end - start
        while place < len(queue) and times[1, queue[place]] <= start:
            place += 1
        other = place
        while other < len(queue) and times[0, queue[other]] < end:
            hidden += max(0.0, min(end, times[1, queue[other]]) - max(start, times[0, queue[other]]))
            other += 1
    sums[EXPOSED] = max(0.0, total - hidden)
    return sums
