"""How the devices of one node reach each other's memory: found by real writes, for what CUDA says can be wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from mpi4py import MPI

from dpsim.comm.cuda.device import Device, DeviceArray, PeerMemory, Way
from dpsim.errors import CommunicationError

Mode = Literal["flags", "split"]
"""Where kernels wait for other ranks: inside, at flags in peer memory; or split there, with a host barrier between."""

_PLACE_BYTES = 64
"""What a rank writes into each rank's memory in the test: a line of its own."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """What was found to work: the way to peer memory, and where kernels can wait."""

    way: Way
    mode: Mode


def find_access(device: Device, comm: MPI.Intracomm) -> Access:
    """The first of the device's ways by which every rank's writes arrive at every rank. Collective.

    Raises ``CommunicationError`` where there is none.
    """
    identities: list[str] = comm.allgather(device.identity)
    for way in device.ways:
        memory = device.share(comm, _PLACE_BYTES * comm.size, way)
        if memory is None:
            continue
        works = writes_arrive(device, comm, memory)
        memory.close()
        if works:
            return Access(way=way, mode=default_mode(way, identities))
    raise CommunicationError(
        f"the GPUs of these {comm.size} ranks cannot write into each other's memory, nor into shared host memory",
        allowed="ranks of one machine whose GPUs reach each other (nvidia-smi topo -p2p w)",
        remedy="use --backend cpu, or give the container more shared memory",
    )


def default_mode(way: Way, identities: list[str]) -> Mode:
    """``flags`` between GPUs that reach each other's memory.

    Processes that share a GPU run on it in turns, so one that waits inside a kernel keeps the other from running;
    and host memory that GPUs map orders nothing between their kernels that this project has tested.
    """
    return "flags" if way == "ipc" and len(set(identities)) == len(identities) else "split"


def writes_arrive(device: Device, comm: MPI.Intracomm, memory: PeerMemory) -> bool:
    """Whether what a kernel of each rank writes into each rank's memory is what all of them read there. Collective."""
    device.use()
    for owner, array in enumerate(memory.ranks):
        _place(array, comm.rank)[...] = _mark(comm.rank, owner)
    device.settle()
    comm.Barrier()
    right = True
    stream, found = device.stream(), np.empty(_PLACE_BYTES * comm.size, np.uint8)
    for owner, array in enumerate(memory.ranks):
        device.download(stream, array[: found.nbytes], found)
        stream.wait()
        right = right and all((_place(found, rank) == _mark(rank, owner)).all() for rank in range(comm.size))
    return all(comm.allgather(right))


def _place(array: DeviceArray, writer: int) -> DeviceArray:
    return array[writer * _PLACE_BYTES : (writer + 1) * _PLACE_BYTES].view(np.uint32)


def _mark(writer: int, owner: int) -> int:
    return 1 + writer + (owner << 16)
