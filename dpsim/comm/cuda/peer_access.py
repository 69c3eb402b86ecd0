"""How the devices of one node reach each other's memory: tested by real writes, since CUDA's answers can be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from mpi4py import MPI

from dpsim.comm.cuda.device import Device, DeviceArray, PeerMapping, PeerMemory
from dpsim.errors import CommunicationError

Mode = Literal["flags", "split"]
"""Where kernels wait for other ranks: inside, at flags in peer memory; or split there, with a host barrier between."""

_LINE_BYTES = 64
"""What a rank writes into each rank's memory in the test: a cache line."""


@dataclass(frozen=True, kw_only=True)
class PeerAccess:
    """Access of kernels to peer memory, and where they can wait."""

    mapping: PeerMapping
    mode: Mode


def try_access(device: Device, comm: MPI.Intracomm, mappings: Sequence[PeerMapping]) -> PeerAccess | None:
    """Return the first mapping by which the writes of every rank of a node arrive at every rank. Collective."""
    identities: list[str] = comm.allgather(device.identity)
    for mapping in mappings:
        memory = device.share(comm, _LINE_BYTES * comm.size, mapping)
        if memory is None:
            continue
        works = writes_arrive(device, comm, memory)
        memory.close()
        if works:
            return PeerAccess(mapping=mapping, mode=default_mode(mapping, identities))
    return None


def find_access(device: Device, comm: MPI.Intracomm) -> PeerAccess:
    """Return the first of all mappings of the device that works. Raises ``CommunicationError``. Collective."""
    if (access := try_access(device, comm, device.mappings)) is not None:
        return access
    raise CommunicationError(
        f"the GPUs of these {comm.size} ranks cannot write into each other's memory, nor into shared host memory",
        allowed="ranks of one machine whose GPUs reach each other (nvidia-smi topo -p2p w)",
        remedy="use --backend cpu, or give the container more shared memory",
    )


def default_mode(mapping: PeerMapping, identities: list[str]) -> Mode:
    """Return ``flags`` between GPUs that reach each other's memory, else ``split``.

    Processes that share a GPU run on it in turns, so one that waits inside a kernel keeps the other from running. Over
    mapped host memory this project has not tested the order in which kernels of several GPUs see their writes.
    """
    return "flags" if mapping == "ipc" and len(set(identities)) == len(identities) else "split"


def writes_arrive(device: Device, comm: MPI.Intracomm, memory: PeerMemory) -> bool:
    """Return whether all ranks read in each rank's memory what the kernels of all ranks wrote there. Collective."""
    device.use()
    for owner, array in enumerate(memory.ranks):
        _line(array, comm.rank)[...] = _mark(comm.rank, owner)
    device.settle()
    comm.Barrier()
    right = True
    stream, copy = device.stream(), np.empty(_LINE_BYTES * comm.size, np.uint8)
    for owner, array in enumerate(memory.ranks):
        device.download(stream, array[: copy.nbytes], copy)
        stream.wait()
        right = right and all((_line(copy, rank) == _mark(rank, owner)).all() for rank in range(comm.size))
    return all(comm.allgather(right))


def _line(array: DeviceArray, writer: int) -> DeviceArray:
    return array[writer * _LINE_BYTES : (writer + 1) * _LINE_BYTES].view(np.uint32)


def _mark(writer: int, owner: int) -> int:
    return 1 + writer + (owner << 16)
