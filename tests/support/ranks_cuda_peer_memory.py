"""Tasks of the tests of how a transport's kernels are compiled, agreed on, kept, and given up; in numba's simulator."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
from late_device import LateDevice, Watched, late_devices
from mpi4py import MPI

from dpsim.comm.compression import Compression
from dpsim.comm.cuda import peer_memory, reducer
from dpsim.comm.cuda import transport as transport_module
from dpsim.comm.cuda.available import open_device
from dpsim.comm.cuda.paths import Path
from dpsim.comm.cuda.peer_access import PeerAccess
from dpsim.comm.cuda.reducer import Kernel, Task
from dpsim.comm.cuda.transport import CudaTransport
from dpsim.errors import CommunicationError, ConfigError
from dpsim.kernels.allreduce import registry
from dpsim.kernels.allreduce.cuda import prepare
from dpsim.kernels.allreduce.tree import slots
from dpsim.progress import Progress
from dpsim.study.runners.allreduce.cuda import KernelRank

LIMIT_S = 4.0


def run(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any]:
    """All that the tests ask of ranks, in one job, of late devices: see the functions below."""
    with late_devices():
        return ran(comm)


def ran(comm: MPI.Intracomm) -> dict[str, Any]:
    return {
        "compiled": {mode: compiled(comm, mode) for mode in ("flags", "split")},
        "coded": compiled(comm, "flags", Compression("float16", 2.0**-6)),
        "varying": varying(comm),
        "fewest": fewest(comm),
        "refused": refused(comm),
        "refused_in_benchmark": refused_in_benchmark(comm),
        "late": late(comm),
        "chosen": chosen(comm),
        "met": comm.allgather(met()),
        "closed": comm.allgather(closed(comm)),
    }


@contextlib.contextmanager
def opened(comm: MPI.Intracomm, mode: str = "flags", **options: Any) -> Iterator[CudaTransport]:
    access = PeerAccess(mapping=open_device(comm.rank).mappings[0], mode=mode)  # type: ignore[arg-type]
    path = Path(name="peer memory", access=access)
    with mock.patch.object(transport_module, "find_path", lambda *_: path):
        transport = CudaTransport(comm.Dup(), **options)
    yield transport
    transport.close()


def right(comm: MPI.Intracomm, transport: CudaTransport, memory: Any, low: int, high: int, step: int) -> bool:
    """Whether an allreduce of some elements is right, and leaves the others alone."""
    before = np.arange(memory.size, dtype=np.float32) % 64 * (comm.rank + step)
    memory[...] = before
    allreduce = transport.prepare(memory[low:high], "auto", None)
    assert allreduce is not None
    allreduce.run()
    expected = before.copy()
    expected[low:high] = (
        np.arange(memory.size, dtype=np.float32)[low:high] % 64 * sum(rank + step for rank in range(comm.size))
    )
    return bool((memory == expected).all())


def compiled(comm: MPI.Intracomm, mode: str, compression: Compression | None = None) -> list[list[int]]:
    """How many kernels each rank makes while it prepares three arrays, in the first run, and in all later ones."""
    with opened(comm, mode) as transport, mock.patch.object(prepare, "make", wraps=prepare.make) as make:
        memory = transport.allocate(100).view(np.float32)
        algorithm = "ring" if compression is None else "auto"
        prepared = [transport.prepare(memory[low : low + 8], algorithm, compression) for low in (0, 8, 16)]
        counts = [make.call_count]
        for allreduce in (*prepared, prepared[0]):
            assert allreduce is not None
            comm.Barrier()
            allreduce.run()
            counts.append(make.call_count)
        return comm.allgather([counts[0], counts[1] - counts[0], counts[-1] - counts[1]])


def varying(comm: MPI.Intracomm) -> dict[str, Any]:
    """Ever new parts of one memory: are the sums right, and how many launches are kept?"""
    with opened(comm) as transport, mock.patch.object(reducer, "MOST_RECENT", 4):
        memory = transport.allocate(400).view(np.float32)
        parts = [(0, 100), *((low, low + 7) for low in range(0, 90, 15)), (0, 7), (75, 82)]
        results = [right(comm, transport, memory, *part, step) for step, part in enumerate(parts)]
        assert transport.peer_allreduce is not None
        kept = len(transport.peer_allreduce.bound)
    return {"right": all(all(each) for each in comm.allgather(results)), "kept": comm.allgather(kept)}


def fewest(comm: MPI.Intracomm) -> dict[str, Any]:
    """The blocks that ranks start if rank 0's GPU runs fewer at once than the others'."""
    at_once = 1 if comm.rank == 0 else 2
    with opened(comm, wait_limit_s=5.0) as transport, mock.patch.object(prepare, "SIMULATED_BLOCKS", at_once):
        memory = transport.allocate(400).view(np.float32)
        is_right = right(comm, transport, memory, 0, 100, 1)
        assert transport.peer_allreduce is not None
        (kernel,) = transport.peer_allreduce._compiled.values()
    return {"right": comm.allgather(is_right), "blocks": comm.allgather(kernel.blocks)}


def chosen(comm: MPI.Intracomm) -> dict[str, Any]:
    """The versions that ``auto`` takes of a small and a large array, the latter's sum, and what one-shot says of it."""
    said = ""
    with (
        opened(comm) as transport,
        mock.patch.object(peer_memory, "one_shot_bytes", lambda ranks: 100),
        mock.patch.object(registry, "find", wraps=registry.find) as find,
    ):
        memory = transport.allocate(400).view(np.float32)
        versions, results = [], []
        for stop in (25, 100):
            find.reset_mock()
            results.append(right(comm, transport, memory, 0, stop, 1))
            versions.append(sorted({call.args[1] for call in find.call_args_list}))
    small = replace(registry.find("cuda", "one-shot"), most_bytes=300)
    with opened(comm) as transport, mock.patch.object(registry, "find", lambda *_: small):
        memory = transport.allocate(400).view(np.float32)
        prepared = transport.prepare(memory, "one-shot", None)
        assert prepared is not None
        try:
            prepared.run()
        except ConfigError as error:
            said = str(error)
    return {"right": comm.allgather(all(results)), "versions": versions, "said": comm.allgather(said)}


def refusing() -> Any:
    """A version that refuses to be made."""

    def make(*arguments: Any, **options: Any) -> Any:
        raise ConfigError("no such kernel here", allowed="others", remedy="choose another")

    return replace(registry.find("cuda", "two-shot"), make=make)


def refused(comm: MPI.Intracomm) -> dict[str, Any]:
    """What each rank raises if the last one cannot compile a kernel, and how often kernels were started."""
    started, said = list[Any](), ""
    with opened(comm) as transport, contextlib.ExitStack() as stack:
        sound = prepare.launch

        def watched(*arguments: Any) -> Any:
            return replace(sound(*arguments), stages=(started.append,))

        stack.enter_context(mock.patch.object(prepare, "launch", watched))
        if comm.rank == comm.size - 1:
            version = refusing()
            stack.enter_context(mock.patch.object(registry, "find", lambda *_: version))
        memory = transport.allocate(400).view(np.float32)
        allreduce = transport.prepare(memory, "auto", None)
        assert allreduce is not None
        try:
            allreduce.run()
        except ConfigError as error:
            said = str(error)
    return {"said": comm.allgather(said), "started": comm.allgather(len(started))}


def refused_in_benchmark(comm: MPI.Intracomm) -> list[str]:
    """The same for the variants of the benchmark."""
    kernels, said = KernelRank(comm, {"dtype": "float32", "algorithms": ["two-shot"]}), ""
    with contextlib.ExitStack() as stack:
        if comm.rank == comm.size - 1:
            version = refusing()
            stack.enter_context(mock.patch.object(registry, "find", lambda *_: version))
        try:
            kernels.calls(64)
        except ConfigError as error:
            said = str(error)
    kernels.close()
    return comm.allgather(said)


def late(comm: MPI.Intracomm) -> dict[str, Any]:
    """What the ranks raise, and after how many seconds, if the last one does not come to the second allreduce."""
    said, again, taken_s = "", "", 0.0
    with opened(comm, wait_limit_s=LIMIT_S) as transport:
        memory = transport.allocate(400).view(np.float32)
        allreduce = transport.prepare(memory, "auto", None)
        assert allreduce is not None
        allreduce.run()
        comm.Barrier()
        if comm.rank < comm.size - 1:
            begin_s = time.perf_counter()
            try:
                allreduce.run()
            except CommunicationError as error:
                said, taken_s = str(error), time.perf_counter() - begin_s
            try:
                allreduce.run()
            except CommunicationError as error:
                again = str(error)
        comm.Barrier()
    return {"said": comm.allgather(said), "again": comm.allgather(again), "taken_s": comm.allgather(taken_s)}


def met() -> int:
    """How often a rank meets others in a kernel of several stages, each time with all done that was asked for."""
    device = LateDevice()
    watched: Any = Watched(device)
    launches = peer_memory.PeerMemoryAllreduce(
        watched, device, PeerAccess(mapping="simulated", mode="split"), most_blocks=1, wait_limit_s=LIMIT_S
    )
    task = Task(Kernel("float32", "two-shot", None, slots(range(2))), (launches.allocate(64),), 0, 64)
    launches.compile(task)
    for steps in (launches.agree(task), launches.reduce(task, device.stream())):
        for pending in steps:
            while not all(request.done() for request in pending):
                time.sleep(0)
    device.settle()
    launches.close()
    return watched.met - 1


def closed(comm: MPI.Intracomm) -> bool:
    """Give memory back while the device still writes to it; a late device refuses where it has work left."""
    with opened(comm, "split", on_device=True) as transport:
        transport.memory.use()  # type: ignore[attr-defined]
        transport.allocate(64)[...] = 1
    return True
