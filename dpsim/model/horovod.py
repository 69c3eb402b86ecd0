"""Horovod's rule in the model: the policy the runtime calls, called here at each cycle on the tensors ready by then."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpsim.lowering.data_parallel import with_buckets
from dpsim.lowering.horovod import HorovodCycle
from dpsim.model.queue import OFF
from dpsim.model.simulate import Operations, Prices, operations_of, simulate
from dpsim.schedule import ALLREDUCE_EVENT, BACKWARD_EVENT, Schedule
from dpsim.workload import ReadyOrder

Floats = NDArray[np.float64]
_MOST_ROUNDS = 8


class _Bucket(NamedTuple):
    """Tensors (ready positions), the layer at whose ready instant it was decided, held until backward ends or not."""

    tensors: tuple[int, ...]
    layer: int
    held: bool


def joined(schedule: Schedule, prices: Prices, mode: int) -> tuple[Schedule, Operations]:
    """A dynamic schedule with its buckets decided, and its operations for the kernel.

    As in the runtime, decisions fall at gradients-ready instants t: when t >= tick, the tensors ready by then and not
    yet packed are packed (``HorovodCycle``), and tick = max(tick + cycle_s, t); tick is cycle_s after the step's
    beginning at first. What is left at the end of the last backward is packed then; without overlap that is all.

    Ready instants depend on the communication beside them and the buckets on the ready instants, so the two are
    computed in turn until the buckets stay the same, at most 8 times.
    """
    plan, order = schedule.plan, schedule.workload.ready_order
    policy = HorovodCycle(threshold_bytes=plan.threshold_bytes, cycle_s=plan.cycle_s)
    backward = np.flatnonzero(schedule.kind == BACKWARD_EVENT)[-len(schedule.workload.layers) :][::-1]

    buckets: list[_Bucket] = []
    for _ in range(_MOST_ROUNDS):
        result, operations = _with_buckets(schedule, buckets, backward)
        times, _, _ = simulate(operations, prices, mode)
        ready = times[2, backward[order.layer]]
        decided = _decide(policy, np.full_like(ready, -1.0) if mode == OFF else ready, order)
        if decided == buckets:
            break
        buckets = decided
    return result, operations


def _decide(policy: HorovodCycle, ready: Floats, order: ReadyOrder) -> list[_Bucket]:
    buckets: list[_Bucket] = []
    waiting: list[int] = []

    def pack(layer: int, held: bool) -> None:
        for bucket in policy.pack(order.size_bytes[waiting].tolist(), order.dtype_code[waiting].tolist()):
            buckets.append(_Bucket(tuple(waiting[i] for i in bucket), layer, held))
        waiting.clear()

    tick = policy.cycle_s
    for position, layer in enumerate(order.layer.tolist()):
        waiting.append(position)
        now = float(ready[position])
        end_of_layer = position + 1 == len(order.layer) or order.layer[position + 1] != layer
        if end_of_layer and now >= tick:
            pack(layer, held=False)
            tick = policy.next_tick_s(tick, now)
    if waiting:
        pack(0, held=True)
    return buckets


def _with_buckets(
    schedule: Schedule, buckets: list[_Bucket], backward: NDArray[np.int64]
) -> tuple[Schedule, Operations]:
    """The schedule with these buckets decided; ``backward``: each layer's operation in the last micro-batch."""
    order = schedule.workload.ready_order
    members = order.tensor[list(itertools.chain(*(bucket.tensors for bucket in buckets)))]
    start = np.cumsum([0, *(len(bucket.tensors) for bucket in buckets)])
    sizes = np.array([int(order.size_bytes[list(bucket.tensors)].sum()) for bucket in buckets], np.int64)
    decided_by = backward[[bucket.layer for bucket in buckets]].astype(np.int32)
    result = with_buckets(schedule.workload, schedule.plan, members, start, sizes, decided_by)
    held = np.zeros(len(result.kind), np.bool_)
    held[result.kind == ALLREDUCE_EVENT] = [bucket.held for bucket in buckets]
    return result, operations_of(result, held)
