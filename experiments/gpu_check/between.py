"""The versions between processes, one rank a GPU (or several on one), and NCCL beside them: tasks for running ranks.

A sample is the host's time from a barrier to the end of the stream, on the slowest rank: what a training step waits
for, launches and host barriers included. The peer is timed by the same rule, in a job of its own. Rank 0 appends the
samples of a size to the file ``results`` as soon as it has them. The sizes come in the order in which they are to be
measured; after ``seconds`` the rest is left out.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from mpi4py import MPI

from dpsim.comm.cuda.available import nccl_missing, open_device
from dpsim.comm.cuda.device import Device
from dpsim.experiments.gpu_check.journal import keep
from dpsim.experiments.gpu_check.record import Mode, Samples, kept
from dpsim.harness.bench.gpus import Kernels, Nccl, Numbers
from dpsim.harness.bench.turns import Variant
from dpsim.kernels.allreduce import registry
from dpsim.progress import Progress

_DTYPE = "float32"


def meet(comm: MPI.Intracomm, argument: dict[str, Any], tell: Progress) -> dict[str, Any]:
    """Which MPI the ranks run, and on how many machines."""
    names = comm.allgather(MPI.Get_processor_name())
    return {"library": " ".join(MPI.Get_library_version().split()[:3]), "nodes": len(set(names))}


def kernels(comm: MPI.Intracomm, argument: dict[str, Any], tell: Progress) -> dict[str, Any]:
    """Samples of every version at ``sizes_bytes``, ``samples`` each; by which way and mode; how many GPUs these are."""
    deadline_s = time.monotonic() + argument["seconds"]
    device = open_device(_number(comm))
    device.use()
    own = Kernels(comm, device)
    access, left_out = own.access, list[str]()
    versions = tuple(each.name for each in registry.versions("cuda") if each.name not in argument["without"])
    for size_bytes in argument["sizes_bytes"]:
        where = f"{comm.size} processes of {size_bytes} bytes, {access.mode} over {access.way} memory"
        if _late(comm, deadline_s):
            left_out.append(f"{where}: no time left")
            continue
        tell(where)
        memory = own.share(size_bytes)
        variants = own.variants(memory, _DTYPE, versions)
        _keep(comm, argument, _timed(comm, device, variants, size_bytes, argument["samples"], access.mode))
        variants.clear()  # prepared launches hold what is closed now
        memory.close()
    own.close()
    gpus = len(set(comm.allgather(device.identity)))
    return {"way": access.way, "mode": access.mode, "gpus": gpus, "left_out": left_out}


def nccl(comm: MPI.Intracomm, argument: dict[str, Any], tell: Progress) -> dict[str, Any]:
    """The same of NCCL's in-place allreduce, by CuPy; ``left_out`` says why where there is none."""
    deadline_s = time.monotonic() + argument["seconds"]
    missing = comm.bcast(nccl_missing())
    if missing:
        return {"left_out": [f"NCCL between {comm.size} processes: {missing}"]}
    device = open_device(_number(comm))
    device.use()
    library, left_out = Nccl(comm, device), list[str]()
    for size_bytes in argument["sizes_bytes"]:
        where = f"{comm.size} processes of {size_bytes} bytes, NCCL"
        if _late(comm, deadline_s):
            left_out.append(f"{where}: no time left")
            continue
        tell(where)
        variants = [variant for variant in library.variants(size_bytes, _DTYPE) if variant.in_place]
        _keep(comm, argument, _timed(comm, device, variants, size_bytes, argument["samples"], "nccl"))
    library.close()
    return {"left_out": left_out}


def _late(comm: MPI.Intracomm, deadline_s: float) -> bool:
    """Whether rank 0's time is over. Collective."""
    late: bool = comm.bcast(time.monotonic() > deadline_s)
    return late


def _keep(comm: MPI.Intracomm, argument: dict[str, Any], samples: list[Samples]) -> None:
    if comm.rank == 0:
        keep(Path(argument["results"]), samples)


def _number(comm: MPI.Intracomm) -> int:
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    number: int = node.rank
    node.Free()
    return number


def _timed(
    comm: MPI.Intracomm, device: Device, variants: list[Variant], size_bytes: int, samples: int, mode: Mode
) -> list[Samples]:
    """Each checked before it is timed and after it, in turns, its time that of the slowest rank."""
    numbers = Numbers(comm, device, size_bytes, _DTYPE)
    bad = [comm.allreduce(numbers.wrong(variant)) for variant in variants]
    times: list[list[float]] = [[] for _ in variants]
    for number in _turns(len(variants), samples):
        times[number].append(comm.allreduce(numbers.time_s(variants[number]), op=MPI.MAX))
    return [
        Samples(
            algorithm=variant.algorithm,
            mode=mode,
            devices=comm.size,
            processes=comm.size,
            size_bytes=size_bytes,
            dtype=_DTYPE,
            wrong=before + comm.allreduce(numbers.wrong(variant)),
            clock="host",
            samples_s=kept(taken),
        )
        for variant, before, taken in zip(variants, bad, times, strict=True)
    ]


def _turns(variants: int, samples: int) -> Generator[int, None, None]:
    """Every number below ``ways`` ``samples`` times, one after another in turns whose first one changes."""
    for sample in range(samples):
        yield from ((sample + number) % variants for number in range(variants))
