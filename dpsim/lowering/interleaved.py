"""Schedules of several ranks whose collectives stand among the computation, as it makes them possible or needs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpsim.lowering.builder import Builder
from dpsim.lowering.computation import Computation, computation_of
from dpsim.lowering.fusion import Buckets
from dpsim.plan import Plan
from dpsim.schedule import SYNCHRONISE_EVENT, Schedule
from dpsim.workload import Workload


class Gather(NamedTuple):
    """An all-gather of a bucket's parameters, which stands before one row of the computation, after another is done.

    The row ``needed_by`` waits for its end.
    """

    bucket: int
    before: int
    after: int
    needed_by: int


_Sum = tuple[int, list[int]]
"""A bucket whose gradients are added up, and the backwards that make them final."""


def interleaved(
    workload: Workload,
    plan: Plan,
    buckets: Buckets,
    *,
    gradient_slots: int = 0,
    parameter_slots: int = 0,
    gathers: Sequence[Gather] = (),
    gathers_after: bool = False,
    agreement: int = 0,
) -> Schedule:
    """Return the schedule of several ranks whose reduce-scatters and all-gathers stand among the computation.

    ``gathers`` are in the order in which they are sent; with ``gathers_after`` parameters are gathered after the update
    too. The ranks agree by ``agreement`` bytes before the update that all numbers are finite (0: they do not).
    Gradients are summed in the last micro-batch, and in others where a script does not defer that
    (``Workload.reducing``); the next micro-batch waits for its sums.
    """
    computation = computation_of(workload, plan.accumulate, plan.batch_norm, distributed=plan.devices > 1)
    columns, summing = computation.columns, [computation.finals[each] for each in workload.reducing(plan.accumulate)]
    rows = zip(columns.kind.tolist(), columns.layer.tolist(), columns.micro_batch.tolist(), strict=True)
    sizes, depends_on = columns.size_bytes.tolist(), columns.depends_on.tolist()
    depends_start = columns.depends_start.tolist()
    complete = {row: sums for final in summing for row, sums in _completed(computation, final, buckets).items()}
    freed = _freed(computation, buckets, gradient_slots)
    builder = Builder()
    number: list[int] = []
    summed: list[int] = []
    waits: dict[int, int] = {}
    queued = current = 0
    for row, (kind, layer, micro_batch) in enumerate(rows):
        while queued < len(gathers) and gathers[queued].before == row:
            gather = gathers[queued]
            waits[gather.needed_by] = builder.gather(buckets, gather.bucket, number[gather.after], micro_batch)
            queued += 1
        after = [number[earlier] for earlier in depends_on[depends_start[row] : depends_start[row + 1]]]
        after += [summed[bucket] for bucket in freed.get(row, ())]
        after += [waits[row]] if row in waits else []
        if micro_batch > current:
            current, after, summed = micro_batch, [*after, *summed], []
        number.append(builder.add(kind, after, layer=layer, micro_batch=micro_batch, size_bytes=sizes[row]))
        for bucket, backwards in complete.get(row, ()):
            after = [number[each] for each in backwards]
            summed.append(builder.sum_bucket(buckets, bucket, after, plan, micro_batch=micro_batch))
    update = builder.update(
        summed or [len(builder) - 1],
        plan,
        statistics=computation.statistics,
        agreement=agreement,
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


def _completed(computation: Computation, final: NDArray[np.int32], buckets: Buckets) -> dict[int, list[_Sum]]:
    """Return the sums that may begin after each computation row: a batch norm's global sum goes before them.

    ``final`` are the rows of the micro-batch that make each tensor final.
    """
    kind, complete = computation.columns.kind, dict[int, list[_Sum]]()
    for bucket, row in enumerate(final[buckets.start[1:] - 1].tolist()):
        while row + 1 < len(kind) and kind[row + 1] == SYNCHRONISE_EVENT:
            row += 1
        backwards = final[slice(*buckets.start[bucket : bucket + 2])].tolist()
        complete.setdefault(row, []).append((bucket, backwards))
    return complete
