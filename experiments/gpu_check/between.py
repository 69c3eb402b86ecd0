"""The versions between processes, one rank a GPU (or several on one), and NCCL beside them: tasks for running ranks.

A sample is the host's time from a barrier to the end of the stream, on the slowest rank: what a training step waits
for, launches and host barriers included. The peer is timed by the same rule, in a job of its own.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from mpi4py import MPI

from dpsim import codec
from dpsim.comm.cuda.available import nccl_missing, open_device
from dpsim.comm.cuda.device import Device
from dpsim.experiments.gpu_check.record import Mode, Samples, kept
from dpsim.harness.bench.gpus import Kernels, Nccl, Numbers
from dpsim.harness.bench.turns import Variant
from dpsim.progress import Progress

_DTYPE = "float32"


def kernels(comm: MPI.Intracomm, argument: dict[str, Any], tell: Progress) -> dict[str, Any]:
    """Samples of every version at ``sizes_bytes``, ``samples`` each; by which way and mode; how many GPUs these are."""
    device = open_device(_number(comm))
    device.use()
    own = Kernels(comm, device)
    access, timed = own.access, list[Samples]()
    for size_bytes in argument["sizes_bytes"]:
        tell(f"{comm.size} processes of {size_bytes} bytes, {access.mode} over {access.way} memory")
        memory = own.share(size_bytes)
        variants = own.variants(memory, _DTYPE)
        timed += _timed(comm, device, variants, size_bytes, argument["samples"], access.mode)
        variants.clear()  # prepared launches hold what is closed now
        memory.close()
    own.close()
    gpus = len(set(comm.allgather(device.identity)))
    return {"samples": codec.to_builtins(timed), "way": access.way, "mode": access.mode, "gpus": gpus, "left_out": []}


def nccl(comm: MPI.Intracomm, argument: dict[str, Any], tell: Progress) -> dict[str, Any]:
    """The same of NCCL's in-place allreduce, by CuPy; ``left_out`` says why where there is none."""
    missing = comm.bcast(nccl_missing())
    if missing:
        return {"samples": [], "left_out": [f"NCCL between {comm.size} processes: {missing}"]}
    device = open_device(_number(comm))
    device.use()
    library, timed = Nccl(comm, device), list[Samples]()
    for size_bytes in argument["sizes_bytes"]:
        tell(f"{comm.size} processes of {size_bytes} bytes, NCCL")
        variants = [variant for variant in library.variants(size_bytes, _DTYPE) if variant.in_place]
        timed += _timed(comm, device, variants, size_bytes, argument["samples"], "nccl")
    library.close()
    return {"samples": codec.to_builtins(timed), "left_out": []}


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
