"""How much longer a script's computation takes when several devices of this machine compute at once.

It runs as many one-process profiles at once, each on a core of its own. Nothing is communicated.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from dpsim.machine import ComputeSlowdown
from dpsim.torch_ddp.profile_script import profile_script
from dpsim.torch_ddp.request import ScriptRequest
from dpsim.workload import Workload

_TOGETHER_S = 3.0
_MOST_STEPS = 600


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


def compute_slowdown(request: ScriptRequest, alone: Sequence[Workload], devices: int) -> ComputeSlowdown:
    """The slowdown of the slowest of ``devices`` profiles at once against ``alone``, profiles on one core.

    They take so many steps that the times of their start do not matter. The least of as many repeats counts as there
    are of ``alone``, on both sides: other programs only ever make them longer.
    """
    alone_s = min(map(computed_s, alone))
    steps = min(max(request.steps, round(_TOGETHER_S / max(alone_s, 1e-6))), _MOST_STEPS)
    longer = msgspec.structs.replace(request, steps=steps)
    slowest_s = min(max(map(computed_s, profiled_on_cores(longer, devices))) for _ in alone)
    return ComputeSlowdown(devices=devices, factor=max(slowest_s / alone_s, 1.0))
