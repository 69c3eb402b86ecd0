"""How bytes get from rank to rank: the ``Transport`` protocol; MPI's messages, and memory that all ranks see."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from dpsim.backend import Backend
from dpsim.comm.shared import shared_memory
from dpsim.errors import ConfigError
from dpsim.kernels.allreduce.cpu import STAGING_BYTES, SharedGroup
from dpsim.kernels.allreduce.registry import find
from dpsim.kernels.allreduce.tree import slots
from dpsim.machine import Network, Selection
from dpsim.units import format_size

if TYPE_CHECKING:
    from dpsim.comm.allreduce import SummationOrder
    from dpsim.comm.compression import Compression

Array = NDArray[Any]
ALIGNMENT_BYTES = 64
_PAYLOAD_TAG = 2


class Request(Protocol):
    """A message under way."""

    def done(self) -> bool:
        """Whether its buffer may be used again; makes progress, never waits."""

    def due_s(self) -> float | None:
        """When it will be done, on the shared clock, where that is known already."""


CollectiveSteps = Generator[Sequence[Request], None, None]
"""Yields the messages of one round after another; the data is reduced when it ends."""


class PersistentAllreduce(Protocol):
    """An allreduce of one array that can be done again and again, with nothing left to find out."""

    run: Callable[[], None]
    """Do it, in place; returns when it is done."""

    def advance(self) -> bool:
        """Begin it or go on with what needs no waiting; whether it is done."""


class Transport(Protocol):
    """Point-to-point messages between the ranks of one group, in order for each pair.

    ``oversubscribed``: there are more ranks than cores here, so who waits must let the others have the core.
    ``devices_a_node``: rank r is on node r // devices_a_node of the layout; 1 in a flat one.
    """

    rank: int
    size: int
    network: Network
    oversubscribed: bool
    devices_a_node: int

    def allocate(self, size_bytes: int) -> NDArray[np.uint8]:
        """Zeroed memory for gradients, ``ALIGNMENT_BYTES`` aligned; collective, of the same size on every rank."""

    def prepare(
        self, data: Array, algorithm: str, compression: Compression | None, fixed: SummationOrder | None = None
    ) -> PersistentAllreduce | None:
        """An allreduce in shared memory: ``one-shot``, ``two-shot``, or ``auto`` for the faster one at that size.

        ``data`` (and what is extra in ``fixed``) is a part of allocated memory, the same on every rank; None where that
        is not shared.
        """

    def send(self, data: Array, to: int) -> Request: ...

    def receive(self, data: Array, source: int) -> Request: ...

    def native_allreduce(self, data: Array) -> None:
        """The transport's own allreduce, in place, blocking. Raises ``ConfigError`` where it has none."""

    def start_native_allreduce(self, data: Array) -> Request:
        """The same, non-blocking."""

    def own_rounds(self, data: Array, algorithm: str, compression: Compression | None) -> CollectiveSteps | None:
        """The allreduce of ``data`` where this transport has one of its own; None: messages and shared memory do it."""

    def close(self) -> None:
        """Give back what other ranks may be using. Collective, where ``allocate`` was; nothing may be under way."""


def aligned_bytes(size_bytes: int) -> NDArray[np.uint8]:
    """Zeroed host memory that starts at a multiple of ``ALIGNMENT_BYTES``."""
    raw = np.zeros(size_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[start : start + size_bytes]


class MpiPending:
    """MPI requests as one ``Request``."""

    __slots__ = ("_requests",)

    def __init__(self, requests: list[MPI.Request]) -> None:
        self._requests = requests

    def done(self) -> bool:
        return MPI.Request.Testall(self._requests)

    def due_s(self) -> float | None:
        return None


class MpiTransport:
    """MPI's messages as they are, and shared memory where all ranks are on one node: the network ``node``.

    ``selection`` is what ``auto`` takes by size. Memory that cannot be had is told of, on stderr.
    """

    def __init__(self, comm: MPI.Intracomm, devices_a_node: int = 1, selection: Selection | None = None) -> None:
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.network = Network()
        here = _ranks_here(comm)
        self.oversubscribed = here > (os.cpu_count() or 1)
        self.devices_a_node = devices_a_node
        self._one_node = here == comm.size > 1
        self._shared: list[list[NDArray[np.uint8]]] = []
        self._meeting: SharedGroup | None = None
        self._selection = selection or Selection.usual(self.size)
        self._prepared: dict[tuple[int, int, str, str, Compression | None, bool], PersistentAllreduce] = {}

    def allocate(self, size_bytes: int) -> NDArray[np.uint8]:
        """On one node all ranks see it."""
        extent = max(-(-size_bytes // mmap.PAGESIZE), 1) * mmap.PAGESIZE
        whole = self._memory(extent * self.size, "dpsim-gradients") if self._one_node else None
        if whole is None:
            return aligned_bytes(size_bytes)
        if self._meeting is None:
            control = self._memory(SharedGroup.control_bytes(self.size), "dpsim-meeting")
            if control is None:
                return aligned_bytes(size_bytes)
            self._meeting = SharedGroup(self.rank, self.size, control, oversubscribed=self.oversubscribed)
        self._shared.append([whole[rank * extent : rank * extent + size_bytes] for rank in range(self.size)])
        return self._shared[-1][self.rank]

    def _memory(self, size_bytes: int, name: str) -> NDArray[np.uint8] | None:
        memory = shared_memory(self.comm, size_bytes, name)
        if memory is not None:
            return np.frombuffer(memory, np.uint8)
        self._one_node = False
        if self.rank == 0:
            print(
                f"dpsim: the {self.size} ranks of this machine cannot share {format_size(size_bytes)} of memory;"
                " MPI's own allreduce is used instead, which is slower\n"
                "  to do:   raise the limits on memory and the size of files (ulimit -v, -f), or use fewer devices",
                file=sys.stderr,
            )
        return None

    def prepare(
        self, data: Array, algorithm: str, compression: Compression | None, fixed: SummationOrder | None = None
    ) -> PersistentAllreduce | None:
        address = data.ctypes.data
        key = (address, data.nbytes, data.dtype.char, algorithm, compression, fixed is None)
        if (found := self._prepared.get(key)) is None:
            own = [data, *(fixed.extra if fixed is not None else ())]
            everyones = [self._everyones(array) for array in own]
            if None not in everyones:
                found = self._prepared[key] = self._make(everyones, algorithm, compression, fixed)  # type: ignore[arg-type]
        return found

    def _make(
        self,
        everyones: list[list[Array]],
        algorithm: str,
        compression: Compression | None,
        fixed: SummationOrder | None,
    ) -> PersistentAllreduce:
        """``everyones``: by number of a rank's slot, then by rank."""
        order = fixed.slots if fixed is not None else slots(range(self.size + 1))
        arrays = [everyones[order.of(owner).index(slot)][owner] for slot, owner in enumerate(order.owners)]
        size_bytes = arrays[0].nbytes
        most = size_bytes * max(map(order.owners.count, order.owners))
        name = algorithm
        if algorithm == "auto":
            name = self._selection.algorithm(size_bytes) if most <= STAGING_BYTES else "two-shot"
        version = find("cpu", name)
        if version.most_bytes is not None and most > version.most_bytes:
            raise ConfigError(
                f"a {name} allreduce of {format_size(most)} a rank",
                allowed=f"at most {format_size(version.most_bytes)}",
                remedy="lower --fusion-threshold, or choose auto or two-shot with --algorithm",
            )
        codes = (compression.dtype, compression.scale) if compression is not None else None
        each_sum = codes is not None and fixed is not None
        made: PersistentAllreduce = version.make(self._meeting, arrays, order, compression=codes, each_sum=each_sum)
        return made

    def _everyones(self, data: Array) -> list[Array] | None:
        """The same part of every rank's allocated memory as ``data`` is of this one's; None where it is not shared."""
        address = data.ctypes.data
        for ranks in self._shared:
            first = address - ranks[self.rank].ctypes.data
            if 0 <= first < ranks[self.rank].nbytes:
                return [memory[first : first + data.nbytes].view(data.dtype) for memory in ranks]
        return None

    def send(self, data: Array, to: int) -> Request:
        return MpiPending([self.comm.Isend(data, to, _PAYLOAD_TAG)])

    def receive(self, data: Array, source: int) -> Request:
        return MpiPending([self.comm.Irecv(data, source, _PAYLOAD_TAG)])

    def native_allreduce(self, data: Array) -> None:
        self.comm.Allreduce(MPI.IN_PLACE, data)

    def start_native_allreduce(self, data: Array) -> Request:
        return MpiPending([self.comm.Iallreduce(MPI.IN_PLACE, data)])

    def own_rounds(self, data: Array, algorithm: str, compression: Compression | None) -> CollectiveSteps | None:
        return None

    def close(self) -> None:
        pass


def _ranks_here(comm: MPI.Intracomm) -> int:
    """Ranks of the group that share this machine; collective."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    ranks: int = node.size
    node.Free()
    return ranks


def wait(t: Transport, pending: Sequence[Request]) -> None:
    """Return when every message is done.

    Waiting looks again and again without a pause, for a yielded core may go to any other program for
    milliseconds; only where ranks share cores does it yield, so that the others can send.
    """
    waiting = [message for message in pending if not message.done()]
    while waiting:
        if t.oversubscribed:
            os.sched_yield()
        waiting = [message for message in waiting if not message.done()]


def all_done(pending: Sequence[Request]) -> bool:
    """Whether every message is done. Asks each of them, for progress."""
    finished = True
    for message in pending:
        if not message.done():
            finished = False
    return finished


def transport(
    comm: MPI.Intracomm,
    network: Network,
    devices_a_node: int = 1,
    selection: Selection | None = None,
    backend: Backend = "cpu",
) -> Transport:
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
    return MpiTransport(comm.Dup(), devices_a_node, selection)
