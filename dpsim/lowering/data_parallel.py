"""Data parallelism: every device computes gradients on its share of the batch; allreduces of buckets add them up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsim.fusion_rules import FUSION_RULES
from dpsim.jit import jit, quickest
from dpsim.lowering.buckets import Costs, fused
from dpsim.lowering.computation import Computation, computation_of
from dpsim.lowering.fusion import Buckets
from dpsim.lowering.interleaved import interleaved
from dpsim.memo import remember
from dpsim.plan import Plan
from dpsim.schedule import (
    ALL_GATHER_EVENT,
    ALLREDUCE_EVENT,
    REDUCE_SCATTER_EVENT,
    SYNCHRONISE_EVENT,
    UPDATE_EVENT,
    Ints,
    Schedule,
)
from dpsim.workload import Workload

_FEW_BUCKETS = 1000


@dataclass(frozen=True, eq=False)
class _Columns:
    """The columns of a schedule with so many buckets: all but their sizes and the dependencies."""

    computation: Computation
    kind: NDArray[np.int8]
    layer: NDArray[np.int32]
    bucket: NDArray[np.int32]
    micro_batch: NDArray[np.int32]
    size_bytes: NDArray[np.int64]
    rank_class: NDArray[np.int8]
    peer: NDArray[np.int32]
    meeting: NDArray[np.int32]


def lower(
    workload: Workload,
    plan: Plan,
    ready_s: NDArray[np.float64] | None = None,
    alpha_s: float | None = None,
    beta_s_per_byte: float | None = None,
    *,
    agreement_bytes: int | None = None,
) -> Schedule:
    """Return the operations of one step (see ``dpsim.lowering.lower``), in the order of the arrays:

    the step's overhead; for each micro-batch all forwards, the loss, all backwards reversed, with batch norm's global
    sums among them, and behind the last loss what a script sums itself; the allreduces in bucket order, each after the
    last micro-batch's backwards of its tensors; the sum of batch norm's leaf statistics; the update, after all of them.
    With ``agreement_bytes`` it is the schedule of ``dpsim.lowering.zero1``. Where a script reduces in more
    micro-batches (``Workload.reducing``), its allreduces stand behind the backwards of each of these.

    With one device there is no allreduce. Under ``horovod`` the schedule is dynamic: every tensor is a bucket of its
    own and there is no allreduce.
    """
    buckets = Buckets.at(workload, fused(workload, plan, Costs(ready_s, alpha_s, beta_s_per_byte)))
    dynamic = plan.devices > 1 and FUSION_RULES.find(plan.fusion_rule).while_running
    if plan.devices > 1 and not (dynamic or agreement_bytes or workload.deferred):
        return interleaved(workload, plan, buckets)
    order = workload.ready_order.tensor
    return with_buckets(workload, plan, order, *buckets, dynamic=dynamic, agreement_bytes=agreement_bytes)


def with_buckets(
    workload: Workload,
    plan: Plan,
    tensor_order: Ints,
    bucket_start: Ints,
    bucket_size_bytes: Ints,
    decided_by: NDArray[np.int32] | None = None,
    *,
    dynamic: bool = False,
    agreement_bytes: int | None = None,
) -> Schedule:
    """Return the schedule with these buckets: collectives wait for their tensors' backwards, or ``decided_by``.

    ``decided_by``: one operation of each bucket. A dynamic schedule, and one of one device, has no collectives of them.
    """
    buckets = len(bucket_size_bytes)
    sent = 0 if dynamic or plan.devices == 1 else buckets
    sharded = agreement_bytes is not None
    batch_norm = plan.batch_norm if plan.devices > 1 else "local"
    columns = _columns(workload, plan.accumulate, batch_norm, plan.devices > 1, sent, sharded)
    computed = columns.computation
    edges = quickest(_dependencies, few=buckets <= _FEW_BUCKETS)
    awaited = (computed.final, bucket_start) if decided_by is None else (decided_by, np.arange(buckets + 1))
    late = int(computed.statistics > 0)
    depends_start, depends_on = edges(
        computed.columns.depends_start, computed.columns.depends_on, *awaited, sent, late, sharded
    )
    return Schedule(
        workload=workload,
        plan=plan,
        kind=columns.kind,
        layer=columns.layer,
        bucket=columns.bucket,
        micro_batch=columns.micro_batch,
        size_bytes=_size_bytes(columns, bucket_size_bytes, sent, agreement_bytes),
        depends_start=depends_start,
        depends_on=depends_on,
        tensor_order=tensor_order,
        bucket_start=bucket_start,
        bucket_size_bytes=bucket_size_bytes,
        rank_class=columns.rank_class,
        peer=columns.peer,
        meeting=columns.meeting,
        bucket_class=np.zeros(buckets, np.int8),
        bucket_copies=np.ones(buckets, np.int8),
        dynamic=dynamic,
        sharded=sharded,
    )


def _size_bytes(
    columns: _Columns, bucket_size_bytes: Ints, sent: int, agreement_bytes: int | None
) -> NDArray[np.int64]:
    """Return each operation's bytes, with those of the ``sent`` collectives and of a sharded schedule's gathers."""
    if not sent and agreement_bytes is None:
        return columns.size_bytes
    size_bytes = columns.size_bytes.copy()
    before = len(columns.computation.columns.kind)
    size_bytes[before : before + sent] = bucket_size_bytes
    if agreement_bytes is not None:
        size_bytes[len(size_bytes) - sent - 2] = agreement_bytes
        size_bytes[len(size_bytes) - sent :] = bucket_size_bytes
    return size_bytes


@jit
def _dependencies(computed_start, computed_on, final, bucket_start, sent, late, sharded):  # type: ignore[no-untyped-def]
    """Return what each operation waits for: computations as given; a bucket's collective for the backwards that make
    its tensors final (``final``); batch norm's late sum (``late``: 0 or 1) for all of these; the ranks' agreement, in a
    sharded schedule, for the same; the update for all before it; an all-gather for the update.
    """
    before = len(computed_start) - 1
    update = before + sent + late + sharded
    start = np.empty(update + 2 + sent * sharded, np.int32)
    start[: before + 1] = computed_start
    on = np.empty(len(computed_on) + len(final) + 4 * (sent + 2), np.int32)
    count = len(computed_on)
    on[:count] = computed_on
    for bucket in range(sent):
        for tensor in range(bucket_start[bucket], bucket_start[bucket + 1]):
            if tensor == bucket_start[bucket] or final[tensor] != final[tensor - 1]:  # a layer counts once
                on[count] = final[tensor]
                count += 1
        start[before + bucket + 1] = count
    for row in range(before + sent, update + 1):
        last = row if row == update else before + sent
        for earlier in range(before if last > before else before - 1, last):
            on[count] = earlier
            count += 1
        start[row + 1] = count
    for row in range(update + 1, len(start) - 1):
        on[count] = update
        count += 1
        start[row + 1] = count
    return start, on[:count].copy()


@remember
def _columns(
    workload: Workload, accumulate: int, batch_norm: str, distributed: bool, sent: int, sharded: bool
) -> _Columns:
    computation = computation_of(workload, accumulate, batch_norm, distributed=distributed)
    computed = computation.columns
    late = [SYNCHRONISE_EVENT] if computation.statistics else []
    collective, agreement, gathers = (
        (REDUCE_SCATTER_EVENT, [SYNCHRONISE_EVENT], sent) if sharded else (ALLREDUCE_EVENT, [], 0)
    )
    added = [*[collective] * sent, *late, *agreement, UPDATE_EVENT, *[ALL_GATHER_EVENT] * gathers]
    before, count = len(computed.kind), len(added)
    kind = np.concatenate([computed.kind, np.array(added, np.int8)])
    bucket = np.full(before + count, -1, np.int32)
    bucket[before : before + sent] = np.arange(sent)
    bucket[before + count - gathers :] = np.arange(gathers)
    size_bytes = np.concatenate([computed.size_bytes, np.zeros(count, np.int64)])
    if late:
        size_bytes[before + sent] = computation.statistics
    return _Columns(
        computation=computation,
        kind=kind,
        layer=np.concatenate([computed.layer, np.full(count, -1, np.int32)]),
        bucket=bucket,
        micro_batch=np.concatenate([computed.micro_batch, np.full(count, accumulate - 1, np.int32)]),
        size_bytes=size_bytes,
        rank_class=np.zeros(len(kind), np.int8),
        peer=np.full(len(kind), -1, np.int32),
        meeting=np.full(len(kind), -1, np.int32),
    )
