"""From a Workload and a Plan to the Schedule of one step. One file a strategy; the fusion rules."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dpsim.errors import ConfigError
from dpsim.plan import Plan
from dpsim.registry import load
from dpsim.schedule import Schedule
from dpsim.strategy import SYNCHRONOUS, Strategy
from dpsim.workload import Workload

LOWERINGS: dict[str, str | Callable[..., Schedule]] = {
    "data-parallel": "dpsim.lowering.data_parallel:lower",
    "zero1": "dpsim.lowering.zero1:lower",
    "zero2": "dpsim.lowering.zero2:lower",
    "zero3": "dpsim.lowering.zero3:lower",
    "pipeline": "dpsim.lowering.pipeline:lower",
    "tensor": "dpsim.lowering.tensor:lower",
}
"""The function that lowers each strategy, or its ``module:name``. Its arguments are those of ``lower``."""


MOST_PASSES = 250_000
"""The most layers times micro-batches of a step: its Schedule names each, and is priced in seconds."""


def lower(
    workload: Workload,
    plan: Plan,
    ready_s: NDArray[np.float64] | None = None,
    alpha_s: float | None = None,
    beta_s_per_byte: float | None = None,
) -> Schedule:
    """Return the operations of one step of a plan, by the lowering of its strategy.

    Fusion rules that need costs take ``alpha_s`` and ``beta_s_per_byte`` (``dpsim.model.alpha_beta``), and
    ``ready_s``: seconds from the start of the last backward until each tensor is final, in ready order, which defaults
    to the Workload's times at ``plan.local_batch``. Raises ``ConfigError`` where they are missing, for
    a strategy in which devices make no step together, and beyond ``MOST_PASSES``.
    """
    check_synchronous(plan.parallelism)
    if plan.accumulate * len(workload.layers) > MOST_PASSES:
        raise ConfigError(
            f"{plan.accumulate} micro-batches of {len(workload.layers)} layers in a step",
            allowed=f"at most {MOST_PASSES // len(workload.layers)} micro-batches: {MOST_PASSES} layers in all of them",
            remedy="accumulate over fewer micro-batches; beyond a few tens a step is nearly all computation",
        )
    schedule: Schedule = load(LOWERINGS[plan.parallelism.name])(workload, plan, ready_s, alpha_s, beta_s_per_byte)
    return schedule


def check_synchronous(strategy: Strategy) -> None:
    """Raise ``ConfigError`` for a strategy in which devices make no step together."""
    if strategy.asynchronous:
        raise ConfigError(
            f"strategy {strategy.text} where a step of all devices is needed",
            allowed=f"{', '.join(SYNCHRONOUS)}; asynchronous ones by dpsim train",
            remedy="choose one of them with --strategy, or see python -m dpsim.experiments.staleness",
        )
