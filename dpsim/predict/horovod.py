"""Horovod's rule in the model: the policy the runtime calls, called here at each cycle on the tensors ready by then."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from dpsim.fusion import HorovodCycle
from dpsim.predict.simulate import OFF, Operations, Prices, simulate
from dpsim.schedule import ALLREDUCE, BACKWARD, COMMUNICATION, Schedule

Floats = NDArray[np.float64]
_MOST_ROUNDS = 8
Groups = list[tuple[tuple[int, ...], float]]


def joined(schedule: Schedule, prices: Prices, mode: int) -> tuple[Schedule, Operations]:
    """A dynamic schedule with its buckets decided, and its operations with the instants at which they are released.

    Cycles end at r + cycle_s, r + 2 cycle_s, ..., r the step's first ready gradient, and at the end of the last
    backward, where what is left is handed over at once. Each packs the tensors that became ready in it
    (``HorovodCycle``). Without overlap everything is packed at once after backward.

    Ready instants depend on the communication beside them and the buckets on the ready instants, so the two are
    computed in turn until the buckets stay the same, at most 8 times.
    """
    plan = schedule.plan
    order = schedule.workload.ready_order
    policy = HorovodCycle(threshold_bytes=plan.threshold_bytes, cycle_s=plan.cycle_s)
    last = len(schedule.kind) - 1 - np.argmax(schedule.kind[::-1] == BACKWARD)
    layers = len(schedule.workload.layers)
    ready_operation = last - order.layer
    first_backward = last - layers + 1

    groups: Groups = []
    for _ in range(_MOST_ROUNDS):
        result, operations = _with_groups(schedule, groups, ready_operation)
        times, _ = simulate(operations, prices, mode)
        ready = np.maximum.accumulate(times[2, ready_operation]) if len(ready_operation) else np.zeros(0)
        end_s = float(times[1, first_backward : last + 1].max())
        ticks = np.full(len(ready), end_s) if mode == OFF else _ticks(ready, plan.cycle_s, end_s)
        decided = _pack(policy, ticks, order.size_bytes, order.dtype_code)
        if [tensors for tensors, _ in decided] == [tensors for tensors, _ in groups]:
            break
        groups = decided
    return result, operations


def _ticks(ready: Floats, cycle_s: float, end_s: float) -> Floats:
    """The cycle end at which each tensor is packed: the first one not before it is ready, at the latest ``end_s``."""
    if len(ready) == 0:
        return ready
    count = np.maximum(np.ceil((ready - ready[0]) / cycle_s), 1.0)
    ticks: Floats = np.minimum(ready[0] + count * cycle_s, end_s)
    return np.maximum(ticks, ready)


def _pack(policy: HorovodCycle, ticks: Floats, sizes: NDArray[np.int64], codes: NDArray[np.int64]) -> Groups:
    groups: Groups = []
    begin = 0
    while begin < len(ticks):
        end = begin + 1
        while end < len(ticks) and math.isclose(ticks[end], ticks[begin], rel_tol=1e-12):
            end += 1
        for bucket in policy.pack(sizes[begin:end].tolist(), codes[begin:end].tolist()):
            groups.append((tuple(begin + i for i in bucket), float(ticks[begin])))
        begin = end
    return groups


def _with_groups(
    schedule: Schedule, groups: Groups, ready_operation: NDArray[np.int64]
) -> tuple[Schedule, Operations]:
    """The schedule with one allreduce a group (no group: no communication), before the update."""
    order = schedule.workload.ready_order
    compute, buckets = len(schedule.kind) - 1, len(groups)
    sizes = np.array([int(order.size_bytes[list(tensors)].sum()) for tensors, _ in groups], np.int64)
    after = np.array([ready_operation[max(tensors)] for tensors, _ in groups], np.int32)
    release = np.array([0.0] * compute + [tick for _, tick in groups] + [0.0])

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
    members = [i for tensors, _ in groups for i in tensors]
    starts = np.cumsum([0] + [len(tensors) for tensors, _ in groups])
    result = dataclasses.replace(
        schedule,
        tensor_order=order.tensor[members],
        bucket_start=starts.astype(np.int64),
        bucket_size_bytes=sizes,
        **columns,  # type: ignore[arg-type]
    )
    return result, Operations(result.kind, result.layer, result.after, result.size_bytes, release)
