"""ZeRO-1: data parallelism in which a rank updates, and keeps optimizer state for, its shard of the parameters alone.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), stage 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsim.kernels.exact_squares import digits
from dpsim.lowering import data_parallel
from dpsim.memo import remember
from dpsim.optimizer import Lars, Optimizer
from dpsim.plan import Plan
from dpsim.schedule import (
    ALL_GATHER_EVENT,
    COLLECTIVE,
    COMMUNICATION_LANE,
    REDUCE_SCATTER_EVENT,
    SYNCHRONISE_EVENT,
    Schedule,
)
from dpsim.workload import Workload

_FINITE_BYTES = 8


def agreement_bytes(workload: Workload, optimizer: Optimizer) -> int:
    """What a rank sends to each other one before the update, in float64.

    Whether its loss and its shards are finite, and for LARS its part of the norms of parameters and gradients of each
    tensor of two dimensions or more (``dpsim.kernels.exact_squares``).
    """
    if not isinstance(optimizer, Lars):
        return _FINITE_BYTES
    of_matrices = (
        8 * digits("float64" if tensor.dtype == "float64" else "float32")
        for tensor in workload.tensors
        if len(tensor.shape) > 1
    )
    return _FINITE_BYTES + 2 * sum(of_matrices)


def lower(
    workload: Workload,
    plan: Plan,
    ready_s: NDArray[np.float64] | None = None,
    alpha_s: float | None = None,
    beta_s_per_byte: float | None = None,
) -> Schedule:
    """The operations of one step (see ``dpsim.lowering.lower``), in the order of the arrays:

    those of data parallelism (``dpsim.lowering.data_parallel``) up to the update, with a reduce-scatter in place of
    each allreduce; the agreement that all gradients are finite, after all reduce-scatters; the update of the rank's
    shards, after that; the all-gathers in bucket order, each after the update.

    Gradients are announced before their layer's backward has read the weights, and a step whose loss is not finite must
    change nothing: so no parameter is written before backward has ended and all ranks have agreed. On one device it is
    the schedule of data parallelism.
    """
    plain = data_parallel.lower(workload, plan, ready_s, alpha_s, beta_s_per_byte)
    if plan.devices == 1:
        return plain
    update = len(plain.kind) - 1
    columns, behind, ends = _columns(workload, plan.accumulate, plan.batch_norm, plain.buckets)
    agreement = agreement_bytes(workload, plan.optimizer)
    size_bytes = np.empty(len(columns["kind"]), np.int64)
    size_bytes[:update] = plain.size_bytes[:update]
    size_bytes[update], size_bytes[update + 1], size_bytes[update + 2 :] = agreement, 0, plain.bucket_size_bytes
    before = plain.depends_start[update]
    fields = {**vars(plain), **columns}
    fields["size_bytes"], fields["sharded"] = size_bytes, True
    fields["depends_start"] = np.concatenate((plain.depends_start[: update + 1], ends + before))
    fields["depends_on"] = np.concatenate((plain.depends_on[:before], behind))
    return Schedule(**fields)


@remember
def _columns(
    workload: Workload, accumulate: int, batch_norm: str, sent: int
) -> tuple[dict[str, NDArray[Any]], NDArray[np.int32], NDArray[np.int32]]:
    """The columns of a schedule with so many buckets, all but the sizes and the dependencies.

    Then what the agreement, the update and each all-gather wait for, one after another, and where each of these ends.
    """
    plain = data_parallel.operations_of(workload, accumulate, batch_norm, sent)
    update = len(plain.kind) - 1

    def column(values: NDArray[Any], agreement: int, gathers: Any) -> NDArray[Any]:
        last = np.broadcast_to(np.asarray(gathers, values.dtype), (sent,))
        return np.concatenate([values[:update], np.array([agreement], values.dtype), values[update:], last])

    event_kind = plain.event_kind.copy()
    event_kind[plain.bucket >= 0] = REDUCE_SCATTER_EVENT
    last = accumulate - 1
    scatters = np.arange(update - plain.late - sent, update - plain.late)
    sums = np.arange(update - plain.late - sent, update) if sent + plain.late else np.array([update - 1])
    behind = np.concatenate([scatters, sums, [update], np.full(sent, update + 1)])
    ends = np.cumsum([sent, len(sums) + 1, *np.ones(sent, np.int64)])
    columns = {
        "kind": column(plain.kind, COLLECTIVE, COLLECTIVE),
        "phase": column(plain.phase, -1, -1),
        "event_kind": column(event_kind, SYNCHRONISE_EVENT, ALL_GATHER_EVENT),
        "lane": column(plain.lane, COMMUNICATION_LANE, COMMUNICATION_LANE),
        "layer": column(plain.layer, -1, -1),
        "bucket": column(plain.bucket, -1, np.arange(sent)),
        "micro_batch": column(plain.micro_batch, last, last),
        "rank_class": column(plain.rank_class, 0, 0),
        "group": column(plain.group, 0, 0),
    }
    return columns, behind.astype(np.int32), ends.astype(np.int32)
