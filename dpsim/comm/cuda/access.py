"""How the devices of one node reach each other's memory: tested by real writes, since CUDA's answers can be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from mpi4py import MPI

from dpsim.comm.cuda.device import Device, DeviceArray, PeerMemory, Way
from dpsim.errors import CommunicationError

Mode = Literal["flags", "split"]
"""Where kernels wait for other ranks: inside, at flags in peer memory; or split there, with a host barrier between."""

_PLACE_BYTES = 64
"""What a rank writes into each rank's memory in the test: a cache line."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """What works here: how kernels reach peer memory, and where they can wait."""

    way: Way
    mode: Mode


def try_access(device: Device, comm: MPI.Intracomm, ways: Sequence[Way]) -> Access | None:
    """The first of these ways by which the writes of every rank of a node arrive at every rank. Collective."""
    identities: list[str] = comm.allgather(device.identity)
    for way in ways:
        memory = device.share(comm, _PLACE_BYTES * comm.size, way)
        if memory is None:
            continue
        works = writes_arrive(device, comm, memory)
        memory.close()
        if works:
            return Access(way=way, mode=default_mode(way, identities))
    return None


def find_access(device: Device, comm: MPI.Intracomm) -> Access:
    """The first of all ways of the device that works. Raises ``CommunicationError`` if none does. Collective."""
    if (access := try_access(device, comm, device.ways)) is not None:
        return access
    raise CommunicationError(
        f"the GPUs of these {comm.size} ranks cannot write into each other's memory, nor into shared host memory",
        allowed="ranks of one machine whose GPUs reach each other (nvidia-smi topo -p2p w)",
        remedy="use --backend cpu, or give the container more shared memory",
    )


def default_mode(way: Way, identities: list[str]) -> Mode:
    """``flags`` between GPUs that reach each other's memory.

    Processes that share a GPU run on it in turns, so one that waits inside a kernel keeps the other from running. Over
    mapped host memory this project has not tested the order in which kernels of several GPUs see their writes.
    """
    return "flags" if way == "ipc" and len(set(identities)) == len(identities) else "split"


def writes_arrive(device: Device, comm: MPI.Intracomm, memory: PeerMemory) -> bool:
    """Whether all ranks read in each rank's memory what the kernels of all ranks wrote there. Collective."""
    device.use()
    for owner, array in enumerate(memory.ranks):
        _place(array, comm.rank)[...] = _mark(comm.rank, owner)
    device.settle()
    comm.Barrier()
    right = True
    stream, copy = device.stream(), np.empty(_PLACE_BYTES * comm.size, np.uint8)
    for owner, array in enumerate(memory.ranks):
        device.download(stream, array[: copy.nbytes], copy)
        stream.wait()
        right = right and all((_place(copy, rank) == _mark(rank, owner)).all() for rank in range(comm.size))
    return all(comm.allgather(right))


def _place(array: DeviceArray, writer: int) -> DeviceArray:
    return array[writer * _PLACE_BYTES : (writer + 1) * _PLACE_BYTES].view(np.uint32)


def _mark(writer: int, owner: int) -> int:
    return 1 + writer + (owner << 16)
