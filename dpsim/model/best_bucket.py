"""Which fusion threshold is predicted to be the fastest, and what it gains."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import msgspec

from dpsim.collective import parse_devices
from dpsim.errors import ConfigError
from dpsim.fusion_rules import threshold_rules
from dpsim.machine import Machine
from dpsim.model.defaults import for_prediction
from dpsim.model.interval import predict_with_interval, ratio_interval
from dpsim.model.inverse import Prepare
from dpsim.model.points import Record, plan_one, predict_points
from dpsim.setting import Grid
from dpsim.workload import Workload

_LEAST_BYTES, _RATIO = 2**12, math.sqrt(2)


@dataclass(frozen=True, kw_only=True)
class BestBucket:
    """The fastest fusion threshold in bytes, and how many times as fast it is as without one being named.

    ``alike`` are the ends of the thresholds around it whose difference from it is within its uncertainty. ``point`` and
    ``summary`` are those of ``predict_points``.
    """

    point: Record
    summary: Record
    default_step_s: float
    alike: tuple[float, float]
    ratio: float
    ratio_low: float
    ratio_high: float


def best_bucket(workload: Workload, machine: Machine, grid: Grid, prepare: Prepare | None = None) -> BestBucket:
    """Return the fastest fusion threshold of a rule, beside what the rule does without one.

    Thresholds from 4 KiB to all gradients are tried, each the square root of 2 times the one before, with 0 and inf.
    The grid has one setting. Raises ``ConfigError``, also for a rule without a
    threshold.
    """
    prepared = functools.partial(for_prediction, workload) if prepare is None else prepare
    known = prepared(machine, [parse_devices(grid.value("devices"))[0]])
    plan = plan_one(workload, known, grid)[0]
    if plan.fusion_rule not in threshold_rules():
        raise ConfigError(
            f"the best bucket of rule {plan.fusion_rule!r}, which has no threshold",
            allowed=", ".join(threshold_rules()),
        )
    doublings = 2 * max(math.log2(max(workload.gradient_bytes, 1) / _LEAST_BYTES), 0)
    sizes = [float(round(_LEAST_BYTES * _RATIO**step / 1024) * 1024) for step in range(math.floor(doublings) + 1)]
    tried = [0.0, *sizes, math.inf]
    varied = grid.changed(overlap=plan.overlap, fusion_threshold_bytes=tuple(tried))
    points, summary = predict_points(workload, known, varied)
    best_bytes, near = (summary["best"][0][key] for key in ("fusion_threshold_bytes", "equally_fast_bytes"))
    alike = [best_bytes]
    for side in (tried[tried.index(best_bytes) :: -1], tried[tried.index(best_bytes) :]):
        alike += itertools.takewhile(near.__contains__, side[1:])
    fastest = msgspec.structs.replace(plan, fusion_threshold_bytes=best_bytes)
    before, after = (predict_with_interval(workload, known, each) for each in (plan, fastest))
    low, high = ratio_interval(before, after)
    return BestBucket(
        point=next(point for point in points if point["fusion_threshold_bytes"] == best_bytes),
        summary=summary,
        default_step_s=before[0].step_s,
        alike=(min(alike), max(alike)),
        ratio=before[0].step_s / after[0].step_s if after[0].step_s > 0 else 1.0,
        ratio_low=low,
        ratio_high=high,
    )
