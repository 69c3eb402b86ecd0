"""The runner of ``explain``: ranks that train a user's script, observed, and time allreduces at its end."""

from __future__ import annotations

import numpy as np

from dpsim import codec
from dpsim.comm.clock import now
from dpsim.model.observed import Observed, ObservedRank
from dpsim.network import Network
from dpsim.progress import Progress
from dpsim.study.runners.script_processes import LEAD_S, Job, Processes, shape, started
from dpsim.study.task import ObserveTask
from dpsim.torch.script.probe.in_turns.visit import Timed

_REPEATS = 5
_MOST_AT_ONCE = 64
_MOST_SIZES = 8


def observe(task: ObserveTask, job: Job, report: Progress) -> Observed:
    """Let the ranks train, observe, and time allreduces, which FSDP has none of. Raises ``DpsimError``."""
    report(f"training {task.part.steps} steps on {task.part.ranks} ranks")
    network = Network.parse(task.network)
    if network.shaped:
        job.shape(network)
    (processes,) = started(task.parts, job)
    ranks = [codec.convert(visit.taken, ObservedRank) for visit in processes.first]
    collectives = {} if ranks[0].units else _timed(processes, ranks[0])
    shape(network, job, processes)
    processes.end()
    return Observed(ranks=tuple(ranks), sizes_bytes=tuple(collectives), time_s=tuple(collectives.values()))


def _timed(processes: Processes, rank: ObservedRank) -> dict[int, float]:
    """Median seconds of an allreduce by its size, where as many are under way at once as a step has of that size."""
    total = max(sum(rank.bucket_bytes), 4)
    sizes = {total, *(size for size in rank.bucket_bytes if size), *(total // part for part in (4, 16, 64))}
    chosen = sorted(size // 4 * 4 for size in sizes if size >= 4)
    places = np.unique(np.linspace(0, len(chosen) - 1, min(len(chosen), _MOST_SIZES)).astype(int))
    return {
        size: _burst_s(processes, size, max(1, min(_MOST_AT_ONCE, total // size)), rank.dtype)
        for size in dict.fromkeys(chosen[place] for place in places)
    }


def _burst_s(processes: Processes, size: int, at_once: int, dtype: str) -> float:
    """Median seconds of one of several allreduces that are started together: from the last rank's start to its end."""
    taken_s = []
    for _ in range(1 + _REPEATS):
        ranks = len(processes.connections)
        spans = processes.time(Timed("burst", ranks, size, now() + LEAD_S, at_once, reduce_dtype=dtype))
        begun_s, ended_s = np.max(spans, axis=0)
        taken_s.append(ended_s - begun_s)
    return float(np.median(taken_s[1:])) / at_once
