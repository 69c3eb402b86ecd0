"""The versions between processes, one rank a GPU (or several on one), and NCCL beside them: tasks for running ranks.

A sample is the host's time from a barrier to the end of the stream, on the slowest rank: what a training step waits
for, launches and host barriers included. The peer is timed by the same rule, in a job of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from dpsim import codec
from dpsim.comm.cuda.access import Access, find_access
from dpsim.comm.cuda.access import Mode as KernelMode
from dpsim.comm.cuda.device import Device, DeviceArray, PeerMemory, open_device
from dpsim.experiments.gpu_check.record import Mode, Samples, kept
from dpsim.experiments.gpu_check.versions import nccl_missing
from dpsim.kernels.allreduce import reference, registry, tree
from dpsim.kernels.allreduce.cuda import flag_words

Tell = Callable[[str], None]


def kernels(comm: MPI.Intracomm, argument: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Samples of every version at ``sizes_bytes``, ``samples`` each; by which way and mode; how many GPUs these are."""
    device = open_device(_number(comm))
    device.use()
    access = find_access(device, comm)
    flags = _shared(device, comm, 4 * flag_words(comm.size), access)
    found: list[Samples] = []
    for size_bytes in argument["sizes_bytes"]:
        tell(f"{comm.size} processes of {size_bytes} bytes, {access.mode} over {access.way} memory")
        memory = _shared(device, comm, size_bytes, access)
        runs = _prepared(comm, device, access.mode, memory, flags)
        own = memory.ranks[comm.rank].view(np.float32)
        found += _timed(comm, device, runs, own, argument["samples"], access.mode)
        runs.clear()  # prepared launches hold what is closed now
        memory.close()
    flags.close()
    gpus = len(set(comm.allgather(device.identity)))
    return {"samples": codec.to_builtins(found), "way": access.way, "mode": access.mode, "gpus": gpus, "left_out": []}


def nccl(comm: MPI.Intracomm, argument: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """The same of NCCL's in-place allreduce, by CuPy; ``left_out`` says why where there is none."""
    missing = comm.bcast(nccl_missing())
    if missing:
        return {"samples": [], "left_out": [f"NCCL between {comm.size} processes: {missing}"]}
    from cupy.cuda import nccl as library

    from dpsim.comm.cuda.gpu import Gpu

    device = Gpu(_number(comm))
    communicator = library.NcclCommunicator(comm.size, comm.bcast(library.get_unique_id()), comm.rank)
    stream, found = device.stream(), list[Samples]()
    for size_bytes in argument["sizes_bytes"]:
        tell(f"{comm.size} processes of {size_bytes} bytes, NCCL")
        own = device.memory(size_bytes).view(np.float32)

        def run(array: DeviceArray = own) -> None:
            place = array.data.ptr
            communicator.allReduce(place, place, array.size, library.NCCL_FLOAT32, library.NCCL_SUM, stream.cupy.ptr)
            stream.wait()

        found += _timed(comm, device, {"nccl": run}, own, argument["samples"], "nccl")
    communicator.destroy()
    return {"samples": codec.to_builtins(found), "left_out": []}


def _number(comm: MPI.Intracomm) -> int:
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    number: int = node.rank
    node.Free()
    return number


def _shared(device: Device, comm: MPI.Intracomm, size_bytes: int, access: Access) -> PeerMemory:
    memory = device.share(comm, size_bytes, access.way)
    if memory is None:
        raise MemoryError(f"{size_bytes} bytes of {access.way} memory cannot be had")
    return memory


def _prepared(
    comm: MPI.Intracomm, device: Device, mode: KernelMode, memory: PeerMemory, flags: PeerMemory
) -> dict[str, Callable[[], None]]:
    """Every version on this memory, as functions that return when this rank's part is done."""
    stream, slots = device.stream(), tree.slots(range(comm.size + 1))
    arrays = [array.view(np.float32) for array in memory.ranks]
    words = [array.view(np.uint32) for array in flags.ranks] if mode == "flags" else None

    def staged(stages: tuple[Callable[[Any], None], ...]) -> Callable[[], None]:
        def run() -> None:
            for number, stage in enumerate(stages):
                if number:
                    stream.wait()
                    comm.Barrier()
                stage(stream.launch)
            stream.wait()

        return run

    return {
        version.name: staged(version.make(arrays, slots, rank=comm.rank, mode=mode, flags=words).stages)
        for version in registry.versions("cuda")
        if arrays[0].nbytes <= (version.most_bytes or arrays[0].nbytes)
    }


def _whole(rank: int, size_bytes: int) -> NDArray[np.float32]:
    draw = np.random.default_rng(rank).integers(-1000, 1000, min(size_bytes // 4, 1_000_003)).astype(np.float32)
    return np.resize(draw, size_bytes // 4)


def _placed(device: Device, numbers: NDArray[np.float32]) -> DeviceArray:
    array, stream = device.memory(numbers.nbytes).view(np.float32), device.stream()
    device.upload(stream, numbers, array)
    stream.wait()
    return array


def _timed(
    comm: MPI.Intracomm, device: Device, runs: dict[str, Callable[[], None]], own: DeviceArray, samples: int, mode: Mode
) -> list[Samples]:
    """Each checked before it is timed and after it, in turns, its time that of the slowest rank.

    ``own`` is what this rank hands in: written anew before each. Whole numbers: their sum is one in every order.
    """
    ranks = [_whole(rank, own.nbytes) for rank in range(comm.size)]
    pristine = _placed(device, ranks[comm.rank])
    bits = _placed(device, reference.allreduce(ranks, tree.slots(range(comm.size + 1)))).view(np.uint32)
    stream = device.stream()

    def rewrite() -> None:
        device.copy(stream, pristine, own)
        stream.wait()
        comm.Barrier()

    def wrong(run: Callable[[], None]) -> int:
        rewrite()
        run()
        comm.Barrier()
        return int(comm.allreduce(int(device.xp.count_nonzero(own.view(np.uint32) != bits))))

    bad = {name: wrong(run) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for name in _turns(list(runs), samples):
        rewrite()
        begin_s = time.perf_counter()
        runs[name]()
        times[name].append(comm.allreduce(time.perf_counter() - begin_s, op=MPI.MAX))
    return [
        Samples(
            algorithm=name, mode=mode, devices=comm.size, processes=comm.size, size_bytes=int(own.nbytes),
            dtype="float32", wrong=bad[name] + wrong(runs[name]), clock="host", samples_s=kept(times[name]),
        )
        for name in runs
    ]  # fmt: skip


def _turns(names: list[str], samples: int) -> Generator[str, None, None]:
    """Every name ``samples`` times, one after another in turns whose first one changes."""
    for sample in range(samples):
        first = sample % len(names)
        yield from names[first:] + names[:first]
