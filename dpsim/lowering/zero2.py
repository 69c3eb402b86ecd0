"""ZeRO-2: ZeRO-1 in which a rank keeps its shard of the gradients alone, and has few whole buckets at once.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), stage 2.
"""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

from dpsim.lowering import data_parallel, zero1
from dpsim.lowering.buckets import Costs, fused
from dpsim.lowering.computation import computation_of
from dpsim.lowering.fusion import Buckets
from dpsim.lowering.interleaved import interleaved
from dpsim.plan import Plan
from dpsim.schedule import Schedule
from dpsim.strategy import Zero2
from dpsim.workload import Workload


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
    agreement = zero1.agreement_bytes(workload, plan.optimizer) if plan.devices > 1 else None
    if slots and agreement is not None:
        return interleaved(workload, plan, buckets, gradient_slots=slots, gathers_after=True, agreement=agreement)
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
