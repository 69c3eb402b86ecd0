"""Data parallelism: every device computes gradients on its share of the batch; allreduces of buckets add them up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dpsim.fusion_rules import FUSION_RULES
from dpsim.jit import jit, quickest
from dpsim.lowering.computation import NO_PHASE, Computation, computation_of, ready_times
from dpsim.lowering.fusion import fuse
from dpsim.memo import remember
from dpsim.plan import Plan
from dpsim.schedule import (
    COLLECTIVE,
    COMMUNICATION_LANE,
    COMPUTE_LANE,
    UPDATE,
    Group,
    RankClass,
    Schedule,
    event_kinds,
)
from dpsim.workload import Workload

N = TypeVar("N", bound=np.generic)
_FEW_BUCKETS = 1000


@dataclass(frozen=True, eq=False)
class Operations:
    """The columns of a schedule with so many allreduces: all but the sizes of buckets and the dependencies.

    ``late`` is 1 where batch norm's sum of leaf statistics stands behind the allreduces.
    """

    computation: Computation
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
        plan.fusion_threshold_bytes,
        ready_s=ready_s,
        alpha_s=alpha_s,
        beta_s_per_byte=beta_s_per_byte,
        dtype_code=order.dtype_code,
    )
    sizes = order.cumulative_bytes[start[1:]] - order.cumulative_bytes[start[:-1]]
    buckets = len(sizes)
    sent = 0 if dynamic or plan.devices == 1 else buckets
    layout = operations_of(workload, plan.accumulate, plan.batch_norm if plan.devices > 1 else "local", sent)
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
def operations_of(workload: Workload, accumulate: int, batch_norm: str, sent: int) -> Operations:
    computation = computation_of(workload, accumulate, batch_norm)
    before, late = len(computation.kind), 1 if computation.statistics else 0
    operations = before + sent + late + 1

    def column(values: NDArray[N], fill: int) -> NDArray[N]:
        whole = np.full(operations, fill, values.dtype)
        whole[:before] = values
        return whole

    kind, lane = column(computation.kind, COLLECTIVE), column(computation.lane, COMMUNICATION_LANE)
    kind[-1], lane[-1] = UPDATE, COMPUTE_LANE
    phase, bucket = column(computation.phase, NO_PHASE), np.full(operations, -1, np.int32)
    bucket[before : before + sent] = np.arange(sent)
    size_bytes = column(computation.size_bytes, 0)
    size_bytes[before + sent : before + sent + late] = computation.statistics
    return Operations(
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
