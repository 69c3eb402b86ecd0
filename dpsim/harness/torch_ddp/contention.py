"""One-process profiles of a script: one alone, and several at once that wait in each step as for an allreduce.

Their ratio is how much longer computation takes on several devices of this machine. Nothing is communicated.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass

import msgspec

from dpsim.launch import child_process
from dpsim.machine import ComputeSlowdown, Machine
from dpsim.progress import Progress
from dpsim.study.profile import joined_slowdown
from dpsim.torch_ddp.profile_script import profile_script
from dpsim.torch_ddp.request import ScriptRequest
from dpsim.torch_ddp.tables import joined
from dpsim.workload import Workload

_MOST_STEPS = 600
_LONGEST_PAUSE_S = 150e-3


@dataclass(frozen=True)
class Effort:
    """How long each profile trains, and how often each is repeated."""

    seconds: float
    repeats: int


def computed_s(workload: Workload) -> float:
    """Seconds of a step on one device: everything but communication and waiting for input."""
    times = workload.times(workload.local_batches[0])
    accumulate = 1 if workload.ddp is None else workload.ddp.accumulate
    passes_s = float(times.forward_s.sum() + times.backward_s.sum())
    return accumulate * passes_s + workload.update_s + times.overhead_s


def profiled_on_cores(request: ScriptRequest, devices: int) -> list[Workload]:
    """Profile a script in ``devices`` processes at once, each pinned to a core as a rank would be.

    If one of them fails, or a signal ends the command, all are ended.
    """
    cores = sorted(os.sched_getaffinity(0))

    def on_core(number: int) -> Workload:
        os.sched_setaffinity(0, {cores[number % len(cores)]})  # of this thread, and of what it starts
        return profile_script(request)

    with ThreadPoolExecutor(max_workers=devices) as threads:
        futures = [threads.submit(on_core, number) for number in range(devices)]
        try:
            for future in as_completed(futures):
                future.result()  # or its exception, as soon as there is one
            return [future.result() for future in futures]
        except BaseException:
            while wait(futures, timeout=0.1).not_done:  # one may be about to start its process
                child_process.end_all()
            raise


def profiled(
    requests: Sequence[ScriptRequest],
    steps_s: Sequence[float],
    machines: Sequence[Machine],
    effort: Effort,
    progress: Progress,
) -> tuple[Workload, list[Machine]]:
    """The median profiles of one process, joined, and the machines with how much longer several at once compute.

    ``requests`` differ in their local batch; a step of each takes about ``steps_s``. Several at once are profiled at
    the first and the last of them, and wait in each step for as long as an allreduce of all gradients takes on the
    machine. All alternate, for the machine's speed changes by itself.
    """
    ends = sorted({0, len(requests) - 1})
    alone: list[list[Workload]] = [[] for _ in requests]
    together: dict[tuple[int, int, int], list[list[Workload]]] = defaultdict(list)
    for repeat in range(effort.repeats):
        progress(f"profiling one process and several at once, {repeat + 1} of {effort.repeats}")
        for batch, (request, step_s) in enumerate(zip(requests, steps_s, strict=True)):
            alone[batch] += profiled_on_cores(_longer(request, step_s, effort.seconds), 1)
            for number, machine in enumerate(machines if batch in ends else ()):
                for table in machine.allreduce:
                    paused = _longer(request, step_s, effort.seconds, pause_s=table.time_s[-1])
                    together[number, table.devices, batch].append(profiled_on_cores(paused, table.devices))
    medians = [_median_profile(profiles) for profiles in alone]
    slower = []
    for number, machine in enumerate(machines):
        slowdowns = tuple(
            joined_slowdown(
                [
                    (computed_s(medians[batch]), compute_slowdown(medians[batch], together[number, devices, batch]))
                    for batch in ends
                ]
            )
            for devices in dict.fromkeys(table.devices for table in machine.allreduce)
        )
        slower.append(msgspec.structs.replace(machine, compute_slowdown=slowdowns))
    return joined(medians), slower


def _longer(request: ScriptRequest, step_s: float, seconds: float, pause_s: float = 0.0) -> ScriptRequest:
    """The request with as many steps as take ``seconds``, so that the start hardly counts, and a pause in each."""
    pause_s = min(pause_s, _LONGEST_PAUSE_S)
    steps = round(seconds / max(step_s + pause_s, 1e-6))
    return msgspec.structs.replace(request, steps=min(max(request.steps, steps), _MOST_STEPS), pause_s=pause_s)


def _median_profile(profiles: Sequence[Workload]) -> Workload:
    """The profile whose step is the median one; the shorter of two."""
    return sorted(profiles, key=computed_s)[(len(profiles) - 1) // 2]


def compute_slowdown(alone: Workload, together: Sequence[Sequence[Workload]]) -> ComputeSlowdown:
    """The slowdown of the slowest of several profiles at once, the median over repeats, against one profile ``alone``.

    A device alone is at least as fast.
    """
    factors = [max(map(computed_s, profiles)) / computed_s(alone) for profiles in together]
    scatter = statistics.stdev(factors) / math.sqrt(len(factors)) if len(factors) > 1 else 0.0
    return ComputeSlowdown(
        devices=len(together[0]), factor=max(statistics.median(factors), 1.0), half_width=1.96 * scatter
    )
