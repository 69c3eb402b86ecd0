"""ZeRO-2: ZeRO-1 in which a rank keeps its shard of the gradients alone, and has few whole buckets at once.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), stage 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from dpsim.lowering import data_parallel, zero1
from dpsim.lowering.buckets import Costs, fused
from dpsim.lowering.builder import Builder
from dpsim.lowering.computation import Computation, computation_of
from dpsim.lowering.fusion import Buckets
from dpsim.plan import Plan
from dpsim.schedule import SYNCHRONISE_EVENT, Schedule
from dpsim.strategy import Zero2
from dpsim.workload import Workload


class Gather(NamedTuple):
    """An all-gather of a bucket's parameters, which stands before one row of the computation, after another is done.

    The row ``needed_by`` waits for its end.
    """

    bucket: int
    before: int
    after: int
    needed_by: int


def lower(
    workload: Workload,
    plan: Plan,
    ready_s: NDArray[np.float64] | None = None,
    alpha_s: float | None = None,
    beta_s_per_byte: float | None = None,
) -> Schedule:
    """Return the operations of one step (see ``dpsim.lowering.lower``), in the order of the arrays:

    those of ``dpsim.lowering.zero1``, but a reduce-scatter stands behind the backward that completes its bucket, and
    the first backward that writes bucket k waits until that of bucket k - ``gradient_slots`` has ended: it has the same
    memory. There are as many slots as the strategy has ``buckets``, or more where one layer's tensors fill more.

    Micro-batches add to all gradients, so with several, or where all buckets have a slot, and on one device, it is the
    schedule of ``dpsim.lowering.zero1``.
    """
    buckets = Buckets.at(workload, fused(workload, plan, Costs(ready_s, alpha_s, beta_s_per_byte)))
    slots = 0
    if plan.devices > 1 and plan.accumulate == 1:
        final = computation_of(workload, 1, plan.batch_norm, distributed=True).final
        slots = _slots(cast(Zero2, plan.parallelism).buckets, final[buckets.start[:-1]], final[buckets.start[1:] - 1])
    if slots:
        return interleaved(workload, plan, buckets, gradient_slots=slots, gathers_after=True)
    agreement = zero1.agreement_bytes(workload, plan.optimizer) if plan.devices > 1 else None
    order = workload.ready_order.tensor
    return data_parallel.with_buckets(workload, plan, order, *buckets, agreement_bytes=agreement)


def _slots(least: int, first: NDArray[np.int32], last: NDArray[np.int32]) -> int:
    """Return the fewest slots >= ``least`` in which no backward waits for its own writes; 0: one a bucket.

    ``first`` and ``last``: the backwards that begin and complete each bucket, as numbers that ascend.
    """
    for slots in range(least, len(first)):
        if np.all(last[:-slots] < first[slots:]):
            return slots
    return 0


def interleaved(
    workload: Workload,
    plan: Plan,
    buckets: Buckets,
    *,
    gradient_slots: int = 0,
    parameter_slots: int = 0,
    gathers: Sequence[Gather] = (),
    gathers_after: bool = False,
    agrees: bool = True,
) -> Schedule:
    """Return the schedule of several ranks whose reduce-scatters and all-gathers stand among the computation.

    ``gathers`` are in the order in which they are sent; with ``gathers_after`` parameters are gathered after the update
    too. Where ``agrees`` the ranks agree before the update that all numbers are finite.
    """
    computation = computation_of(workload, plan.accumulate, plan.batch_norm, distributed=plan.devices > 1)
    columns, final = computation.columns, computation.final.tolist()
    rows = zip(columns.kind.tolist(), columns.layer.tolist(), columns.micro_batch.tolist(), strict=True)
    sizes, depends_on = columns.size_bytes.tolist(), columns.depends_on.tolist()
    depends_start = columns.depends_start.tolist()
    complete = _completed(computation, buckets)
    freed = _freed(computation, buckets, gradient_slots)
    builder = Builder()
    number: list[int] = []
    summed: list[int] = []
    waits: dict[int, int] = {}
    queued = 0
    for row, (kind, layer, micro_batch) in enumerate(rows):
        while queued < len(gathers) and gathers[queued].before == row:
            gather = gathers[queued]
            waits[gather.needed_by] = builder.gather(buckets, gather.bucket, number[gather.after], micro_batch)
            queued += 1
        after = [number[earlier] for earlier in depends_on[depends_start[row] : depends_start[row + 1]]]
        after += [summed[bucket] for bucket in freed.get(row, ())]
        after += [waits[row]] if row in waits else []
        number.append(builder.add(kind, after, layer=layer, micro_batch=micro_batch, size_bytes=sizes[row]))
        for bucket in complete.get(row, ()):
            backwards = final[slice(*buckets.start[bucket : bucket + 2])]
            summed.append(builder.sum_bucket(buckets, bucket, [number[each] for each in backwards], plan))
    update = builder.update(
        summed or [len(builder) - 1],
        plan,
        statistics=computation.statistics,
        agreement=zero1.agreement_bytes(workload, plan.optimizer) if agrees else 0,
    )
    for bucket in range(len(buckets.size_bytes) if gathers_after else 0):
        builder.gather(buckets, bucket, update, plan.accumulate - 1)
    return builder.schedule(workload, plan, buckets, gradient_slots=gradient_slots, parameter_slots=parameter_slots)


def _freed(computation: Computation, buckets: Buckets, gradient_slots: int) -> dict[int, list[int]]:
    """Return the buckets whose sums must be done before each computation row, which writes into their slots."""
    freed: dict[int, list[int]] = {}
    for bucket in range(gradient_slots or len(computation.final), len(buckets.size_bytes)):
        freed.setdefault(int(computation.final[buckets.start[bucket]]), []).append(bucket - gradient_slots)
    return freed


def _completed(computation: Computation, buckets: Buckets) -> dict[int, list[int]]:
    """Return the buckets that may be sent after each computation row: a batch norm's global sum goes before them."""
    kind, complete = computation.columns.kind, dict[int, list[int]]()
    for bucket, row in enumerate(computation.final[buckets.start[1:] - 1].tolist()):
        while row + 1 < len(kind) and kind[row + 1] == SYNCHRONISE_EVENT:
            row += 1
        complete.setdefault(row, []).append(bucket)
    return complete
