"""How bytes get from rank to rank: the ``Transport`` protocol, and MPI's point-to-point messages as they are."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from dpsim.backend import Backend
from dpsim.comm.shared import shared_memory
from dpsim.errors import ConfigError
from dpsim.machine import Network

if TYPE_CHECKING:
    from dpsim.comm.allreduce import Rounds
    from dpsim.comm.wire import Wire

Array = NDArray[Any]
ALIGNMENT_BYTES = 64
_PAYLOAD_TAG = 2


class Pending(Protocol):
    """A message under way."""

    def done(self) -> bool:
        """Whether its buffer may be used again; makes progress, never waits."""

    def due_s(self) -> float | None:
        """When it will be done, on the shared clock, where that is known already."""


class Transport(Protocol):
    """Point-to-point messages between the ranks of one group, in order for each pair.

    ``crowded``: there are more ranks than cores here, so who waits must let the others have the core.
    ``devices_a_node``: rank r is on node r // devices_a_node of the layout; 1 in a flat one.
    """

    rank: int
    size: int
    network: Network
    crowded: bool
    devices_a_node: int

    def allocate(self, size_bytes: int) -> NDArray[np.uint8]:
        """Zeroed memory for gradients, ``ALIGNMENT_BYTES`` aligned; collective, of the same size on every rank."""

    def everyones(self, data: Array) -> list[Array] | None:
        """The same part of every rank's allocated memory as ``data`` is of this one's; None where it is not shared."""

    def start_barrier(self) -> Pending:
        """Done once every rank has started it. Only for ranks that share memory."""

    def send(self, data: Array, to: int) -> Pending: ...

    def receive(self, data: Array, source: int) -> Pending: ...

    def native_allreduce(self, data: Array) -> None:
        """The transport's own allreduce, in place, blocking. Raises ``ConfigError`` where it has none."""

    def start_native_allreduce(self, data: Array) -> Pending:
        """The same, non-blocking."""

    def own_rounds(self, data: Array, algorithm: str, wire: Wire | None) -> Rounds | None:
        """The allreduce of ``data`` where this transport has one of its own; None: messages and shared memory do it."""

    def close(self) -> None:
        """Give back what other ranks may be using. Collective, where ``allocate`` was; nothing may be under way."""


def aligned_bytes(size_bytes: int) -> NDArray[np.uint8]:
    """Zeroed host memory that starts at a multiple of ``ALIGNMENT_BYTES``."""
    raw = np.zeros(size_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[start : start + size_bytes]


class _MpiPending:
    """MPI requests as one ``Pending``."""

    __slots__ = ("_requests",)

    def __init__(self, requests: list[MPI.Request]) -> None:
        self._requests = requests

    def done(self) -> bool:
        return MPI.Request.Testall(self._requests)

    def due_s(self) -> float | None:
        return None


class MpiTransport:
    """MPI's messages as they are: the network ``node``."""

    def __init__(self, comm: MPI.Intracomm, devices_a_node: int = 1) -> None:
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.network = Network()
        here = _ranks_here(comm)
        self.crowded = here > (os.cpu_count() or 1)
        self.devices_a_node = devices_a_node
        self._one_node = here == comm.size > 1
        self._shared: list[list[NDArray[np.uint8]]] = []

    def allocate(self, size_bytes: int) -> NDArray[np.uint8]:
        """On one node all ranks see it."""
        extent = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = shared_memory(self.comm, extent * self.size, "dpsim-gradients") if self._one_node else None
        if memory is None:
            return aligned_bytes(size_bytes)
        whole = np.frombuffer(memory, np.uint8)
        self._shared.append([whole[rank * extent : rank * extent + size_bytes] for rank in range(self.size)])
        return self._shared[-1][self.rank]

    def everyones(self, data: Array) -> list[Array] | None:
        address = data.ctypes.data
        for ranks in self._shared:
            first = address - ranks[self.rank].ctypes.data
            if 0 <= first < ranks[self.rank].nbytes:
                return [memory[first : first + data.nbytes].view(data.dtype) for memory in ranks]
        return None

    def start_barrier(self) -> Pending:
        return _MpiPending([self.comm.Ibarrier()])

    def send(self, data: Array, to: int) -> Pending:
        return _MpiPending([self.comm.Isend(data, to, _PAYLOAD_TAG)])

    def receive(self, data: Array, source: int) -> Pending:
        return _MpiPending([self.comm.Irecv(data, source, _PAYLOAD_TAG)])

    def native_allreduce(self, data: Array) -> None:
        self.comm.Allreduce(MPI.IN_PLACE, data)

    def start_native_allreduce(self, data: Array) -> Pending:
        return _MpiPending([self.comm.Iallreduce(MPI.IN_PLACE, data)])

    def own_rounds(self, data: Array, algorithm: str, wire: Wire | None) -> Rounds | None:
        return None

    def close(self) -> None:
        pass


def _ranks_here(comm: MPI.Intracomm) -> int:
    """Ranks of the group that share this machine; collective."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    ranks: int = node.size
    node.Free()
    return ranks


def wait(t: Transport, pending: Sequence[Pending]) -> None:
    """Return when every message is done.

    Waiting looks again and again without a pause, for a yielded core may go to any other program for
    milliseconds; only where ranks share cores does it yield, so that the others can send.
    """
    waiting = [message for message in pending if not message.done()]
    while waiting:
        if t.crowded:
            os.sched_yield()
        waiting = [message for message in waiting if not message.done()]


def all_done(pending: Sequence[Pending]) -> bool:
    """Whether every message is done. Asks each of them, for progress."""
    finished = True
    for message in pending:
        if not message.done():
            finished = False
    return finished


def transport(comm: MPI.Intracomm, network: Network, devices_a_node: int = 1, backend: Backend = "cpu") -> Transport:
    """The transport of a network over an MPI communicator (which it duplicates, so that tags never mix).

    Raises ``ConfigError`` where the ranks do not fill whole nodes.
    """
    if comm.size % devices_a_node:
        raise ConfigError(f"{comm.size} ranks on nodes of {devices_a_node} devices", allowed="full nodes")
    if backend == "cuda":
        from dpsim.comm.cuda.transport import CudaTransport

        return CudaTransport(comm.Dup(), devices_a_node)
    if network.emulated:
        from dpsim.comm.paced import PacedTransport

        return PacedTransport(comm.Dup(), network, devices_a_node)
    return MpiTransport(comm.Dup(), devices_a_node)
