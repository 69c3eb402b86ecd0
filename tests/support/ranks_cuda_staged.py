"""Tasks of the tests of sums over a mover: by MPI through host memory, and by NCCL, for which MPI stands in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
from late_device import late_devices
from mpi4py import MPI
from nccl_by_mpi import NcclByMpi
from ranks_runtime import open_trainer

from dpsim.comm.compression import Compression
from dpsim.comm.cuda import nccl, paths, staged
from dpsim.comm.cuda import transport as transport_module
from dpsim.comm.cuda.available import open_device
from dpsim.comm.cuda.paths import Path, PathName, find_path
from dpsim.comm.cuda.transport import CudaTransport
from dpsim.comm.transport import SummationOrder
from dpsim.errors import ConfigError
from dpsim.kernels.allreduce import reference, tree
from dpsim.kernels.allreduce.cuda import prepare
from dpsim.memory import HOST
from dpsim.nn.device_ops import DeviceOps
from dpsim.progress import Progress

LEAVES = 8


def run(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any]:
    """All that the tests ask of ranks, in one job, of late devices: see the functions below. One rank only trains."""
    with late_devices():
        return ran(comm, argument)


def ran(comm: MPI.Intracomm, argument: dict[str, Any]) -> dict[str, Any]:
    library = NcclByMpi(comm.Dup())
    if comm.size == 1:
        return {"trained": {case["name"]: trained(comm, case) for case in argument["trainings"]}}
    with mock.patch.object(nccl, "load", lambda: library):
        return {
            "sums": {path: [summed(comm, path, case) for case in argument["sums"]] for path in ("host", "nccl")},
            "plain": plain(comm, library),
            "trained": {case["name"]: trained(comm, case) for case in argument["trainings"]},
            "paths": found_paths(comm),
            "refused": refused(comm),
            "calls": library.calls,
            "wrong": comm.allgather(nccl.wrong_calls(comm, open_device(comm.rank))),
        }


@contextlib.contextmanager
def opened(comm: MPI.Intracomm, path: PathName, **options: Any) -> Iterator[CudaTransport]:
    with mock.patch.object(transport_module, "find_path", lambda *_: Path(name=path)):
        transport = CudaTransport(comm.Dup(), **options)
    yield transport
    transport.close()


def summed(comm: MPI.Intracomm, path: PathName, case: dict[str, Any]) -> dict[str, Any]:
    """Whether two allreduces have the reference's bits on every rank, and change nothing beside the array."""
    dtype, low, high = np.dtype(case["dtype"]), case["low"], case["high"]
    leaves = LEAVES if case["leaves"] else comm.size
    bounds = [leaves * rank // comm.size for rank in range(comm.size + 1)]
    sums = tree.slots(bounds)
    compression = Compression(*case["compression"]) if case["compression"] else None
    most = max(map(sums.owners.count, sums.owners))
    right = []
    with (
        opened(comm, path, on_device=case["on_device"]) as transport,
        mock.patch.object(staged, "ONE_ROUND_BYTES", case["one_round_bytes"]),
        mock.patch.object(prepare, "make", wraps=prepare.make) as make,
    ):
        blocks = [transport.allocate((high + 5) * dtype.itemsize).view(dtype) for _ in range(most)]
        extra = tuple(block[low:high] for block in blocks[1:])
        order = SummationOrder(sums, extra) if case["leaves"] else None
        prepared = transport.prepare(blocks[0][low:high], "auto", compression, order)
        assert prepared is not None
        for step in range(2):
            numbers = [contribution(slot + 10 * step, high + 5, dtype) for slot in range(len(sums.owners))]
            if compression is not None and case["leaves"]:  # as training rounds the gradient of every leaf
                numbers = [reference.rounded(each, *case["compression"]) for each in numbers]
            for block, slot in zip(blocks, sums.of(comm.rank), strict=False):
                block[...] = numbers[slot]
            prepared.run()
            wanted = numbers[sums.of(comm.rank)[0]].copy()
            inside = [each[low:high] for each in numbers]
            wanted[low:high] = reference.allreduce(
                inside, sums, compression=case["compression"], each_sum=case["leaves"]
            )
            right.append(blocks[0].tobytes() == wanted.tobytes())
        made = make.call_count
    return {"right": comm.allgather(right), "made": made}


def contribution(slot: int, count: int, dtype: np.dtype[Any]) -> Any:
    return np.random.default_rng(slot).standard_normal(count).astype(dtype) * dtype.type(10.0**slot % 997)


def plain(comm: MPI.Intracomm, library: NcclByMpi) -> dict[str, Any]:
    """NCCL's own allreduce as an algorithm: is it right, and does NCCL alone do it?"""
    before = len(library.calls)
    with mock.patch.object(paths, "why_no_nccl", lambda *_: ""):
        transport = CudaTransport(comm.Dup(), algorithm="nccl", on_device=True)
    data = transport.allocate(4000).view(np.float32)
    data[...] = np.arange(1000) + comm.rank
    prepared = transport.prepare(data[8:], "nccl", None)
    assert prepared is not None
    prepared.run()
    wanted = np.arange(1000) * comm.size + comm.size * (comm.size - 1) // 2
    actual = {
        "right": comm.allgather(bool((data[8:] == wanted[8:]).all())),
        "path": transport.path,
        "description": transport.description,
        "queued": transport.reducer is not None and transport.reducer.queued,
        "launches": transport.peer_allreduce is None,
    }
    transport.close()
    return actual | {"calls": library.calls[before:]}


def trained(comm: MPI.Intracomm, case: dict[str, Any]) -> dict[str, Any]:
    """Digests and losses after two steps by a mover in the memory of devices, and by its twin on the host."""
    results = {}
    for where in ("twin", case["path"]):
        ops = DeviceOps(HOST) if where == "twin" else None
        with mock.patch.object(transport_module, "find_path", lambda *_: Path(name=case["path"])):
            backend = "cpu" if where == "twin" else "cuda"
            trainer = open_trainer(comm, case | {"backend": backend}, None, ops)
        losses = [trainer.step().sums.slot_losses for _ in range(2)]
        paths = trainer.transport.path if isinstance(trainer.transport, CudaTransport) else ""
        results[where] = {"digests": comm.allgather(trainer.digest()), "losses": comm.allgather(losses), "path": paths}
        trainer.close()
    return results


def found_paths(comm: MPI.Intracomm) -> dict[str, Any]:
    """Which path is taken: with memory that all reach; without; between machines; with NCCL too."""
    device = open_device(comm.rank)

    def found() -> tuple[str, str]:
        path = find_path(device, comm)
        return path.name, path.reason

    actual = {"peers": found()}
    with mock.patch.object(paths, "try_access", lambda *_: None):
        actual["no peers"] = found()
        with mock.patch.object(paths, "why_no_nccl", lambda *_: ""):
            actual["no peers, NCCL"] = found()
    apart = mock.Mock(wraps=comm, size=comm.size, rank=comm.rank)
    apart.Split_type = lambda kind: MPI.COMM_SELF.Dup()
    path = find_path(device, apart)
    return actual | {"machines": (path.name, path.reason)}


def refused(comm: MPI.Intracomm) -> dict[str, Any]:
    """What all ranks say where NCCL is asked for and missing, and where the last one cannot compile a kernel."""
    said = {}
    try:
        CudaTransport(comm.Dup(), algorithm="nccl")
    except ConfigError as error:
        said["nccl"] = comm.allgather(str(error))

    def make(*arguments: Any, **options: Any) -> Any:
        raise ConfigError("no such kernel here", allowed="others", remedy="choose another")

    with opened(comm, "host") as transport:
        memory = transport.allocate(400).view(np.float32)
        broken = mock.patch.object(staged, "find", lambda *_: mock.Mock(make=make))
        with broken if comm.rank == comm.size - 1 else contextlib.nullcontext():
            prepared = transport.prepare(memory, "auto", None)
        assert prepared is not None
        try:
            prepared.run()
        except ConfigError as error:
            said["kernel"] = comm.allgather(str(error))
    return said
