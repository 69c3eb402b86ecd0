"""ZeRO-1: data parallelism in which a rank updates, and keeps optimizer state for, its shard of the parameters alone.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), stage 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsim.kernels.exact_squares import digits
from dpsim.lowering import data_parallel
from dpsim.optimizer import Lars, Optimizer
from dpsim.plan import Plan
from dpsim.schedule import BROADCAST_EVENT, UPDATE_EVENT, Schedule
from dpsim.workload import Workload

FINITE_BYTES = 8
"""What a rank sends to each other one to agree that all numbers are finite: one float64."""


def agreement_bytes(workload: Workload, optimizer: Optimizer) -> int:
    """Return what a rank sends to each other one before the update, in float64.

    Whether its loss and its shards are finite, and for LARS its part of the norms of parameters and gradients of each
    tensor of two dimensions or more (``dpsim.kernels.exact_squares``).
    """
    if not isinstance(optimizer, Lars):
        return FINITE_BYTES
    of_matrices = (
        8 * digits("float64" if tensor.dtype == "float64" else "float32")
        for tensor in workload.tensors
        if len(tensor.shape) > 1
    )
    return FINITE_BYTES + 2 * sum(of_matrices)


def lower(
    workload: Workload,
    plan: Plan,
    ready_s: NDArray[np.float64] | None = None,
    alpha_s: float | None = None,
    beta_s_per_byte: float | None = None,
) -> Schedule:
    """Return the operations of one step (see ``dpsim.lowering.lower``), in the order of the arrays:

    those of data parallelism (``dpsim.lowering.data_parallel``) up to the update, with a reduce-scatter in place of
    each allreduce; the agreement that all gradients are finite, after all reduce-scatters; the update of the rank's
    shards, after that; the all-gathers in bucket order, each after the update.

    Gradients are announced before their layer's backward has read the weights, and a step whose loss is not finite must
    change nothing: so no parameter is written before backward has ended and all ranks have agreed. On one device it is
    the schedule of data parallelism.

    With ``gather=broadcast`` it is the schedule of data parallelism, and after the update a broadcast of each tensor.
    Source: ``torch.distributed.optim.ZeroRedundancyOptimizer``.
    """
    if plan.parallelism.owns_tensors:
        schedule = data_parallel.lower(workload, plan, ready_s, alpha_s, beta_s_per_byte)
        return _with_broadcasts(schedule) if plan.devices > 1 else schedule
    agreed = agreement_bytes(workload, plan.optimizer) if plan.devices > 1 else None
    return data_parallel.lower(workload, plan, ready_s, alpha_s, beta_s_per_byte, agreement_bytes=agreed)


def owners(elements: Sequence[int], devices: int) -> tuple[int, ...]:
    """Return the device that updates each tensor: the largest tensor first, each on the device with the least so far.

    Equals keep their order, and take the first such device (``ZeroRedundancyOptimizer._partition_parameters``).
    """
    held, owner = [0] * devices, [0] * len(elements)
    for index in sorted(range(len(elements)), key=lambda each: -elements[each]):
        owner[index] = held.index(min(held))
        held[owner[index]] += elements[index]
    return tuple(owner)


def _with_broadcasts(schedule: Schedule) -> Schedule:
    """Return a schedule of data parallelism with a broadcast of each tensor by its owner after the update."""
    tensors, plan = schedule.workload.tensors, schedule.plan
    owned = dataclasses.replace(schedule, owners=owners([tensor.elements for tensor in tensors], plan.devices))
    order, count = np.array(owned.broadcast_tensors, np.int64), len(tensors)
    (update,) = np.flatnonzero(schedule.kind == UPDATE_EVENT)
    bucket_of = np.empty(count, np.int64)
    bucket_of[schedule.tensor_order] = np.repeat(np.arange(schedule.buckets), np.diff(schedule.bucket_start))
    sizes = np.array([tensor.size_bytes for tensor in tensors], np.int64)
    added = {
        "kind": BROADCAST_EVENT,
        "layer": -1,
        "bucket": bucket_of[order],
        "micro_batch": plan.accumulate - 1,
        "size_bytes": sizes[order],
        "rank_class": 0,
        "peer": -1,
        "meeting": -1,
        "depends_on": update,
        "depends_start": schedule.depends_start[-1] + np.arange(1, count + 1),
    }
    columns: dict[str, Any] = {}
    for name, values in added.items():
        column = getattr(schedule, name)
        columns[name] = np.concatenate([column, np.broadcast_to(values, count).astype(column.dtype)])
    return dataclasses.replace(owned, **columns)
