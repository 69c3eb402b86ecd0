"""The buckets of a plan: its fusion rule, applied to the gradient tensors of its workload or of a part of it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpsim.fusion_rules import FUSION_RULES
from dpsim.lowering.computation import ready_times
from dpsim.lowering.fusion import Ints, fuse
from dpsim.plan import Plan
from dpsim.workload import Workload

_ALL = slice(None)


class Costs(NamedTuple):
    """The costs that rules ask for, as ``dpsim.lowering.lower`` takes it."""

    ready_s: NDArray[np.float64] | None = None
    alpha_s: float | None = None
    beta_s_per_byte: float | None = None


def fused(workload: Workload, plan: Plan, costs: Costs, part: slice | Ints = _ALL) -> Ints:
    """Return where the buckets of a part of the ready order begin, counted in the part, and the end of the last.

    On one device the buckets say how memory is laid out: a rule that needs costs has nothing to decide there and makes
    one. Under a rule that decides while running every tensor is a bucket of its own.
    """
    order = workload.ready_order
    name, rule = plan.fusion_rule, FUSION_RULES.find(plan.fusion_rule)
    ready_s = costs.ready_s
    if rule.while_running:
        name = "per-tensor"
    elif rule.needs_costs:
        if plan.data_devices == 1:
            name = "one"
        elif ready_s is None:
            ready_s = ready_times(workload, plan.local_batch)
    return fuse(
        order.size_bytes[part],
        name,
        plan.fusion_threshold_bytes,
        ready_s=None if ready_s is None else ready_s[part],
        alpha_s=costs.alpha_s,
        beta_s_per_byte=costs.beta_s_per_byte,
        dtype_code=order.dtype_code[part],
    )
