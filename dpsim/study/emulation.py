"""How well the ranks of an emulated setting keep their times, and the refusal of a run in which they cannot."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from dpsim.comm.clock import now
from dpsim.errors import DpsimError
from dpsim.machine import Machine
from dpsim.model.cost import added_s, compute_slowdown
from dpsim.plan import Plan
from dpsim.records.sweep import Emulation
from dpsim.setting import Setting
from dpsim.study.steps import COUNTED_STEPS
from dpsim.workload import Workload

LEAST_FREE_CORES = 0.15
MOST_LATENESS = 0.03
"""Relative to the step."""
_LEAST_VISITS = 3
VISITS_AT_MOST = 5
"""How often a visit is made until other programs leave its ranks in time."""
_PAUSE_S = 0.25


class Watched(NamedTuple):
    """What one rank saw in a visit: when it began and ended, its CPU time, and how late it met each moment."""

    begin_s: float
    end_s: float
    cpu_s: float
    lateness_s: list[float]


def _free_cores(ranks: Sequence[Watched], cores: int) -> float:
    """The share of the cores' time in which no rank of a visit ran."""
    return 1 - sum(rank.cpu_s for rank in ranks) / (_wall_s(ranks) * cores)


def _wall_s(ranks: Sequence[Watched]) -> float:
    return max(rank.end_s for rank in ranks) - min(rank.begin_s for rank in ranks)


class Watch:
    """Watches one rank during a visit, from its construction until ``seen``."""

    def __init__(self) -> None:
        self._begin_s, self._cpu_s = now(), time.process_time()
        self._lateness_s: list[float] = []

    def step(self, lateness_s: Sequence[float]) -> None:
        """Keep how late the moments of one step were met."""
        self._lateness_s += lateness_s

    def seen(self) -> Watched:
        """What was seen so far."""
        return Watched(self._begin_s, now(), time.process_time() - self._cpu_s, self._lateness_s)


class EmulationLog:
    """What the ranks of one setting saw in its visits; on rank 0."""

    def __init__(self, before: Emulation | None = None) -> None:
        self._before = before
        self._lateness_s: list[float] = []
        self._free_cores: list[float] = []
        self._repeated = before.repeated_visits if before else 0

    def repeats(self, ranks: Sequence[Watched], cores: int, attempt: int) -> bool:
        """Whether a visit of all ranks on a machine with so many cores is to be made again, after a pause.

        It is where the ranks left the cores free and yet were late: something else had the cores for a while. Attempts
        count from 0.
        """
        lateness_s = [late_s for rank in ranks for late_s in rank.lateness_s]
        if not lateness_s or attempt + 1 >= VISITS_AT_MOST or _free_cores(ranks, cores) < LEAST_FREE_CORES:
            return False
        if statistics.median(lateness_s) <= MOST_LATENESS * _wall_s(ranks) / COUNTED_STEPS:
            return False
        self._repeated += 1
        time.sleep(_PAUSE_S)
        return True

    def visited(self, ranks: Sequence[Watched], cores: int) -> None:
        """Keep a visit of all ranks of the setting on a machine with so many cores."""
        self._free_cores.append(_free_cores(ranks, cores))
        for rank in ranks:
            self._lateness_s += rank.lateness_s

    def result(self) -> Emulation | None:
        """What was seen in this run, or in the one that it continues; ``None`` before the first visit."""
        if not self._free_cores:
            return self._before
        median_s, p95_s = np.percentile(self._lateness_s, (50, 95)).tolist()
        return Emulation(
            lateness_s=median_s,
            lateness_p95_s=p95_s,
            lateness_most_s=max(self._lateness_s),
            free_cores=float(np.median(self._free_cores)),
            repeated_visits=self._repeated,
        )

    def check(self, setting: Setting, step_s: Sequence[float]) -> None:
        """Raise ``DpsimError`` where the ranks have too little time on the cores to keep to the emulated times."""
        seen = self.result()
        if seen is not None and step_s and len(self._free_cores) >= _LEAST_VISITS:
            check_emulation(seen, setting, float(np.median(step_s)))


def check_emulation(seen: Emulation, setting: Setting, step_s: float) -> None:
    """Raise ``DpsimError`` unless the cores were free enough, and moments met in time, for a step of ``step_s``."""
    remedy = (
        "what was measured of other settings stays; use fewer devices, larger fusion thresholds, or a link of longer "
        "latency or lower bandwidth, or stop other processes"
    )
    if seen.free_cores < LEAST_FREE_CORES:
        raise DpsimError(
            f"emulated compute on {setting.describe()}: the cores are free for {seen.free_cores:.0%} of the time, so "
            "that ranks wait for cores and not for what is emulated",
            allowed=f"{LEAST_FREE_CORES:.0%} or more",
            remedy=remedy,
        )
    if seen.lateness_s > MOST_LATENESS * step_s:
        raise DpsimError(
            f"emulated compute on {setting.describe()}: layers end {seen.lateness_s / step_s:.1%} of a step too late, "
            "by the median",
            allowed=f"{MOST_LATENESS:.0%} of the step ({step_s * 1e3:.3g} ms) or less",
            remedy=remedy,
        )


def machine_cores() -> int:
    """The number of cores of this machine, also on a rank that is pinned to one of them."""
    return os.cpu_count() or 1


def emulated_workload(workload: Workload, machine: Machine, plan: Plan) -> Workload:
    """Return what the ranks wait for: the workload's computation, as slow as on all devices at once, and its input."""
    factor, _ = compute_slowdown(machine, plan.devices, plan.layout)
    slowed = workload.slowed(factor)
    return msgspec.structs.replace(
        slowed,
        overhead_s=slowed.overhead_s + added_s(machine, plan.devices),
        overhead_per_sample_s=slowed.overhead_per_sample_s + workload.input_s(plan.accumulate),
        input_s_per_sample=0.0,
        emulated_compute=True,
    )
