"""Horovod's rule in the model: the policy the runtime calls, called here at each cycle on the tensors ready by then."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dpsim.lowering.fusion import HorovodCycle
from dpsim.predict.simulate import OFF, Operations, Prices, operations_of, simulate
from dpsim.schedule import BACKWARD, COLLECTIVE, COMMUNICATION_LANE, Schedule, event_kinds
from dpsim.workload import ReadyOrder

N = TypeVar("N", bound=np.generic)
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
    backward = np.flatnonzero(schedule.phase == BACKWARD)[-len(schedule.workload.layers) :][::-1]

    groups: list[Group] = []
    for _ in range(_MOST_ROUNDS):
        result, operations = _with_groups(schedule, groups, backward)
        times, _, _ = simulate(operations, prices, mode)
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
    late = int(schedule.kind[-2] == COLLECTIVE and schedule.layer[-2] < 0)  # batch norm's sum after all buckets
    compute, buckets = len(schedule.kind) - 1 - late, len(groups)
    sizes = np.array([int(order.size_bytes[list(tensors)].sum()) for tensors, _, _ in groups], np.int64)
    held = np.zeros(compute + buckets + late + 1, np.bool_)
    held[compute : compute + buckets] = [waits for _, _, waits in groups]

    def insert(column: NDArray[N], values: object) -> NDArray[N]:
        middle = np.broadcast_to(np.asarray(values, column.dtype), (buckets,))
        return np.concatenate([column[:compute], middle, column[compute:]])

    decided = [[int(backward[layer])] for _, layer, _ in groups]
    sent = [*range(compute, compute + buckets)] or [compute - 1]
    after = [*decided, *([sent] if late else []), [*sent, compute + buckets] if late else sent]
    start = np.concatenate(
        [schedule.depends_start[: compute + 1], schedule.depends_start[compute] + np.cumsum([len(d) for d in after])]
    )
    kept = schedule.depends_on[: schedule.depends_start[compute]]
    members = [i for tensors, _, _ in groups for i in tensors]
    starts = np.cumsum([0] + [len(tensors) for tensors, _, _ in groups])
    kind, phase = insert(schedule.kind, COLLECTIVE), insert(schedule.phase, -1)
    bucket = insert(schedule.bucket, np.arange(buckets))
    result = dataclasses.replace(
        schedule,
        kind=kind,
        phase=phase,
        event_kind=event_kinds(kind, phase, bucket),
        lane=insert(schedule.lane, COMMUNICATION_LANE),
        layer=insert(schedule.layer, -1),
        bucket=bucket,
        micro_batch=insert(schedule.micro_batch, schedule.plan.accumulate - 1),
        size_bytes=insert(schedule.size_bytes, sizes),
        rank_class=insert(schedule.rank_class, 0),
        group=insert(schedule.group, 0),
        depends_start=start.astype(np.int32),
        depends_on=np.concatenate([kept, list(itertools.chain(*after))]).astype(np.int32),
        tensor_order=order.tensor[members],
        bucket_start=starts.astype(np.int64),
        bucket_size_bytes=sizes,
    )
    return result, operations_of(result, held)
