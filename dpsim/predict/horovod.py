"""Horovod's rule in the model: the policy the runtime calls, called here at each cycle on the tensors ready by then."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from dpsim.lowering.fusion import HorovodCycle
from dpsim.predict.simulate import OFF, Operations, Prices, simulate
from dpsim.schedule import ALLREDUCE, BACKWARD, COMMUNICATION, Schedule
from dpsim.workload import ReadyOrder

Floats = NDArray[np.float64]
_MOST_ROUNDS = 8
Group = tuple[tuple[int, ...], int, bool]
"""Tensors (ready positions), the layer whose gradients-ready instant decided it, held until backward ends or not."""


def joined(schedule: Schedule, prices: Prices, mode: int) -> tuple[Schedule, Operations]:
    """A dynamic schedule with its buckets decided, and its operations for the kernel.

    As in the runtime, decisions fall at gradients-ready instants t: when t >= tick, the tensors ready by then and not
    yet packed are packed (``HorovodCycle``), and tick = max(tick + cycle_s, t); tick is cycle_s after the step's
    beginning at first. What is left at the end of the last backward is packed then; without overlap that is all.

    Ready instants depend on the communication beside them and the buckets on the ready instants, so the two are
    computed in turn until the buckets stay the same, at most 8 times.
    """
    plan = schedule.plan
    order = schedule.workload.ready_order
    policy = HorovodCycle(threshold_bytes=plan.threshold_bytes, cycle_s=plan.cycle_s)
    backward = np.flatnonzero(schedule.kind == BACKWARD)[-len(schedule.workload.layers) :][::-1]

    groups: list[Group] = []
    for _ in range(_MOST_ROUNDS):
        result, operations = _with_groups(schedule, groups, backward)
        times, _ = simulate(operations, prices, mode)
        ready = times[2, backward[order.layer]]
        decided = _decide(policy, np.full_like(ready, -1.0) if mode == OFF else ready, order)
        if decided == groups:
            break
        groups = decided
    return result, operations


def _decide(policy: HorovodCycle, ready: Floats, order: ReadyOrder) -> list[Group]:
    groups: list[Group] = []
    waiting: list[int] = []

    def pack(layer: int, held: bool) -> None:
        for bucket in policy.pack(order.size_bytes[waiting].tolist(), order.dtype_code[waiting].tolist()):
            groups.append((tuple(waiting[i] for i in bucket), layer, held))
        waiting.clear()

    tick = policy.cycle_s
    for position, layer in enumerate(order.layer.tolist()):
        waiting.append(position)
        now = float(ready[position])
        end_of_layer = position + 1 == len(order.layer) or order.layer[position + 1] != layer
        if end_of_layer and now >= tick:
            pack(layer, held=False)
            tick = max(tick + policy.cycle_s, now)
    if waiting:
        pack(0, held=True)
    return groups


def _with_groups(schedule: Schedule, groups: list[Group], backward: NDArray[np.int64]) -> tuple[Schedule, Operations]:
    """The schedule with one allreduce a group (no group: no communication), before the update.

    ``backward``: each layer's backward operation in the last micro-batch.
    """
    order = schedule.workload.ready_order
    compute, buckets = len(schedule.kind) - 1, len(groups)
    sizes = np.array([int(order.size_bytes[list(tensors)].sum()) for tensors, _, _ in groups], np.int64)
    after = np.array([backward[layer] for _, layer, _ in groups], np.int32)
    held = np.array([False] * compute + [late for _, _, late in groups] + [False])

    def insert(column: NDArray[np.generic], values: object) -> NDArray[np.generic]:
        middle = np.broadcast_to(np.asarray(values, column.dtype), (buckets,))
        return np.concatenate([column[:compute], middle, column[compute:]])

    columns = {
        "kind": insert(schedule.kind, ALLREDUCE),
        "lane": insert(schedule.lane, COMMUNICATION),
        "layer": insert(schedule.layer, -1),
        "bucket": insert(schedule.bucket, np.arange(buckets)),
        "micro_batch": insert(schedule.micro_batch, schedule.plan.accumulate - 1),
        "size_bytes": insert(schedule.size_bytes, sizes),
        "after": insert(schedule.after, after),
    }
    if buckets:
        columns["after"][-1] = compute + buckets - 1
    members = [i for tensors, _, _ in groups for i in tensors]
    starts = np.cumsum([0] + [len(tensors) for tensors, _, _ in groups])
    result = dataclasses.replace(
        schedule,
        tensor_order=order.tensor[members],
        bucket_start=starts.astype(np.int64),
        bucket_size_bytes=sizes,
        **columns,  # type: ignore[arg-type]
    )
    return result, Operations(result.kind, result.layer, result.after, result.size_bytes, held)
