"""The versions between processes, one rank a GPU (or several on one), and NCCL beside them: tasks for running ranks.

A sample is the host's time from a barrier to the end of the stream, on the slowest rank: what a training step waits
for, launches and host barriers included. The peer is timed by the same rule, in a job of its own. Rank 0 appends the
samples of a size to the file ``results`` as soon as it has them. The sizes come in the order in which they are to be
measured; after ``seconds`` the rest is left out.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from mpi4py import MPI

from dpsim.comm.cuda.available import nccl_missing
from dpsim.experiments.gpu_check.journal import keep
from dpsim.experiments.gpu_check.record import Mode, Samples, kept
from dpsim.kernels.allreduce import registry
from dpsim.progress import Progress
from dpsim.study.loop import StopRule, in_turns
from dpsim.study.runners.allreduce.cuda import GpuRank, KernelRank, NcclRank
from dpsim.study.runners.allreduce.turns import Burst

_DTYPE = "float32"


def meet(comm: MPI.Intracomm, argument: dict[str, Any], tell: Progress) -> dict[str, Any]:
    """Return which MPI the ranks run, and on how many machines."""
    names = comm.allgather(MPI.Get_processor_name())
    return {"library": " ".join(MPI.Get_library_version().split()[:3]), "nodes": len(set(names))}


def kernels(comm: MPI.Intracomm, argument: dict[str, Any], tell: Progress) -> dict[str, Any]:
    """Time every version at ``sizes_bytes``, ``samples`` each; by which memory and mode; how many GPUs these are."""
    versions = [each.name for each in registry.versions("cuda") if each.name not in argument["without"]]
    own = KernelRank(comm, {"dtype": _DTYPE, "algorithms": versions})
    access = own.access
    left_out = _measured(own, argument, access.mode, f"{access.mode} over {access.mapping} memory", tell)
    gpus = len(set(comm.allgather(own.device.identity)))
    return {"way": access.mapping, "mode": access.mode, "gpus": gpus, "left_out": left_out}


def nccl(comm: MPI.Intracomm, argument: dict[str, Any], tell: Progress) -> dict[str, Any]:
    """Time NCCL's in-place allreduce, by CuPy, in the same way; ``left_out`` says why where there is none."""
    missing = comm.bcast(nccl_missing())
    if missing:
        return {"left_out": [f"NCCL between {comm.size} processes: {missing}"]}
    library = NcclRank(comm, {"dtype": _DTYPE, "algorithms": []})
    return {"left_out": _measured(library, argument, "nccl", "NCCL", tell)}


def _measured(gpu: GpuRank, argument: dict[str, Any], mode: Mode, how: str, tell: Progress) -> list[str]:
    """Keep the samples of the sizes for which rank 0's time suffices; returns what is left out. Collective."""
    comm, left_out = gpu.comm, list[str]()
    deadline_s = time.monotonic() + argument["seconds"]
    for size_bytes in argument["sizes_bytes"]:
        where = f"{comm.size} processes of {size_bytes} bytes, {how}"
        if comm.bcast(time.monotonic() > deadline_s):
            left_out.append(f"{where}: no time left")
            continue
        tell(where)
        samples = _timed(gpu, size_bytes, argument["samples"], mode)
        if comm.rank == 0:
            keep(Path(argument["results"]), samples)
    gpu.close()
    return left_out


def _timed(gpu: GpuRank, size_bytes: int, samples: int, mode: Mode) -> list[Samples]:
    """Check each variant in place before it is timed and after each call, in turns; times are of the slowest rank."""
    comm = gpu.comm
    checked = [(variant, wrong) for variant, wrong in gpu.check(size_bytes, 0) if variant.in_place]
    visits = {
        number: lambda variant=variant: gpu.burst(variant, Burst()) for number, (variant, _) in enumerate(checked)
    }
    taken = in_turns(visits, StopRule(least_rounds=samples, most_rounds=samples), warm_up=0, comm=comm)
    return [
        Samples(
            algorithm=variant.algorithm,
            mode=mode,
            devices=comm.size,
            processes=comm.size,
            size_bytes=size_bytes,
            dtype=_DTYPE,
            wrong=comm.allreduce(wrong + sum(wrong_elements for _, wrong_elements in taken[number])),
            clock="host",
            samples_s=kept([comm.allreduce(time_ns, op=MPI.MAX) * 1e-9 for (time_ns,), _ in taken[number]]),
        )
        for number, (variant, wrong) in enumerate(checked)
    ]
