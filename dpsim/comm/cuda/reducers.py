"""Which ``Reducer`` adds gradients up between these ranks: decided once, the same on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mpi4py import MPI

from dpsim.comm.cuda.access import Access, try_access
from dpsim.comm.cuda.device import Device, DeviceArray, Stream, Way
from dpsim.comm.cuda.launches import Launches
from dpsim.comm.cuda.moved import Moved
from dpsim.comm.cuda.movers import HostMover, NcclMover
from dpsim.comm.cuda.nccl import Nccl, why_no_nccl
from dpsim.comm.cuda.reducer import Reducer, Task, own_slots
from dpsim.comm.transport import CollectiveSteps
from dpsim.errors import ConfigError

PEER_WAYS: Sequence[Way] = ("ipc", "simulated")
"""Ways by which gradients are in a GPU's own memory while others add them. Mapped host memory is none: every layer
would write its gradients over the bus, and the update read them from there."""

PathName = Literal["peer memory", "nccl", "host"]


@dataclass(frozen=True, kw_only=True)
class Path:
    """How gradients get from GPU to GPU: kernels reach ``peer memory``, or ``nccl`` or the ``host`` moves pieces.

    ``access``: how kernels reach it. ``reason``: why it is not the path before it, for people.
    """

    name: PathName
    access: Access | None = None
    reason: str = ""


def find_path(device: Device, comm: MPI.Intracomm) -> Path:
    """The first of the three that works between all ranks. Collective."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    here = node.size
    node.Free()
    if min(comm.allgather(here)) == comm.size:
        ways = [way for way in device.ways if way in PEER_WAYS]
        if (access := try_access(device, comm, ways)) is not None:
            return Path(name="peer memory", access=access)
        reason = "the GPUs do not reach each other's memory"
    else:
        reason = "the ranks are on several machines"
    if missing := why_no_nccl(device, comm):
        return Path(name="host", reason=f"{reason}; no NCCL, because {missing}")
    return Path(name="nccl", reason=reason)


def open_reducer(comm: MPI.Intracomm, device: Device, path: Path, *, most_blocks: int, wait_limit_s: float) -> Reducer:
    """The fixed order of addition over a path. Collective."""
    if path.access is not None:
        return Launches(comm, device, path.access, most_blocks=most_blocks, wait_limit_s=wait_limit_s)
    if path.name == "nccl":
        return Moved(comm, device, NcclMover(Nccl(comm, device), comm.rank), path.name)
    return Moved(comm, device, HostMover(comm, device), path.name)


def open_nccl(comm: MPI.Intracomm, device: Device) -> Reducer:
    """NCCL's own allreduce. Raises ``ConfigError`` on all ranks where NCCL cannot work between them. Collective."""
    if missing := why_no_nccl(device, comm):
        raise ConfigError(
            f"algorithm nccl between these {comm.size} ranks: {missing}",
            allowed="CuPy with NCCL on every rank, and a GPU for each",
            remedy="leave --algorithm out, or install what is missing (dpsim doctor says what)",
        )
    return NcclSums(comm, device, Nccl(comm, device))


class NcclSums:
    """See ``Reducer``: NCCL adds, in an order of its own that changes with the number of ranks and its version."""

    path = "nccl"
    how = "added by NCCL"
    queued = True

    def __init__(self, comm: MPI.Intracomm, device: Device, nccl: Nccl) -> None:
        self._comm, self._device, self._nccl = comm, device, nccl
        self._blocks: list[DeviceArray] = []

    def version(self, algorithm: str, size_bytes: int, *, sixteen_bits: bool) -> str:
        return self.path

    def allocate(self, size_bytes: int) -> int:
        self._blocks.append(self._device.memory(size_bytes))
        return len(self._blocks) - 1

    def own(self, number: int) -> DeviceArray:
        return self._blocks[number]

    def compile(self, task: Task) -> None:
        """There is nothing to compile; leaves and 16 bits are refused before (``dpsim.backend``)."""

    def agree(self, task: Task) -> CollectiveSteps:
        yield from ()

    def reduce(self, task: Task, stream: Stream) -> CollectiveSteps:
        (array,) = own_slots(self, task, self._comm.rank)
        self._nccl.all_reduce(array, array, task.kernel.dtype, stream)
        yield from ()

    def check(self) -> None:
        self._nccl.check()

    def close(self) -> None:
        self._nccl.close()
        self._comm.Barrier()
        self._blocks.clear()
