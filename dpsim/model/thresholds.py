"""Fusion thresholds: those that make different buckets of a plan, and the fastest."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from msgspec.structs import replace

from dpsim.fusion_rules import threshold_rules
from dpsim.machine import Machine
from dpsim.model.step import price, scheduled
from dpsim.plan import Plan
from dpsim.workload import Workload

LEAST_CAP_BYTES = 2.0**10
"""The smallest cap above 0 that is compared."""
T = TypeVar("T")


def caps_up_to_all(workload: Workload, least_bytes: float) -> list[float]:
    """Return 0 and caps, each twice the one before, from ``least_bytes`` to the first that holds all gradients."""
    last = math.ceil(math.log2(max(workload.gradient_bytes, least_bytes)))
    return [0.0, *(2.0**power for power in range(int(math.log2(least_bytes)), last + 1))]


def distinguishing(caps: Iterable[T], buckets: Callable[[T], Hashable]) -> list[T]:
    """Return the first cap of each list of buckets: others would only repeat a price or a measurement."""
    by_buckets: dict[Hashable, T] = {}
    for cap in caps:
        by_buckets.setdefault(buckets(cap), cap)
    return list(by_buckets.values())


def plan_thresholds(
    workload: Workload, machine: Machine, plan: Plan, least_bytes: float = LEAST_CAP_BYTES
) -> list[float | None]:
    """Return the thresholds that make different buckets of a plan, its own first.

    Where buckets are decided while running, those that take different times.
    """
    own = plan.fusion_threshold_bytes
    if plan.data_devices == 1 or plan.fusion_rule not in threshold_rules():
        return [own]

    def buckets(threshold: float | None) -> Hashable:
        schedule = scheduled(workload, machine, replace(plan, fusion_threshold_bytes=threshold))
        if schedule.dynamic:
            return price(schedule, machine).step_s
        return tuple(schedule.bucket_size_bytes.tolist())

    return distinguishing((own, *caps_up_to_all(workload, least_bytes)), buckets)
