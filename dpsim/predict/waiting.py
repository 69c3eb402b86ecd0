"""How much longer the slowest of several devices computes, whose computing times vary from step to step."""

from __future__ import annotations

from dpsim.workload import Workload


def median_slowest(workload: Workload, devices: int) -> float:
    """The median over steps of the largest of ``devices`` independent computing times, over the median of one.

    All n are below the value that one is below with probability F with probability F^n, so it is the value at
    F = 0.5^(1/n). Synchronous training waits for the slowest device, and a measured step is a median.
    """
    return workload.spread_at(0.5 ** (1 / devices))
