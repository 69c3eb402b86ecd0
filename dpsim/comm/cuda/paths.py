"""The path of gradients between these ranks and the ``Reducer`` over it: decided once, the same on all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mpi4py import MPI

from dpsim.comm.cuda.device import Device, PeerMapping
from dpsim.comm.cuda.nccl import Nccl, NcclAllreduce, why_no_nccl
from dpsim.comm.cuda.peer_access import PeerAccess, try_access
from dpsim.comm.cuda.peer_memory import PeerMemoryAllreduce
from dpsim.comm.cuda.reducer import Reducer
from dpsim.comm.cuda.staged import StagedAllreduce
from dpsim.comm.cuda.transfers import HostTransfer, NcclTransfer, Transfer
from dpsim.errors import ConfigError

DEVICE_MAPPINGS: tuple[PeerMapping, ...] = ("ipc", "simulated")
"""Mappings by which gradients are in a GPU's own memory while others add them. Mapped host memory is none: every layer
would write its gradients over the bus, and the update read them from there."""

PathName = Literal["peer memory", "nccl", "host"]


@dataclass(frozen=True, kw_only=True)
class Path:
    """Path of gradients from GPU to GPU: kernels reach ``peer memory``, or ``nccl`` or the ``host`` moves them.

    ``access``: how kernels reach it. ``reason``: why it is not the path before it, for people.
    """

    name: PathName
    access: PeerAccess | None = None
    reason: str = ""


def find_path(device: Device, comm: MPI.Intracomm) -> Path:
    """Return the first of the three paths that works between all ranks. Collective."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    here = node.size
    node.Free()
    if min(comm.allgather(here)) == comm.size:
        mappings = [mapping for mapping in device.mappings if mapping in DEVICE_MAPPINGS]
        if (access := try_access(device, comm, mappings)) is not None:
            return Path(name="peer memory", access=access)
        reason = "the GPUs do not reach each other's memory"
    else:
        reason = "the ranks are on several machines"
    if missing := why_no_nccl(device, comm):
        return Path(name="host", reason=f"{reason}; no NCCL, because {missing}")
    return Path(name="nccl", reason=reason)


def open_reducer(comm: MPI.Intracomm, device: Device, path: Path, *, most_blocks: int, wait_limit_s: float) -> Reducer:
    """Open the fixed order of addition over a path. Collective."""
    if path.access is not None:
        return PeerMemoryAllreduce(comm, device, path.access, most_blocks=most_blocks, wait_limit_s=wait_limit_s)
    by_nccl = path.name == "nccl"
    transfer: Transfer = NcclTransfer(Nccl(comm, device), comm.rank) if by_nccl else HostTransfer(comm, device)
    return StagedAllreduce(comm, device, transfer, path.name)


def open_nccl(comm: MPI.Intracomm, device: Device) -> Reducer:
    """Open NCCL's own allreduce. Raises ``ConfigError`` on all ranks where it cannot work between them. Collective."""
    if missing := why_no_nccl(device, comm):
        raise ConfigError(
            f"algorithm nccl between these {comm.size} ranks: {missing}",
            allowed="CuPy with NCCL on every rank, and a GPU for each",
            remedy="leave --algorithm out, or install what is missing (dpsim doctor says what)",
        )
    return NcclAllreduce(comm, device, Nccl(comm, device))
