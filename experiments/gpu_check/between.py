"""The versions between processes, one rank a GPU (or several on one), and NCCL beside them: tasks for running ranks.

A sample is the host's time from a barrier to the end of the stream, on the slowest rank: what a training step waits
for, launches and host barriers included. The peer is timed by the same rule, in a job of its own. Rank 0 appends the
samples of a size to the file ``results`` as soon as it has them. The sizes come in the order in which they are to be
measured; after ``seconds`` the rest is left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpi4py import MPI

from dpsim.comm.cuda.available import nccl_missing, open_device
from dpsim.comm.cuda.device import Device
from dpsim.experiments.gpu_check.journal import keep
from dpsim.experiments.gpu_check.record import Mode, Samples, kept
from dpsim.experiments.turns import in_turns
from dpsim.harness.bench.gpus import Kernels, Nccl, Numbers
from dpsim.harness.bench.turns import Variant
from dpsim.harness.measurement.loop import StopRule
from dpsim.kernels.allreduce import registry
from dpsim.progress import Progress

_DTYPE = "float32"


def meet(comm: MPI.Intracomm, argument: dict[str, Any], tell: Progress) -> dict[str, Any]:
    """Return which MPI the ranks run, and on how many machines."""
    names = comm.allgather(MPI.Get_processor_name())
    return {"library": " ".join(MPI.Get_library_version().split()[:3]), "nodes": len(set(names))}


def kernels(comm: MPI.Intracomm, argument: dict[str, Any], tell: Progress) -> dict[str, Any]:
    """Time every version at ``sizes_bytes``, ``samples`` each; by which memory and mode; how many GPUs these are."""
    device = _device(comm)
    own = Kernels(comm, device)
    access, left_out = own.access, list[str]()
    versions = tuple(each.name for each in registry.versions("cuda") if each.name not in argument["without"])
    for size_bytes in _sizes(comm, argument, f"{access.mode} over {access.way} memory", tell, left_out):
        memory = own.share(size_bytes)
        variants = own.variants(memory, _DTYPE, versions)
        _keep(comm, argument, _timed(comm, device, variants, size_bytes, argument["samples"], access.mode))
        variants.clear()  # prepared launches hold what is closed now
        memory.close()
    own.close()
    gpus = len(set(comm.allgather(device.identity)))
    return {"way": access.way, "mode": access.mode, "gpus": gpus, "left_out": left_out}


def nccl(comm: MPI.Intracomm, argument: dict[str, Any], tell: Progress) -> dict[str, Any]:
    """Time NCCL's in-place allreduce, by CuPy, in the same way; ``left_out`` says why where there is none."""
    missing = comm.bcast(nccl_missing())
    if missing:
        return {"left_out": [f"NCCL between {comm.size} processes: {missing}"]}
    device = _device(comm)
    library, left_out = Nccl(comm, device), list[str]()
    for size_bytes in _sizes(comm, argument, "NCCL", tell, left_out):
        variants = [variant for variant in library.variants(size_bytes, _DTYPE) if variant.in_place]
        _keep(comm, argument, _timed(comm, device, variants, size_bytes, argument["samples"], "nccl"))
    library.close()
    return {"left_out": left_out}


def _sizes(
    comm: MPI.Intracomm, argument: dict[str, Any], how: str, tell: Progress, left_out: list[str]
) -> Iterator[int]:
    """Yield the sizes for which rank 0's time suffices; the others are left out. Collective."""
    deadline_s = time.monotonic() + argument["seconds"]
    for size_bytes in argument["sizes_bytes"]:
        where = f"{comm.size} processes of {size_bytes} bytes, {how}"
        if comm.bcast(time.monotonic() > deadline_s):
            left_out.append(f"{where}: no time left")
        else:
            tell(where)
            yield size_bytes


def _keep(comm: MPI.Intracomm, argument: dict[str, Any], samples: list[Samples]) -> None:
    if comm.rank == 0:
        keep(Path(argument["results"]), samples)


def _device(comm: MPI.Intracomm) -> Device:
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    device = open_device(node.rank)
    node.Free()
    device.use()
    return device


def _timed(
    comm: MPI.Intracomm, device: Device, variants: list[Variant], size_bytes: int, samples: int, mode: Mode
) -> list[Samples]:
    """Check each variant before it is timed and after it, in turns, its time that of the slowest rank."""
    numbers = Numbers(comm, device, size_bytes, _DTYPE)
    wrong = [comm.allreduce(numbers.wrong(variant)) for variant in variants]
    visits = {
        number: lambda variant=variant: comm.allreduce(numbers.time_s(variant), op=MPI.MAX)
        for number, variant in enumerate(variants)
    }
    times_s = in_turns(visits, StopRule(least_rounds=samples, most_rounds=samples), warm_up=0, comm=comm)
    return [
        Samples(
            algorithm=variant.algorithm,
            mode=mode,
            devices=comm.size,
            processes=comm.size,
            size_bytes=size_bytes,
            dtype=_DTYPE,
            wrong=wrong[number] + comm.allreduce(numbers.wrong(variant)),
            clock="host",
            samples_s=kept(times_s[number]),
        )
        for number, variant in enumerate(variants)
    ]
