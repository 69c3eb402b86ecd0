"""The runner of ``explain``: ranks that train a user's script, observed, and time allreduces at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from dpsim import codec
from dpsim.comm.clock import now
from dpsim.comm.group import quiet_barrier
from dpsim.comm.networks import transport
from dpsim.machine import Network
from dpsim.model.observed import Observed, ObservedRank
from dpsim.progress import Progress
from dpsim.study.task import ObserveTask
from dpsim.torch.script.observed import Observer, by_gloo
from dpsim.torch.script.probe import process_group
from dpsim.torch.script.probe.in_turns.part import become, run_script
from dpsim.torch.script.probe.run_script import install
from dpsim.torch.script.reductions import MpiReduction

_REPEATS = 5
_MOST_AT_ONCE = 64


def observe_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """Train, observe, and time allreduces; world rank 0 returns an ``Observed``. Raises ``ConfigError``."""
    task = codec.decode(argument, ObserveTask, "task")
    network = Network.parse(task.network)
    reduction = MpiReduction(transport(comm, network), "ring", "thread") if network.emulated else None
    become(comm.rank, comm.size)
    process_group.connect(str(Path(task.meeting) / "ranks"), comm.rank, comm.size)
    reduce = None if reduction is None else reduction.reduce
    collectives: dict[int, float] = {}
    observer = Observer(task.steps, lambda each: collectives.update(_timed(comm, reduce or by_gloo, each.rank)), reduce)
    install(observer, bucket_cap_bytes=task.bucket_cap_bytes)
    quiet_barrier(comm)
    report(f"training {task.steps} steps on {comm.size} ranks")
    run_script(task.script, task.arguments, observer)
    if reduction is not None:
        reduction.close()
    process_group.disconnect()
    ranks = comm.gather(codec.to_builtins(observer.rank))
    if ranks is None:
        return None
    observed = Observed(
        ranks=tuple(codec.decode(each, ObservedRank, "rank") for each in ranks),
        sizes_bytes=tuple(collectives),
        time_s=tuple(collectives.values()),
    )
    return dict(codec.to_builtins(observed))


def _timed(comm: MPI.Intracomm, reduce: Any, rank: ObservedRank) -> dict[int, float]:
    """Median seconds of an allreduce by its size, where as many are under way at once as a step has of that size."""
    total = max(sum(rank.bucket_bytes), 4)
    sizes = {total, *(size for size in rank.bucket_bytes if size), *(total // part for part in (4, 16, 64))}
    chosen = sorted(size // 4 * 4 for size in sizes if size >= 4)
    places = np.unique(np.linspace(0, len(chosen) - 1, min(len(chosen), 8)).astype(int))
    found = {}
    for size in dict.fromkeys(chosen[place] for place in places):
        tensors = [torch.zeros(size // 4) for _ in range(max(1, min(_MOST_AT_ONCE, total // size)))]
        found[size] = _burst(comm, reduce, tensors)
    return found


def _burst(comm: MPI.Intracomm, reduce: Any, tensors: list[Any]) -> float:
    """Median seconds of one of several allreduces that are started together: from the last rank's start to its end."""
    spans = []
    for _ in range(1 + _REPEATS):
        comm.Barrier()
        began_s = now()
        for future in [reduce(tensor) for tensor in tensors]:
            future.wait()
        spans.append((began_s, now()))
    begun_s, ended_s = np.max(comm.allgather(spans), axis=0)[1:].T
    return float(np.median(ended_s - begun_s)) / len(tensors)
