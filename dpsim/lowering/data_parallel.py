"""Data parallelism: every device computes gradients on its share of the batch; allreduces of buckets add them up."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dpsim.errors import ConfigError
from dpsim.fusion_rules import FUSION_RULES
from dpsim.jit import jit, quickest
from dpsim.lowering.fusion import fuse
from dpsim.memo import remember
from dpsim.plan import Plan
from dpsim.schedule import (
    BACKWARD,
    COLLECTIVE,
    COMMUNICATION_LANE,
    COMPUTE,
    COMPUTE_LANE,
    FORWARD,
    LOSS,
    PREPARE,
    UPDATE,
    Group,
    RankClass,
    Schedule,
    event_kinds,
)
from dpsim.workload import Layer, Workload

N = TypeVar("N", bound=np.generic)
_NO_PHASE = -1
_FEW_BUCKETS = 1000


@dataclass(frozen=True, eq=False)
class _Computation:
    """The operations of all micro-batches, which do not depend on the buckets, with their dependencies.

    ``statistics`` is the sum that batch norm's mode ``leaf`` needs after all buckets, in bytes (0: none).
    ``final`` is the last micro-batch's backward operation that makes each tensor final, in ready order.
    """

    kind: NDArray[np.int8]
    phase: NDArray[np.int8]
    lane: NDArray[np.int8]
    layer: NDArray[np.int32]
    micro_batch: NDArray[np.int32]
    size_bytes: NDArray[np.int64]
    depends_start: NDArray[np.int32]
    depends_on: NDArray[np.int32]
    statistics: int
    final: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class _Operations:
    """The columns of a schedule with so many allreduces: all but the sizes of buckets and the dependencies.

    ``late`` is 1 where batch norm's sum of leaf statistics stands behind the allreduces.
    """

    computation: _Computation
    late: int
    kind: NDArray[np.int8]
    phase: NDArray[np.int8]
    event_kind: NDArray[np.int8]
    lane: NDArray[np.int8]
    layer: NDArray[np.int32]
    bucket: NDArray[np.int32]
    micro_batch: NDArray[np.int32]
    size_bytes: NDArray[np.int64]
    rank_class: NDArray[np.int8]
    group: NDArray[np.int8]


def lower(
    workload: Workload,
    plan: Plan,
    ready_s: NDArray[np.float64] | None = None,
    alpha_s: float | None = None,
    beta_s_per_byte: float | None = None,
) -> Schedule:
    """The operations of one step (see ``dpsim.lowering.lower``), in the order of the arrays:

    the step's overhead; for each micro-batch all forwards, the loss, all backwards reversed, with batch norm's global
    sums among them; the allreduces in bucket order, each after the last micro-batch's backwards of its tensors; the
    sum of batch norm's leaf statistics; the update, after all of them.

    With one device there is no allreduce, and the buckets say how memory is laid out (a rule that needs costs has
    nothing to decide there and makes one). Under ``horovod`` the schedule is dynamic: every tensor is a bucket of its
    own and there is no allreduce.
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
    buckets = len(sizes)
    sent = 0 if dynamic or plan.devices == 1 else buckets
    layout = _operations(workload, plan.accumulate, plan.batch_norm if plan.devices > 1 else "local", sent)
    computed, size_bytes = layout.computation, layout.size_bytes
    before = len(computed.kind)
    if sent:
        size_bytes = size_bytes.copy()
        size_bytes[before : before + sent] = sizes
    edges = quickest(_dependencies, few=buckets <= _FEW_BUCKETS)
    depends_start, depends_on = edges(
        computed.depends_start, computed.depends_on, computed.final, start, sent, layout.late
    )
    return Schedule(
        workload=workload,
        plan=plan,
        kind=layout.kind,
        phase=layout.phase,
        event_kind=layout.event_kind,
        lane=layout.lane,
        layer=layout.layer,
        bucket=layout.bucket,
        micro_batch=layout.micro_batch,
        size_bytes=size_bytes,
        rank_class=layout.rank_class,
        group=layout.group,
        depends_start=depends_start,
        depends_on=depends_on,
        tensor_order=order.tensor,
        bucket_start=start,
        bucket_size_bytes=sizes,
        rank_classes=(RankClass(name="replica", ranks=plan.devices),),
        groups=(Group(devices=plan.devices, layout=plan.layout),),
        dynamic=dynamic,
    )


@jit
def _dependencies(computed_start, computed_on, final, bucket_start, sent, late):  # type: ignore[no-untyped-def]
    """What each operation waits for: of computations as given; an allreduce for the backwards that make its tensors
    final (``final``); batch norm's late sum (``late``: 0 or 1) for all allreduces; the update for all of these.
    """
    before = len(computed_start) - 1
    start = np.empty(before + sent + late + 2, np.int32)
    start[: before + 1] = computed_start
    on = np.empty(len(computed_on) + (len(final) if sent else 0) + late * max(sent, 1) + max(sent + late, 1), np.int32)
    count = len(computed_on)
    on[:count] = computed_on
    for bucket in range(sent):
        for tensor in range(bucket_start[bucket], bucket_start[bucket + 1]):
            if tensor == bucket_start[bucket] or final[tensor] != final[tensor - 1]:  # a layer counts once
                on[count] = final[tensor]
                count += 1
        start[before + bucket + 1] = count
    for row in range(before + sent, before + sent + late + 1):
        for earlier in range(before if row > before else before - 1, row):
            on[count] = earlier
            count += 1
        start[row + 1] = count
    return start, on[:count].copy()


@remember
def ready_times(workload: Workload, local_batch: float) -> NDArray[np.float64]:
    """Seconds from the start of a backward pass until each tensor is final, in ready order, at a local batch.

    r = (backward time of the layers after its own) + its layer's ``gradient_ready_s``, never before the tensor before.
    """
    times = workload.times(local_batch)
    backward = times.backward_s[::-1]
    start = (np.cumsum(backward) - backward)[::-1]
    ready = (start + times.gradient_ready_s)[workload.ready_order.layer]
    return np.maximum.accumulate(ready)


@remember
def _operations(workload: Workload, accumulate: int, batch_norm: str, sent: int) -> _Operations:
    computation = _computation(workload, accumulate, batch_norm)
    before, late = len(computation.kind), 1 if computation.statistics else 0
    operations = before + sent + late + 1

    def column(values: NDArray[N], fill: int) -> NDArray[N]:
        whole = np.full(operations, fill, values.dtype)
        whole[:before] = values
        return whole

    kind, lane = column(computation.kind, COLLECTIVE), column(computation.lane, COMMUNICATION_LANE)
    kind[-1], lane[-1] = UPDATE, COMPUTE_LANE
    phase, bucket = column(computation.phase, _NO_PHASE), np.full(operations, -1, np.int32)
    bucket[before : before + sent] = np.arange(sent)
    size_bytes = column(computation.size_bytes, 0)
    size_bytes[before + sent : before + sent + late] = computation.statistics
    return _Operations(
        computation=computation,
        late=late,
        kind=kind,
        phase=phase,
        event_kind=event_kinds(kind, phase, bucket),
        lane=lane,
        layer=column(computation.layer, -1),
        bucket=bucket,
        micro_batch=column(computation.micro_batch, accumulate - 1),
        size_bytes=size_bytes,
        rank_class=np.zeros(operations, np.int8),
        group=np.where(kind == COLLECTIVE, np.int8(0), np.int8(-1)),
    )


@remember
def _computation(workload: Workload, accumulate: int, batch_norm: str) -> _Computation:
    """The operations of all micro-batches in order, each behind those whose results it reads."""
    sums = [global_statistics_bytes(layer) if batch_norm == "global" else (0, 0) for layer in workload.layers]
    inputs = _inputs(workload)
    readers: list[list[int]] = [[] for _ in workload.layers]
    for number, layers in enumerate(inputs):
        for layer in layers:
            readers[layer].append(number)
    rows: list[tuple[int, int, int, int, int, int]] = [(COMPUTE, PREPARE, COMPUTE_LANE, -1, 0, 0)]
    depends: list[list[int]] = [[]]

    def add(phase: int, layer: int, micro_batch: int, after: list[int], size_bytes: int = 0) -> int:
        """Append a computation, and the global sum behind it where it has one; the number of the last of them."""
        rows.append((COMPUTE, phase, COMPUTE_LANE, layer, micro_batch, 0))
        depends.append(after)
        if size_bytes:
            rows.append((COLLECTIVE, _NO_PHASE, COMMUNICATION_LANE, layer, micro_batch, size_bytes))
            depends.append([len(rows) - 2])
        return len(rows) - 1

    final: dict[int, int] = {}
    begin = 0
    for micro_batch in range(accumulate):
        outputs: dict[int, int] = {}
        for number, layers in enumerate(inputs):
            after = [outputs[layer] for layer in layers] or [begin]
            outputs[number] = add(FORWARD, number, micro_batch, after, sums[number][0])
        loss = add(LOSS, -1, micro_batch, [outputs[number] for number, layers in enumerate(readers) if not layers])
        gradients: dict[int, int] = {}
        for number in reversed(range(len(workload.layers))):
            after = [gradients[layer] for layer in readers[number]] or [loss]
            final[number] = len(rows)
            gradients[number] = add(BACKWARD, number, micro_batch, after, sums[number][1])
        begin = len(rows) - 1
    kind, phase, lane, layer_column, micro_batches, size_bytes = np.array(rows, np.int64).T
    return _Computation(
        kind=kind.astype(np.int8),
        phase=phase.astype(np.int8),
        lane=lane.astype(np.int8),
        layer=layer_column.astype(np.int32),
        micro_batch=micro_batches.astype(np.int32),
        size_bytes=size_bytes,
        depends_start=np.cumsum([0, *map(len, depends)]).astype(np.int32),
        depends_on=np.array(list(itertools.chain(*depends)), np.int32),
        statistics=leaf_statistics_bytes(workload) if batch_norm == "leaf" else 0,
        final=np.array([final[layer] for layer in workload.ready_order.layer.tolist()], np.int32),
    )


def _inputs(workload: Workload) -> list[list[int]]:
    """The layers that each layer reads: those that ``depends_on`` names, or the one before it."""
    number = {layer.name: index for index, layer in enumerate(workload.layers)}
    inputs = []
    for index, layer in enumerate(workload.layers):
        if layer.depends_on is None:
            inputs.append([index - 1] if index else [])
            continue
        named = sorted({number[name] for name in layer.depends_on})
        if named and named[-1] >= index:
            raise ConfigError(
                f"layer {layer.name!r} reads {workload.layers[named[-1]].name!r}, which does not stand before it",
                allowed="layers in forward order, each behind those that it depends on",
            )
        inputs.append(named)
    return inputs


def global_statistics_bytes(layer: Layer) -> tuple[int, int]:
    """What a batch norm with mode ``global`` sums over the devices in forward (float64) and in backward; else 0, 0."""
    channels = layer.batch_norm_channels
    if not channels:
        return 0, 0
    return 8 * (1 + 2 * channels), 2 * channels * np.dtype(layer.tensors[0].dtype).itemsize


def leaf_statistics_bytes(workload: Workload) -> int:
    """What all batch norms with mode ``leaf`` together sum over the devices at the end of a step (float64)."""
    return sum(8 * (1 + 2 * layer.batch_norm_channels) for layer in workload.layers if layer.batch_norm_channels)
