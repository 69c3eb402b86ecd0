"""Several tasks in one job, each on the first ranks of its own number of devices: starting ranks takes longer."""

from __future__ import annotations

import time
from typing import Any

from mpi4py import MPI

from dpsim.launch.rank_process import load
from dpsim.progress import Progress

_LOOK_S = 0.005


def together(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[Any]:
    """Rank 0's results of tasks (name, argument, devices), one after another; ranks without a part sleep."""
    results = []
    for task, given, devices in argument["tasks"]:
        some = comm.Split(0 if comm.rank < devices else MPI.UNDEFINED, comm.rank)
        if some != MPI.COMM_NULL:
            results.append(load(task)(some, given, report))
        ended = comm.Ibarrier()
        while not ended.Test():
            time.sleep(_LOOK_S)
    return results
