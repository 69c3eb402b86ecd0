"""ZeRO-1: data parallelism in which a rank updates, and keeps optimizer state for, its shard of the parameters alone.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), stage 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpsim.kernels.exact_squares import digits
from dpsim.lowering import data_parallel
from dpsim.optimizer import Lars, Optimizer
from dpsim.plan import Plan
from dpsim.schedule import Schedule
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
    """
    agreed = agreement_bytes(workload, plan.optimizer) if plan.devices > 1 else None
    return data_parallel.lower(workload, plan, ready_s, alpha_s, beta_s_per_byte, agreement_bytes=agreed)
