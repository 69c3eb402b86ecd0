"""Schedules of several rank classes: closed forms, and a slow reference that relaxes dependencies one by one."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsim.collective import CollectiveKind
from dpsim.lowering.builder import Builder
from dpsim.machine import AllreduceCost, Link, Machine
from dpsim.model import memory
from dpsim.model.queue import MODES
from dpsim.model.simulate import Operations, Prices, simulate
from dpsim.model.step import PricedStep, price, scheduled
from dpsim.plan import Plan
from dpsim.schedule import (
    ALL_GATHER_EVENT,
    ALLREDUCE_EVENT,
    BACKWARD_EVENT,
    FORWARD_EVENT,
    RECEIVE_EVENT,
    SEND_EVENT,
    SYNCHRONISE_EVENT,
    UPDATE_EVENT,
)
from dpsim.timeline import EXPOSED_S
from dpsim.workload import Layer, Tensor, Workload

FREE = Link(latency_s=0.0, bandwidth_bytes_per_s=1e30)
OVERLAPS = tuple(MODES)


def workload(layers: int = 4, **changes: Any) -> Workload:
    """Each layer computes 1 s forward and 2 s backward for a sample, has 400 bytes, and hands on 8 bytes a sample."""
    each = [
        Layer(
            name=f"layer{i}",
            forward_s=(1.0,),
            backward_s=(2.0,),
            tensors=(Tensor(name=f"t{i}", shape=(100,)),),
            activation_bytes_per_sample=16.0,
            output_bytes_per_sample=8.0,
        )
        for i in range(layers)
    ]
    return Workload(name="w", local_batches=(1,), layers=tuple(each), **changes)


def priced(strategy: str, devices: int, *, link: Link = FREE, layers: int = 4, **changes: Any) -> PricedStep:
    fields: dict[str, Any] = {"algorithm": "ring", "fusion_threshold_bytes": 0.0, "global_batch": devices}
    plan = Plan(devices=devices, strategy=strategy, **fields | changes)
    known = Machine(name="m", link=link)
    return price(scheduled(workload(layers), known, plan), known)


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (2, 4), (4, 2), (4, 8)])
def test_equal_stages_on_a_free_network(stages: int, micro_batches: int, order: str, overlap: str) -> None:
    fields: dict[str, Any] = {"accumulate": micro_batches, "global_batch": micro_batches, "overlap": overlap}
    step = priced(f"pipeline:stages={stages},order={order}", stages, layers=4, **fields)
    of_stage = 3 * 4 // stages
    assert step.step_s == pytest.approx((micro_batches + stages - 1) * of_stage)
    bubble = (stages - 1) / (micro_batches + stages - 1)
    assert step.prediction.exposed_communication_s / step.step_s == pytest.approx(bubble)
    events = step.timeline()
    assert sorted({*events.rank.tolist()}) == list(range(stages))
    assert events.end_s.max() == pytest.approx(step.step_s)


def test_gpipe_with_a_link_adds_two_messages_at_each_border() -> None:
    link = Link(latency_s=0.25, bandwidth_bytes_per_s=32.0)  # 8 bytes take 0.5 s
    fields: dict[str, Any] = {"accumulate": 3, "global_batch": 3, "link": link}
    step = priced("pipeline:stages=4,order=gpipe", 4, **fields)
    alone = priced("pipeline:stages=4,order=gpipe", 4, accumulate=3, global_batch=3)
    agreement_s = step.step_s - alone.step_s - 2 * 3 * 0.5
    schedule = step.schedule
    together = np.flatnonzero(schedule.meeting >= 0)
    assert agreement_s > 0 and len(together) == 4
    assert np.ptp(step.times[1, together]) == 0
    cost_s = step.times[1, together[0]] - step.times[0, together].max()
    assert agreement_s == pytest.approx(cost_s)


def test_a_link_carries_one_message_after_another_in_each_direction() -> None:
    rows = [
        *((0, SEND_EVENT, 0), (0, SEND_EVENT, 0), (0, SEND_EVENT, 0)),
        *((1, SEND_EVENT, 0), (1, RECEIVE_EVENT, 0), (1, RECEIVE_EVENT, 1), (1, RECEIVE_EVENT, 2)),
        (0, RECEIVE_EVENT, 3),
    ]
    times, _, step_s = run(rows, np.full(len(rows), 2.0), copied=False)
    assert times[1, 4:].tolist() == [2.0, 4.0, 6.0, 2.0] and step_s == 6


def test_a_receiver_that_copies_takes_the_time_itself() -> None:
    rows = [(0, SEND_EVENT, 0), (1, FORWARD_EVENT, 0), (1, RECEIVE_EVENT, 0)]
    assert run(rows, np.full(3, 2.0), copied=False)[2] == 5  # the message is there before the forward ends
    assert run(rows, np.full(3, 2.0), copied=True)[2] == 5 + 2


def test_classes_that_wait_for_each_other_are_refused() -> None:
    rows = [(0, RECEIVE_EVENT, 2), (1, RECEIVE_EVENT, 3), (1, SEND_EVENT, 0), (0, SEND_EVENT, 1)]
    with pytest.raises(RuntimeError, match="wait for each other"):
        run(rows, np.zeros(4))


def slow(bandwidth: float) -> Machine:
    sizes = (4, 400, 40000)
    fields: dict[str, Any] = {"algorithm": "ring", "devices": 2, "sizes_bytes": sizes}
    fields["time_s"] = tuple(size / bandwidth for size in sizes)
    tables = [AllreduceCost(kind=kind, **fields) for kind in get_args(CollectiveKind)[1:3]]
    return Machine(name="m", halves=tuple(tables), link=FREE)


def of_zero3(prefetch: int, gather_s: float, overlap: str = "thread") -> PricedStep:
    machine = slow(400 / gather_s)
    fields: dict[str, Any] = {"algorithm": "ring", "fusion_threshold_bytes": 0.0, "overlap": overlap}
    plan = Plan(devices=2, global_batch=2, strategy=f"zero3:prefetch={prefetch}", **fields)
    return price(scheduled(workload(4), machine, plan), machine)


def test_zero3_without_overlap_is_the_sum_and_with_it_the_longest_chain() -> None:
    gather_s = 4.0
    off = of_zero3(1, gather_s, "off")
    gathers = len(off.schedule.parameter_collectives)
    agreement = off.times[1] - off.times[0]
    agreement_s = agreement[off.schedule.kind == SYNCHRONISE_EVENT].sum()
    assert gathers == 4 + 2  # the two units of the turn are still there
    assert off.step_s == pytest.approx(12 + (gathers + 4) * gather_s + agreement_s)
    # A link that is slower than all computation: one collective after another from the first to the last.
    step = of_zero3(1, gather_s)
    assert step.step_s < off.step_s
    assert step.step_s >= (gathers + 4) * gather_s
    busy = step.times[1] - step.times[0]
    assert busy[step.schedule.kind == ALL_GATHER_EVENT].sum() == pytest.approx(gathers * gather_s)
    # Without prefetching every gather stands before its computation.
    assert of_zero3(0, gather_s).step_s > step.step_s


def test_zero3_copies_a_shard_for_every_collective() -> None:
    machine = slow(100.0)
    copy = AllreduceCost(kind="copy", algorithm="ring", devices=2, sizes_bytes=(200, 400), time_s=(0.5, 1.0))
    copying = msgspec.structs.replace(machine, halves=(*machine.halves, copy))
    fields: dict[str, Any] = {"algorithm": "ring", "fusion_threshold_bytes": 0.0, "overlap": "off"}
    for strategy, copies in (("zero1", 0), ("zero3", 6 + 4), ("zero3:reshard=no", 4)):
        plan = Plan(devices=2, global_batch=2, strategy=strategy, **fields)
        longer_s, without_s = (price(scheduled(workload(), of, plan), of).step_s for of in (copying, machine))
        assert longer_s - without_s == pytest.approx(copies * 0.5)  # half of a bucket of 400 bytes


def test_every_micro_batch_has_a_loss_and_layers_that_take_longer() -> None:
    machine, plan = slow(1e9), Plan(devices=1, global_batch=4, accumulate=4, fusion_rule="one")
    plain = price(scheduled(workload(), machine, plan), machine)
    lossy = workload(loss_s=(2.0,))
    assert price(scheduled(lossy, machine, plan), machine).step_s == pytest.approx(plain.step_s + 4 * 2)
    slower = workload(accumulation_factor=1.5)
    assert price(scheduled(slower, machine, plan), machine).step_s == pytest.approx(1.5 * plain.step_s)
    alone = msgspec.structs.replace(plan, accumulate=1, global_batch=1)
    steps = [price(scheduled(each, machine, alone), machine).step_s for each in (slower, workload())]
    assert steps[0] == steps[1]


def test_memory_is_that_of_the_class_that_needs_most() -> None:
    machine = Machine(name="m", link=FREE)
    fields: dict[str, Any] = {"algorithm": "ring", "fusion_threshold_bytes": 0.0}
    whole = memory(workload(), Plan(devices=2, global_batch=2, **fields), machine)
    assert (whole.parameters, whole.gradients, whole.optimizer_state, whole.activations) == (1600, 1600, 1600, 64)
    # a shard of 400 bytes on two devices has up to 256: shards begin at multiples of 64 bytes
    zero3 = memory(workload(), Plan(devices=2, global_batch=2, strategy="zero3", **fields), machine)
    assert (zero3.parameters, zero3.gradients, zero3.optimizer_state) == (4 * 256 + 800, 4 * 256 + 800, 4 * 256)
    zero2 = memory(workload(), Plan(devices=2, global_batch=2, strategy="zero2:buckets=1", **fields), machine)
    assert (zero2.parameters, zero2.gradients, zero2.optimizer_state) == (1600, 4 * 256 + 400, 4 * 256)
    stages = {"devices": 2, "global_batch": 4, "accumulate": 4}
    # One micro-batch takes 32 bytes, and 8 are received for it: of 1f1b the first stage needs most, of gpipe the last.
    for order, activations in (("1f1b", 2 * 32 + 8), ("gpipe", 4 * (32 + 8))):
        plan = Plan(strategy=f"pipeline:order={order}", **stages, **fields)
        staged = memory(workload(), plan, machine)
        assert (staged.parameters, staged.optimizer_state, staged.activations) == (800, 800, activations)
        assert staged.communication_buffers == 0
    again = memory(
        workload(), Plan(strategy="pipeline:stages=4,recompute=yes", **stages | {"devices": 4}, **fields), machine
    )
    # Stage 1 keeps inputs and outputs of three micro-batches, receives as many inputs and a gradient, and works on one.
    assert again.activations == 3 * (8 + 8) + 3 * 8 + 8 + 16


def run(rows: list[tuple[int, int, int]], messages_s: Any, *, copied: bool = False, mode: str = "off") -> Any:
    """Simulate rows of (class, kind, peer, or layer of a computation); a forward takes 5 s."""
    builder = Builder()
    for own, kind, _ in rows:
        builder.add(kind, layer=0 if kind == FORWARD_EVENT else -1, rank_class=own)
    columns = builder.columns()
    peers = np.array([peer if kind == RECEIVE_EVENT else -1 for _, kind, peer in rows], np.int32)
    for receive in np.flatnonzero(peers >= 0):
        peers[peers[receive]] = receive
    return simulated(
        columns, peers, np.array([[5.0], [0.0], [0.0], [0.0], [0.0]]), messages_s, copied=copied, mode=mode
    )


def simulated(columns: Any, peers: Any, layers: Any, messages_s: Any, *, copied: bool, mode: str) -> Any:
    """Simulate with curves of 1 s for every byte of a collective, alone or beside computation, which loses nothing."""
    count = len(columns.kind)
    lane = np.isin(columns.kind, (ALLREDUCE_EVENT, ALL_GATHER_EVENT, SYNCHRONISE_EVENT, RECEIVE_EVENT))
    operations = Operations(
        columns.kind,
        lane.astype(np.int8),
        columns.layer,
        columns.size_bytes,
        columns.depends_start,
        columns.depends_on,
        columns.rank_class,
        peers,
        columns.meeting,
        np.zeros(count, np.bool_),
    )
    idle, overlapped = np.array([[0.0, 1.0], [0.0, 1.0]]), np.array([[0.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    fixed = np.array([0.0, 0.0, 1.0, 0.0] + [1.0] * (int(columns.rank_class.max()) + 1))
    curves = (idle, overlapped, idle, overlapped, idle, overlapped, idle, idle, idle)
    announces = np.ones(layers.shape[1], np.bool_)
    prices = Prices(layers, announces, fixed, *curves, np.asarray(messages_s, float), np.full(count, copied))
    return simulate(operations, prices, MODES[mode])


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Any, Any, Any]:
    """Columns, peers and layer times of a random schedule of up to three classes that does not wait for itself."""
    classes, builder, peers = draw(st.integers(1, 3)), Builder(), {}
    open_sends: dict[int, list[int]] = {own: [] for own in range(classes)}
    computed: dict[int, list[int]] = {own: [] for own in range(classes)}
    queued: dict[int, list[int]] = {own: [] for own in range(classes)}
    layers = np.array([[draw(st.integers(1, 9)) for _ in range(3)] for _ in range(5)], float)
    layers[1] = layers[2] + draw(st.integers(0, 5))
    layers[3:] = 0

    def some(numbers: list[int]) -> list[int]:
        return sorted(draw(st.sets(st.sampled_from(numbers), max_size=2))) if numbers else []

    for _ in range(draw(st.integers(1, 40))):
        own, what = draw(st.integers(0, classes - 1)), draw(st.integers(0, 9))
        needs = some(computed[own]) + (some(queued[own]) if draw(st.integers(0, 3)) == 0 else [])
        if what < 5:
            kind = (FORWARD_EVENT, BACKWARD_EVENT)[what % 2]
            computed[own].append(builder.add(kind, needs, layer=draw(st.integers(0, 2)), rank_class=own))
        elif what < 7:
            kind, size = draw(st.sampled_from([ALLREDUCE_EVENT, ALL_GATHER_EVENT])), draw(st.integers(1, 9))
            after = some(computed[own])
            queued[own].append(builder.add(kind, after, bucket=0, size_bytes=size, rank_class=own))
        elif what == 7 and classes > 1:
            other = draw(st.sampled_from([each for each in range(classes) if each != own]))
            open_sends[other].append(builder.add(SEND_EVENT, needs, size_bytes=1, rank_class=own))
        elif what == 8 and open_sends[own]:
            send = open_sends[own].pop(0)
            peers[receive := builder.add(RECEIVE_EVENT, [send], size_bytes=1, rank_class=own)] = send
            computed[own].append(receive)
        elif what == 9:
            meeting = builder.meeting(len(builder)) if classes > 1 else -1
            for each in sorted(draw(st.sets(st.integers(0, classes - 1), min_size=1))):
                builder.add(SYNCHRONISE_EVENT, some(computed[each]), size_bytes=3, rank_class=each, meeting=meeting)
    for own in range(classes):
        for send in open_sends[own]:
            peers[builder.add(RECEIVE_EVENT, [send], size_bytes=1, rank_class=own)] = send
        builder.add(UPDATE_EVENT, queued[own], rank_class=own)
    array = np.full(len(builder), -1, np.int32)
    for receive, send in peers.items():
        array[receive], array[send] = send, receive
    return builder.columns(), array, layers


def reference(columns: Any, peers: Any, layers: Any, messages_s: Any, overlap: str) -> Any:
    """(start, end, ready) of each operation by repeated passes: each time all operations that can be placed are."""
    count, kinds = len(columns.kind), columns.kind.tolist()
    end: dict[int, float] = {}
    ready: dict[int, float] = {}
    free: dict[tuple[str, int, int], float] = {}
    lanes: dict[tuple[bool, int], list[int]] = {}
    for i in range(count):
        collective = kinds[i] in (ALLREDUCE_EVENT, ALL_GATHER_EVENT)
        lanes.setdefault((collective, int(columns.rank_class[i])), []).append(i)
    meeting = columns.meeting
    rounds = {i: np.flatnonzero(meeting == meeting[i]).tolist() for i in np.flatnonzero(meeting >= 0).tolist()}
    came: dict[int, float] = {}

    def depends(i: int) -> list[int]:
        return columns.depends_on[columns.depends_start[i] : columns.depends_start[i + 1]].tolist()

    def needed_at(queue: list[int], place: int, own: int) -> float | None:
        """Without overlap: when something begins to wait for a place of the queue; ``None`` while that is not known."""
        for i in lanes[False, own]:
            if any(each in queue[place:] for each in depends(i)):
                before = lanes[False, own][: lanes[False, own].index(i)]
                return 0.0 if not before else end.get(before[-1])
        steps = lanes[False, own]
        return end.get(steps[-1])

    while len(end) < count:
        placed = len(end)
        for (collective, own), rows in lanes.items():
            for place, i in enumerate(rows):
                if i in end:
                    continue
                if place and rows[place - 1] not in end:
                    break
                now = end[rows[place - 1]] if place else 0.0
                waits = [each for each in depends(i) if each != peers[i]]
                if collective:
                    gathers = kinds[i] == ALL_GATHER_EVENT
                    if any(each not in end for each in waits):
                        break
                    now = max([now, *(end[each] if gathers else ready[each] for each in waits)])
                    if overlap == "off":
                        asked = needed_at(rows, place, own)
                        if asked is None:
                            break
                        now = max(now, asked)
                    end[i] = ready[i] = now + float(columns.size_bytes[i])
                    continue
                if any(each not in end for each in waits):
                    break
                now = max([now, *(end[each] for each in waits)])
                layer = columns.layer[i]
                if kinds[i] == RECEIVE_EVENT:
                    if peers[i] not in end:
                        break
                    now = max(now, ready[peers[i]])
                    end[i] = ready[i] = now
                elif kinds[i] == SEND_EVENT:
                    link = ("link", own, int(columns.rank_class[peers[i]]))
                    free[link] = ready[i] = max(now, free.get(link, 0.0)) + messages_s[i]
                    end[i] = now
                elif meeting[i] >= 0:
                    came[i] = now
                    if any(each not in came for each in rounds[i]):
                        break
                    end[i] = ready[i] = max(came[each] for each in rounds[i]) + float(columns.size_bytes[i])
                elif kinds[i] == SYNCHRONISE_EVENT:
                    end[i] = ready[i] = now + float(columns.size_bytes[i])
                elif kinds[i] == UPDATE_EVENT:
                    end[i] = ready[i] = now + 1.0
                else:
                    backward = kinds[i] == BACKWARD_EVENT
                    ready[i] = now + layers[2 if backward else 0, layer]
                    end[i] = now + layers[1 if backward else 0, layer]
                    ready[i] = ready[i] if backward else end[i]
        assert len(end) > placed, "the reference does not come to an end"
    return np.array([end[i] for i in range(count)])


@settings(max_examples=120, deadline=None)
@given(schedules(), st.sampled_from(["off", "thread"]), st.integers(0, 4))
def test_random_schedules_agree_with_the_reference(schedule: Any, overlap: str, message_s: int) -> None:
    columns, peers, layers = schedule
    messages_s = np.where(columns.kind == SEND_EVENT, float(message_s), 0.0)
    times, sums, step_s = simulated(columns, peers, layers, messages_s, copied=False, mode=overlap)
    end = reference(columns, peers, layers, messages_s, overlap)
    assert times[1] == pytest.approx(end)
    assert step_s == pytest.approx(end.max())
    assert np.all(times[1] >= times[0]) and sums[EXPOSED_S] <= step_s + 1e-9
