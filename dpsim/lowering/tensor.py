"""Tensor parallelism: devices own column blocks of layers, and add up what the blocks of a pair of layers compute.

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (2019),
section 3. Layers that are not cut are computed by every device of a group.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpsim.lowering import data_parallel, zero1
from dpsim.lowering.buckets import Costs
from dpsim.lowering.divided import Stage, divided
from dpsim.plan import Plan
from dpsim.schedule import BACKWARD_EVENT, FORWARD_EVENT, Schedule
from dpsim.workload import Workload


def lower(
    workload: Workload,
    plan: Plan,
    ready_s: NDArray[np.float64] | None = None,
    alpha_s: float | None = None,
    beta_s_per_byte: float | None = None,
) -> Schedule:
    """Return the operations of one step (see ``dpsim.lowering.lower``): those of one stage of all layers (``divided``).

    With one part it is the schedule of data parallelism, or of ``dpsim.lowering.zero1``. Raises ``ConfigError`` as
    ``divided`` does.
    """
    costs, strategy = Costs(ready_s, alpha_s, beta_s_per_byte), plan.parallelism
    if strategy.parts == 1:
        lowering = zero1.lower if strategy.sharded else data_parallel.lower
        return lowering(workload, plan, *costs)
    order = [(kind, number) for number in range(plan.accumulate) for kind in (FORWARD_EVENT, BACKWARD_EVENT)]
    return divided(workload, plan, costs, [Stage(0, len(workload.layers), order, stash=1)])
