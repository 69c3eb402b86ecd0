"""Waiting for the slowest: a synchronous step lasts as long as the slowest of its devices computes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpsim.workload import Workload

EXACT_DEVICES = 8
"""Up to so many devices the quantiles of a workload say what the slowest takes; beyond, a tail is assumed."""


def expected_slowest(step_spread: Sequence[float], devices: int) -> float:
    """E[max of n independent draws] of a step's relative computing time, from its k quantiles q (1 without any).

    E[max] = sum_i (F_i^n - F_{i-1}^n) q_i, F_i = (i + 1) / k, exact where steps take those k values alike. Beyond 8
    devices the k quantiles say little of the largest value: the mean of the maximum then grows as that of a light
    (exponential) tail does, by b ln(n / 8), with b from its growth between 4 and 8 devices.
    """
    if not step_spread:
        return 1.0
    if devices <= EXACT_DEVICES:
        k = len(step_spread)
        weights = [((i + 1) / k) ** devices - (i / k) ** devices for i in range(k)]
        return sum(weight * quantile for weight, quantile in zip(weights, step_spread, strict=True))
    half, whole = (expected_slowest(step_spread, count) for count in (EXACT_DEVICES // 2, EXACT_DEVICES))
    return whole + (whole - half) / math.log(2) * math.log(devices / EXACT_DEVICES)


def median_slowest(workload: Workload, devices: int) -> float:
    """The median over steps of the largest of ``devices`` independent computing times, over the median of one.

    All n are below the value that one is below with probability F with probability F^n, so it is the value at
    F = 0.5^(1/n). Synchronous training waits for the slowest device, and a measured step is a median.
    """
    return workload.spread_at(0.5 ** (1 / devices))
