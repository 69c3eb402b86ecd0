"""One step of a Schedule, simulated exactly, in one kernel: two lanes of one rank of each rank class."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpsim.jit import jit
from dpsim.model.curve import at
from dpsim.model.queue import (
    INLINE,
    OFF,
    POLL,
    THREAD,
    Queue,
    awaited,
    costs_of,
    drain,
    flow,
    may_start,
    poll,
    run_ready,
    wait,
)
from dpsim.schedule import (
    ALL_GATHER_EVENT,
    ALLREDUCE_EVENT,
    BACKWARD_EVENT,
    BROADCAST_EVENT,
    FORWARD_EVENT,
    LOSS_EVENT,
    OVERHEAD_EVENT,
    RECEIVE_EVENT,
    RECOMPUTE_EVENT,
    REDUCE_SCATTER_EVENT,
    SEND_EVENT,
    SYNCHRONISE_EVENT,
    UPDATE_EVENT,
    Schedule,
)
from dpsim.timeline import EXPOSED_S, step_sums


class Operations(NamedTuple):
    """A Schedule's arrays as the kernel takes them; ``kind`` is of ``dpsim.schedule.KINDS``.

    ``held`` allreduces start only when something waits for them (what is left of Horovod's last cycle; false
    elsewhere).
    """

    kind: Any
    lane: Any
    layer: Any
    size_bytes: Any
    depends_start: Any
    depends_on: Any
    rank_class: Any
    peer: Any
    meeting: Any
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
        schedule.rank_class,
        schedule.peer,
        schedule.meeting,
        np.zeros(len(schedule.kind), np.bool_) if held is None else held,
    )


class Prices(NamedTuple):
    """Seconds: ``layers`` (5, L) forward, backward, gradient, and the launches of forward and of backward;
    ``announces`` (L) which layers have tensors; ``fixed`` (4 + classes) overhead_s, poll_s, rounds, loss_s, and
    update_s of each class; ``idle`` (2, K) and ``overlapped`` (3, K) curves (``cost.at``) of what adds up gradients,
    ``gather`` and ``overlapped_gather`` of what brings parameters together, ``between`` and ``overlapped_between`` of
    what adds up shards over replicas (elsewhere they are those of what adds up gradients), ``sums`` (2, K) of the sums
    for which computation stops, ``agreement`` of those of all ranks, and ``joining`` of those of the parts of a stage.
    ``messages`` (operations) is what each send takes, and ``copied`` whether its receiver does the work; both are empty
    where there are none."""

    layers: Any
    announces: Any
    fixed: Any
    idle: Any
    overlapped: Any
    gather: Any
    overlapped_gather: Any
    between: Any
    overlapped_between: Any
    sums: Any
    agreement: Any
    joining: Any
    messages: Any
    copied: Any


class Classes(NamedTuple):
    """How far each class is: the ``place`` of its next computation, its ``clock`` (now, host).

    ``come`` (operations) says of a synchronisation of several classes whether its own has come to it; ``meetings``
    (2, meetings) how many classes are still to come to each, and when the last one came. ``links`` (from, to) says
    until when messages fill each link.
    """

    place: Any
    clock: Any
    come: Any
    meetings: Any
    links: Any


@jit
def simulate(operations, prices, mode):  # type: ignore[no-untyped-def]
    """Start, end and ready instants of every operation of one step, the sums of a class, and the step's length.

    ``times[2]`` says when a backward's gradients are ready, and when a send's message arrives. The sums are those of
    the class with the least exposed communication, which the others wait for. The step ends with its last operation.

    Compute lane of a class: its operations in array order, each when what it depends on has ended. A layer's operation
    does not start before the host has launched it (host time is the sum of the launches so far; the host runs ahead). A
    backward makes its gradients ready after ``gradient`` seconds of its own work. A recomputation is a forward. Sends
    take no time here: a message begins to travel when those before it on the same link have arrived, and a receive
    lasts until the message is there; with ``copied`` it is the receive that takes the time. A synchronisation stops the
    lane for the cost of its sum; one of all classes begins when the last of them has come to it.

    Communication lane: collectives one after another in array order. One may start when all operations that it depends
    on have made their gradients ready, or have ended where they make none; an all-gather when they have ended. What
    computes and depends on a collective waits until the queue has come to its end, each at its idle cost; so does the
    step's end.

    - off: collectives run only while something waits for them.
    - inline: on the calling thread as soon as they may start; computation (and launching) stops meanwhile.
    - thread: a fluid. While computation runs, the active collective progresses at 1/overlapped and computation at
      max(0, 1 - loss/overlapped); while it does not, the collective progresses at 1/idle.
    - poll: a collective is ``rounds`` stages of idle/rounds seconds each. During computation the end of a stage is
      noticed, and the next stage or collective started, only at poll points: the gradients-ready instants of layers
      that have tensors, and the end of each layer's work. A poll with something under way costs poll_s of compute, a
      start costs loss of compute. While a message or another class is waited for, stages follow one another at once.

    Raises ``RuntimeError`` where classes wait for each other.
    """
    kind, classes, count = operations.kind, len(prices.fixed) - 4, len(operations.kind)
    times = np.zeros((3, count))
    done = np.zeros(2 * count + 2, np.bool_)
    rows, first, position = _by_lane(operations, classes)
    awaits, costs = awaited(operations, position, done), costs_of(operations, prices, position, mode)
    heads = np.zeros((classes, 3))
    if mode != POLL:
        heads[:, 1] = -1.0
    come, meetings = _meetings(operations.meeting, classes)
    state = Classes(first[::2].copy(), np.zeros((classes, 2)), come, meetings, np.zeros((classes, classes)))
    walking = classes
    while walking:
        moved = False
        for own in range(classes):
            begin, stop = state.place[own], first[2 * own + 1]
            if begin > stop:
                continue
            queue_rows = rows[stop : first[2 * own + 2]]
            queue = Queue(queue_rows, awaits, costs, done, heads[own], times, prices.fixed[2])
            _compute(own, rows[:stop], operations, prices, position, queue, state, mode)
            if state.place[own] == stop:
                state.clock[own, 0] = drain(state.clock[own, 0], len(queue_rows) - 1, queue, mode)
                state.place[own] += 1
                walking -= 1
            moved |= state.place[own] > begin
        if not moved:
            raise RuntimeError("a schedule in which rank classes wait for each other")
    blocking = mode in (OFF, INLINE)
    if classes == 1:
        sums = step_sums(kind, operations.lane, times[0], times[1], blocking)
    else:
        sums = np.full(EXPOSED_S + 1, np.inf)
        for own in range(classes):
            of_class = np.nonzero(operations.rank_class == own)[0]
            start_s, end_s = times[0][of_class], times[1][of_class]
            each = step_sums(kind[of_class], operations.lane[of_class], start_s, end_s, blocking)
            if each[EXPOSED_S] < sums[EXPOSED_S]:
                sums = each
    return times, sums, state.clock[:, 0].max()


@jit
def _meetings(meeting, classes):  # type: ignore[no-untyped-def]
    """``come`` and ``meetings`` of ``Classes`` before anybody has come."""
    if classes == 1:
        return np.zeros(0, np.bool_), np.zeros((2, 0))
    meetings = np.zeros((2, meeting.max() + 1))
    for i in range(len(meeting)):
        if meeting[i] >= 0:
            meetings[0, meeting[i]] += 1
    return np.zeros(len(meeting), np.bool_), meetings


@jit
def _by_lane(operations, classes):  # type: ignore[no-untyped-def]
    """Operations by class, its compute lane before its queue; where each of these begins; places in queues, or -1."""
    kind, rank_class, count = operations.kind, operations.rank_class, len(operations.kind)
    first, lanes = np.zeros(2 * classes + 1, np.int64), np.empty(count, np.int64)
    for i in range(count):
        sums = kind[i] == ALLREDUCE_EVENT or kind[i] == REDUCE_SCATTER_EVENT
        queued = sums or kind[i] == ALL_GATHER_EVENT or kind[i] == BROADCAST_EVENT
        lanes[i] = 2 * rank_class[i] + queued
        first[lanes[i] + 1] += 1
    for lane in range(2 * classes):
        first[lane + 1] += first[lane]
    rows, position, free = np.empty(count, np.int64), np.empty(count, np.int64), first.copy()
    for i in range(count):
        lane = lanes[i]
        rows[free[lane]] = i
        position[i] = free[lane] - first[lane] if lane % 2 else -1
        free[lane] += 1
    return rows, first, position


@jit
def _compute(own, rows, operations, prices, position, queue, state, mode):  # type: ignore[no-untyped-def]
    """What a class computes, with its communication beside it, until it waits for another class or has done all.

    A layer's operation is three parts: the wait for its launch, the work until its gradients are ready (all of a
    forward), and the rest of a backward.
    """
    kind, layers, count = operations.kind, prices.layers, len(operations.kind)
    depends_start, depends_on, layer_of = operations.depends_start, operations.depends_on, operations.layer
    done, times, head, announces = queue.done, queue.times, queue.head, prices.announces
    waiting, awaits, poll_s, flows = queue.rows, queue.awaits, prices.fixed[1], mode == THREAD
    now, host = state.clock[own]
    place = state.place[own]
    while place < len(rows):
        i = rows[place]
        needed = -1
        if head[0] < len(waiting) and waiting[int(head[0])] < i:  # what an operation depends on stands before it
            for d in range(depends_start[i], depends_start[i + 1]):
                needed = max(needed, position[depends_on[d]])
        if needed >= head[0]:
            now = drain(now, needed, queue, mode)
            host = max(host, now)
            if mode == POLL:
                now = poll(now, queue, poll_s)
        if kind[i] == FORWARD_EVENT or kind[i] == BACKWARD_EVENT or kind[i] == RECOMPUTE_EVENT:
            layer, backward = layer_of[i], kind[i] == BACKWARD_EVENT
            host += layers[4, layer] if backward else layers[3, layer]
            if host > now:
                if flows and may_start(head, waiting, awaits, done):
                    flow(now, host - now, False, queue)
                now = host
            times[0, i] = now
            work = layers[2, layer] if backward else layers[0, layer]
            if flows and may_start(head, waiting, awaits, done):
                now = flow(now, work, True, queue)
            else:
                now += work
            if backward:
                times[2, i] = now
                done[i] = True
                if mode == INLINE:
                    now, host = run_ready(now, host, queue)
                elif mode == POLL and announces[layer]:
                    now = poll(now, queue, poll_s)
                work = layers[1, layer] - layers[2, layer]
                if flows and may_start(head, waiting, awaits, done):
                    now = flow(now, work, True, queue)
                else:
                    now += work
            if mode == POLL:
                now = poll(now, queue, poll_s)
        elif kind[i] == SYNCHRONISE_EVENT or kind[i] == RECEIVE_EVENT:
            now = host = max(now, host)
            begin, cost = _awaited_s(i, now, operations, prices, times, done, state)
            if begin == np.inf:
                break
            times[0, i] = now
            now = wait(now, begin, queue, mode)
            if flows:
                flow(now, cost, False, queue)
            now = host = now + cost
        else:
            times[0, i] = now
            if kind[i] == OVERHEAD_EVENT or kind[i] == UPDATE_EVENT or kind[i] == LOSS_EVENT:
                of_class = prices.fixed[4 + own] if kind[i] == UPDATE_EVENT else prices.fixed[3]
                work = prices.fixed[0] if kind[i] == OVERHEAD_EVENT else of_class
                now = flow(now, work, True, queue) if flows and work > 0 else now + work
                if kind[i] != LOSS_EVENT:  # the host launches backward meanwhile
                    host = max(host, now)
            elif kind[i] == SEND_EVENT:
                to = operations.rank_class[operations.peer[i]]
                times[2, i] = state.links[own, to] = max(now, state.links[own, to]) + prices.messages[i]
        times[1, i] = now
        done[i] = done[count + i] = True
        place += 1
        if mode == INLINE:
            now, host = run_ready(now, host, queue)
    state.place[own], state.clock[own, 0], state.clock[own, 1] = place, now, host


@jit
def _awaited_s(i, now, operations, prices, times, done, state):  # type: ignore[no-untyped-def]
    """When what a receive or a synchronisation waits for is there (infinity: not known yet), and its cost then."""
    if operations.kind[i] == RECEIVE_EVENT:
        send = operations.peer[i]
        if not done[send]:
            return np.inf, 0.0
        if prices.copied[send]:
            return times[0, send], prices.messages[send]
        return times[2, send], 0.0
    size = operations.size_bytes[i]
    meeting = operations.meeting[i]
    if meeting < 0:
        return now, at(prices.sums, 1, size)
    if not state.come[i]:  # for the first time: it comes here again until all have come
        state.meetings[0, meeting] -= 1
        state.meetings[1, meeting] = max(now, state.meetings[1, meeting])
        state.come[i] = True
    if state.meetings[0, meeting] > 0:
        return np.inf, 0.0
    return state.meetings[1, meeting], at(prices.joining if operations.layer[i] >= 0 else prices.agreement, 1, size)
