"""``lower``: a Workload and a Plan become the Schedule of one step, which the runtime executes and the model prices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsim.fusion_rules import FUSION_RULES
from dpsim.lowering.fusion import fuse
from dpsim.plan import Plan
from dpsim.schedule import ALLREDUCE, BACKWARD, COMMUNICATION, COMPUTE, FORWARD, SYNCHRONISE, UPDATE, Schedule
from dpsim.workload import Layer, Workload


@dataclass(frozen=True, eq=False)
class _Computation:
    """The forward and backward operations of all micro-batches, which do not depend on the buckets."""

    kind: NDArray[np.int8]
    layer: NDArray[np.int32]
    micro_batch: NDArray[np.int32]
    size_bytes: NDArray[np.int64]
    """Of the synchronisations among them."""
    ready_operation: NDArray[np.int32]
    """The last micro-batch's backward operation that makes each tensor final, in ready order."""


def lower(
    workload: Workload,
    plan: Plan,
    ready_s: NDArray[np.float64] | None = None,
    alpha_s: float | None = None,
    beta_s_per_byte: float | None = None,
) -> Schedule:
    """The operations of one step: per micro-batch all forwards, then all backwards reversed; allreduces; the update.

    The array order is: computation and batch norm's synchronisations, allreduces in bucket order, update. Only the
    last of ``plan.accumulate`` micro-batches communicates. With one device there is no allreduce, and the buckets say
    how memory is laid out (a rule that needs costs has nothing to decide there and makes one). Under ``horovod`` the
    schedule is dynamic: every tensor is a bucket of its own and there is no allreduce operation.

    ``mg-wfbp`` needs ``alpha_s`` and ``beta_s_per_byte`` (``dpsim.predict.alpha_beta``); ``ready_s`` (seconds, one a
    tensor in ready order, from the start of the last backward) defaults to the Workload's times at
    ``plan.local_batch``. Raises ``ConfigError`` where they are missing.
    """
    order = workload.ready_order
    name, rule = plan.fusion_rule, FUSION_RULES.find(plan.fusion_rule)
    dynamic = rule.while_running and plan.devices > 1
    if rule.while_running:
        name = "per-tensor"
    elif rule.needs_costs:
        if plan.devices == 1:
            name = "one"
        elif ready_s is None:
            ready_s = ready_times(workload, plan.local_batch)
    start = fuse(
        order.size_bytes,
        name,
        plan.threshold_bytes,
        ready_s=ready_s,
        alpha_s=alpha_s,
        beta_s_per_byte=beta_s_per_byte,
        dtype_code=order.dtype_code,
    )
    sizes = order.cumulative_bytes[start[1:]] - order.cumulative_bytes[start[:-1]]

    compute = _computation(workload, plan.accumulate, plan.batch_norm if plan.devices > 1 else "local")
    before, buckets = len(compute.kind), len(sizes)
    collectives = 0 if dynamic or plan.devices == 1 else buckets
    operations = before + collectives + 1
    last = operations - 1

    kind = np.empty(operations, np.int8)
    kind[:before], kind[before:last], kind[last] = compute.kind, ALLREDUCE, UPDATE
    lane = np.zeros(operations, np.int8)
    lane[:before][compute.kind == SYNCHRONISE] = COMMUNICATION
    lane[before:last] = COMMUNICATION
    lane[last] = COMPUTE
    layer = np.full(operations, -1, np.int32)
    layer[:before] = compute.layer
    bucket = np.full(operations, -1, np.int32)
    micro_batch = np.full(operations, plan.accumulate - 1, np.int32)
    micro_batch[:before] = compute.micro_batch
    size_bytes = np.zeros(operations, np.int64)
    size_bytes[:before] = compute.size_bytes
    after = np.full(operations, -1, np.int32)
    if collectives:
        bucket[before:last] = np.arange(buckets)
        size_bytes[before:last] = sizes
        after[before:last] = compute.ready_operation[start[1:] - 1]
        after[last] = last - 1
    return Schedule(
        workload=workload,
        plan=plan,
        kind=kind,
        lane=lane,
        layer=layer,
        bucket=bucket,
        micro_batch=micro_batch,
        size_bytes=size_bytes,
        after=after,
        tensor_order=order.tensor,
        bucket_start=start,
        bucket_size_bytes=sizes,
        dynamic=dynamic,
    )


def ready_times(workload: Workload, local_batch: float) -> NDArray[np.float64]:
    """Seconds from the start of a backward pass until each tensor is final, in ready order, at a local batch.

    r = (backward time of the layers after its own) + its layer's ``gradient_ready_s``, never before the tensor before.
    """
    memo = workload.memo
    found = memo.get(("ready times", local_batch))
    if found is None:
        times = workload.times(local_batch)
        backward = times.backward_s[::-1]
        start = (np.cumsum(backward) - backward)[::-1]
        ready = (start + times.gradient_ready_s)[workload.ready_order.layer]
        found = memo["ready times", local_batch] = np.maximum.accumulate(ready)
    result: NDArray[np.float64] = found
    return result


def _computation(workload: Workload, accumulate: int, batch_norm: str) -> _Computation:
    memo = workload.memo
    found = memo.get(("computation", accumulate, batch_norm))
    if found is None:
        found = memo["computation", accumulate, batch_norm] = _compute(workload, accumulate, batch_norm)
    result: _Computation = found
    return result


def _compute(workload: Workload, accumulate: int, batch_norm: str) -> _Computation:
    layers = len(workload.layers)
    forward = np.arange(layers, dtype=np.int32)
    kind = np.repeat(np.array([FORWARD, BACKWARD], np.int8), layers)
    layer = np.concatenate([forward, forward[::-1]])
    size_bytes = np.zeros(2 * layers, np.int64)
    if batch_norm == "global":
        extra = np.array([global_statistics_bytes(one) for one in workload.layers], np.int64)
        sizes = np.concatenate([extra[:, 0], extra[::-1, 1]])
        behind = np.flatnonzero(sizes) + 1
        kind, layer = np.insert(kind, behind, SYNCHRONISE), np.insert(layer, behind, layer[behind - 1])
        size_bytes = np.insert(size_bytes, behind, sizes[behind - 1])
    each = len(kind)
    kind, layer, size_bytes = (np.tile(column, accumulate) for column in (kind, layer, size_bytes))
    micro_batch = np.repeat(np.arange(accumulate, dtype=np.int32), each)
    if batch_norm == "leaf" and (size := leaf_statistics_bytes(workload)):
        kind, layer = np.append(kind, np.int8(SYNCHRONISE)), np.append(layer, np.int32(-1))
        size_bytes, micro_batch = np.append(size_bytes, size), np.append(micro_batch, np.int32(accumulate - 1))
    backward = np.flatnonzero((kind == BACKWARD) & (micro_batch == accumulate - 1))[::-1].astype(np.int32)
    return _Computation(
        kind=kind,
        layer=layer,
        micro_batch=micro_batch,
        size_bytes=size_bytes,
        ready_operation=backward[workload.ready_order.layer],
    )


def global_statistics_bytes(layer: Layer) -> tuple[int, int]:
    """What a batch norm with mode ``global`` sums over the devices in forward (float64) and in backward; else 0, 0."""
    channels = layer.batch_norm_channels
    if not channels:
        return 0, 0
    return 8 * (1 + 2 * channels), 2 * channels * np.dtype(layer.tensors[0].dtype).itemsize


def leaf_statistics_bytes(workload: Workload) -> int:
    """What all batch norms with mode ``leaf`` together sum over the devices at the end of a step (float64)."""
    return sum(8 * (1 + 2 * layer.batch_norm_channels) for layer in workload.layers if layer.batch_norm_channels)
