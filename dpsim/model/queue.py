"""The communication lane of a rank class in the simulation of a step: how its queue of collectives goes on."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from dpsim.jit import jit
from dpsim.model.curve import segment
from dpsim.schedule import ALL_GATHER_EVENT, ALLREDUCE_EVENT, BROADCAST_EVENT

OFF, INLINE, POLL, THREAD = 0, 1, 2, 3
MODES = {"off": OFF, "inline": INLINE, "poll": POLL, "thread": THREAD}


class Queue(NamedTuple):
    """The communication lane of a class: ``rows`` are its collectives of buckets.

    By operation: ``awaits`` is the place in ``done`` that decides when a collective may start (``awaited``), ``costs``
    (3, operations) the seconds that it takes alone and beside computation, and the compute seconds lost then. ``head``
    is the progress of the first that has not ended: [0] its place in ``rows``; [1] under poll the stages left (0: not
    started), else the fraction left (-1: not started); [2] under poll the end of its stage.
    """

    rows: Any
    awaits: Any
    costs: Any
    done: Any
    head: Any
    times: Any
    stages: float


@jit
def awaited(operations, position, done):  # type: ignore[no-untyped-def]
    """By collective, the place in ``done`` that decides when it may start: that of the last computation it waits for.

    ``done[i]`` says that computation i has made its gradients ready, and ``done[n + i]`` that it has ended, of n
    operations; ``done[2 n]`` is true, and ``done[2 n + 1]`` never is. Computations become ready in array order, so the
    others are ready by then, and so are the collectives before it.
    """
    start, on, count = operations.depends_start, operations.depends_on, len(position)
    held, kind = operations.held, operations.kind
    done[2 * count] = True
    awaits = np.full(count, 2 * count)
    for k in range(count):
        if position[k] < 0:
            continue
        latest = -1
        for d in range(start[k], start[k + 1]):
            if position[on[d]] < 0:
                latest = max(latest, on[d])
        if held[k]:
            awaits[k] = 2 * count + 1
        elif latest >= 0:
            awaits[k] = count + latest if kind[k] == ALL_GATHER_EVENT else latest
    return awaits


@jit
def costs_of(operations, prices, position, mode):  # type: ignore[no-untyped-def]
    """By collective of a bucket: seconds alone, seconds beside computation, and compute seconds lost then."""
    costs, size_bytes, kind = np.zeros((3, len(position))), operations.size_bytes, operations.kind
    idle, overlapped = prices.idle, prices.overlapped
    gather, overlapped_gather = prices.gather, prices.overlapped_gather
    between, overlapped_between = prices.between, prices.overlapped_between
    beside = mode in (POLL, THREAD)
    for k in range(len(position)):
        size = size_bytes[k]
        if position[k] < 0 or size <= 0:
            continue
        gathers = kind[k] == ALL_GATHER_EVENT or kind[k] == BROADCAST_EVENT
        points = gather if gathers else between if kind[k] == ALLREDUCE_EVENT else idle
        low, weight = segment(points, size)
        costs[0, k] = points[1, low] + weight * (points[1, low + 1] - points[1, low])
        if beside:
            points = overlapped
            if gathers or kind[k] == ALLREDUCE_EVENT:
                points = overlapped_gather if gathers else overlapped_between
            low, weight = segment(points, size)
            for row in (1, 2):
                costs[row, k] = points[row, low] + weight * (points[row, low + 1] - points[row, low])
    return costs


@functools.partial(jit, inline="always")
def may_start(head, rows, awaits, done):  # type: ignore[no-untyped-def]
    """Whether the first collective that has not ended may start, or has."""
    place = int(head[0])
    return place < len(rows) and done[awaits[rows[place]]]


@jit
def run_ready(now, host, queue):  # type: ignore[no-untyped-def]
    """Run every collective that may start, one after another; now and host afterwards."""
    stopped = now
    while may_start(queue.head, queue.rows, queue.awaits, queue.done):
        now = drain(now, queue.head[0], queue, INLINE)
    return now, max(host, now) if now > stopped else host


@jit
def flow(now, work, computing, queue):  # type: ignore[no-untyped-def]
    """Advance both lanes until ``work`` seconds of computation (or of standing still) are done; that instant."""
    rows, awaits, costs, done, head, times, _ = queue
    while may_start(head, rows, awaits, done):
        k = rows[int(head[0])]
        if head[1] < 0.0:
            head[1] = 1.0
            times[0, k] = now
        length = costs[1, k] if computing else costs[0, k]
        left = head[1] * length
        speed = 1.0
        if computing and length > 0.0:
            speed = max(0.0, 1.0 - costs[2, k] / length)
        if speed * left > work or (work <= 0.0 and left > 0.0):
            spent = work / speed if work > 0.0 else 0.0
            head[1] -= spent / length
            return now + spent
        now += left
        work = max(0.0, work - speed * left)
        times[1, k] = now
        head[0] += 1
        head[1] = -1.0
    return now + work


@jit
def poll(now, queue, poll_s):  # type: ignore[no-untyped-def]
    """One look at the communication: notice a stage that has ended, start what may start; the instant afterwards."""
    rows, awaits, costs, done, head, times, stages = queue
    if head[1] > 0.0:
        now += poll_s
    while may_start(head, rows, awaits, done):
        k = rows[int(head[0])]
        if head[1] <= 0.0:
            times[0, k] = now
            head[1] = stages
            head[2] = now + costs[0, k] / stages
            now += costs[2, k]
        elif head[2] > now:
            return now
        elif head[1] > 1.0:
            head[1] -= 1.0
            head[2] = now + costs[0, k] / stages
        else:
            times[1, k] = now
            head[0] += 1
            head[1] = 0.0
    return now


@jit
def wait(now, until, queue, mode):  # type: ignore[no-untyped-def]
    """Stand still until an instant, while the queue goes on; that instant."""
    if mode == THREAD and until > now:
        flow(now, until - now, False, queue)
    elif mode == POLL and until > now:
        _stages(now, until, len(queue.rows) - 1, queue)
    return max(now, until)


@jit
def drain(now, last, queue, mode):  # type: ignore[no-untyped-def]
    """Stand still until the collective at a place of the queue has ended, one after another; that instant."""
    head = queue.head
    if mode == POLL:
        return _stages(now, np.inf, last, queue)
    while head[0] <= last:
        k = queue.rows[int(head[0])]
        if head[1] < 0.0:
            head[1] = 1.0
            queue.times[0, k] = now
        now += head[1] * queue.costs[0, k]
        queue.times[1, k] = now
        head[0] += 1
        head[1] = -1.0
    return now


@jit
def _stages(now, until, last, queue):  # type: ignore[no-untyped-def]
    """Under poll, let stages follow one another until an instant, or the end of a place of the queue; that instant."""
    head = queue.head
    while head[0] <= last:
        k = queue.rows[int(head[0])]
        if head[1] <= 0.0 and until < np.inf and not may_start(head, queue.rows, queue.awaits, queue.done):
            return until
        stage_s = queue.costs[0, k] / queue.stages
        if head[1] <= 0.0:
            queue.times[0, k] = now
            head[1] = queue.stages
            head[2] = now + stage_s
        now = max(now, head[2])
        end = now + (head[1] - 1.0) * stage_s
        if end > until:
            if now <= until:
                ended = min(1.0 + np.floor((until - now) / stage_s), head[1] - 1.0)
                head[1] -= ended
                head[2] = now + ended * stage_s
            return until
        now = queue.times[1, k] = end
        head[0] += 1
        head[1] = 0.0
    return now
