"""How much longer a script's computation takes when several devices of this machine compute at once, and wait at times.

It runs as many one-process profiles at once, each on a core of its own. Nothing is communicated.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from dpsim.machine import ComputeSlowdown
from dpsim.torch_ddp.profile_script import profile_script
from dpsim.torch_ddp.request import ScriptRequest
from dpsim.workload import Workload

_PROFILE_S = 3.0
_MOST_STEPS = 600
_LONGEST_PAUSE_S = 50e-3


def computed_s(workload: Workload) -> float:
    """Seconds of a step on one device: everything but communication and waiting for input."""
    times = workload.times(workload.local_batches[0])
    accumulate = 1 if workload.ddp is None else workload.ddp.accumulate
    passes_s = float(times.forward_s.sum() + times.backward_s.sum())
    return accumulate * passes_s + workload.update_s + times.overhead_s


def profiled_on_cores(request: ScriptRequest, devices: int) -> list[Workload]:
    """So many profiles of a script at once, each pinned to a core as a rank would be."""
    cores = sorted(os.sched_getaffinity(0))

    def profiled(number: int) -> Workload:
        os.sched_setaffinity(0, {cores[number % len(cores)]})  # of this thread, and of what it starts
        return profile_script(request)

    with ThreadPoolExecutor(max_workers=devices) as threads:
        return list(threads.map(profiled, range(devices)))


def longer(request: ScriptRequest, step_s: float, pause_s: float = 0.0) -> ScriptRequest:
    """The request with so many steps that the times of the script's start do not matter, and with a pause in each."""
    pause_s = min(pause_s, _LONGEST_PAUSE_S)
    steps = round(_PROFILE_S / max(step_s + pause_s, 1e-6))
    return msgspec.structs.replace(request, steps=min(max(request.steps, steps), _MOST_STEPS), pause_s=pause_s)


def median_profile(profiles: Sequence[Workload]) -> Workload:
    """The profile whose step is the median one; the shorter of two."""
    return sorted(profiles, key=computed_s)[(len(profiles) - 1) // 2]


def compute_slowdown(alone: Workload, together: Sequence[Sequence[Workload]]) -> ComputeSlowdown:
    """The slowdown of the slowest of several profiles at once, the median over repeats, against one profile ``alone``.

    A device alone is at least as fast.
    """
    slowest_s = [max(map(computed_s, profiles)) for profiles in together]
    factors = [seconds / computed_s(alone) for seconds in slowest_s]
    scatter = statistics.stdev(factors) / math.sqrt(len(factors)) if len(factors) > 1 else 0.0
    return ComputeSlowdown(
        devices=len(together[0]), factor=max(statistics.median(factors), 1.0), half_width=1.96 * scatter
    )
