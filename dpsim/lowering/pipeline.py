"""Pipeline: stages of neighbouring layers, each on devices of its own, through which the micro-batches of a step flow.

Sources: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (2019); for 1f1b
Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training" (2019), with a flush at each update as
in "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021).
"""

from __future__ import annotations

import itertools
from typing import cast

import numpy as np
from numpy.typing import NDArray

from dpsim.lowering import data_parallel, zero1
from dpsim.lowering.buckets import Costs
from dpsim.lowering.divided import Stage, divided
from dpsim.lowering.stages import stage_bounds, stash
from dpsim.plan import Plan
from dpsim.schedule import BACKWARD_EVENT, FORWARD_EVENT, Schedule
from dpsim.strategy import Pipeline
from dpsim.workload import Workload


def lower(
    workload: Workload,
    plan: Plan,
    ready_s: NDArray[np.float64] | None = None,
    alpha_s: float | None = None,
    beta_s_per_byte: float | None = None,
) -> Schedule:
    """Return the operations of one step (see ``dpsim.lowering.lower``): those of its stages (``divided``).

    With ``recompute`` all stages but the last compute a micro-batch's forward again before its backward, while the
    gradient of their output travels.

    With one stage of one part it is the schedule of data parallelism, or of ``dpsim.lowering.zero1``. Raises
    ``ConfigError`` as ``stage_bounds`` and ``divided`` do.
    """
    costs, strategy = Costs(ready_s, alpha_s, beta_s_per_byte), cast(Pipeline, plan.parallelism)
    if strategy.classes == 1:
        lowering = zero1.lower if strategy.sharded else data_parallel.lower
        return lowering(workload, plan, *costs)
    stages = [
        Stage(
            first,
            stop,
            stage_order(plan, number),
            stash(plan, number),
            recompute=strategy.recompute and number + 1 < strategy.stages,
        )
        for number, (first, stop) in enumerate(itertools.pairwise(stage_bounds(workload, plan)))
    ]
    return divided(workload, plan, costs, stages)


def stage_order(plan: Plan, stage: int) -> list[tuple[int, int]]:
    """Return (``FORWARD_EVENT`` or ``BACKWARD_EVENT``, micro-batch) in the order in which a stage computes them.

    ``gpipe``: all forwards, then all backwards. ``1f1b``: as many forwards as the stage may have in flight, less one;
    then one forward and one backward in turns; then the other backwards.
    """
    ahead = stash(plan, stage) - 1
    forwards = [(FORWARD_EVENT, number) for number in range(plan.accumulate)]
    backwards = [(BACKWARD_EVENT, number) for number in range(plan.accumulate)]
    turns = itertools.chain(*zip(forwards[ahead:], backwards, strict=False))
    return [*forwards[:ahead], *turns, *backwards[plan.accumulate - ahead :]]
