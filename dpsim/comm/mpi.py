"""The network ``node``: MPI's messages as they are, and kernels in shared memory where all ranks are on one machine."""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from dpsim.algorithms import algorithms_in
from dpsim.collective import CollectiveKind
from dpsim.comm import allreduce
from dpsim.comm.compression import Compression
from dpsim.comm.shared import shared_memory
from dpsim.comm.transport import (
    Array,
    CollectiveSteps,
    PersistentAllreduce,
    PersistentRound,
    Request,
    SummationOrder,
    Transport,
    aligned_bytes,
    wait,
)
from dpsim.errors import AllreduceError, ConfigError
from dpsim.kernels.allreduce.algorithms import node_by_node
from dpsim.kernels.allreduce.cpu import STAGING_BYTES, Reduction, SharedGroup, shard_kernel
from dpsim.kernels.allreduce.registry import find
from dpsim.kernels.allreduce.tree import PartialSums
from dpsim.launch.shaped import on_shaped_hosts
from dpsim.machine import Network, Selection
from dpsim.memory import HOST
from dpsim.replica import OrderedSum
from dpsim.units import format_size

_PAYLOAD_TAG = 2
_SMALL_BYTES = 2048
"""Where ranks share no memory, so many bytes are there before a nap would end, and latency is all that matters."""
_YIELDING_S = 5e-4
_SHAPED_NAP_S = 1e-4
"""A rank that sleeps looks for messages so often; of several on a core each less often, or looking would fill it."""


def test(requests: list[MPI.Request]) -> bool:
    """Return whether all requests are done. Raises ``AllreduceError`` for a message longer than its buffer.

    One at a time, for only then does MPI say what is wrong with one.
    """
    try:
        return all([request.Test() for request in requests])
    except MPI.Exception as error:
        if error.Get_error_class() != MPI.ERR_TRUNCATE:
            raise
        raise AllreduceError(
            f"rank {MPI.COMM_WORLD.rank} got a message that is longer than the array which receives it",
            allowed="for every send one receive of as many elements, in the same order between two ranks",
            remedy="compare what the allreduce's function sends and receives: a receive may be missing or short",
        ) from error


class MpiRequest:
    """MPI requests as one ``Request``."""

    __slots__ = ("_requests",)

    def __init__(self, requests: list[MPI.Request]) -> None:
        self._requests = requests

    def done(self) -> bool:
        return test(self._requests)

    def due_s(self) -> float | None:
        return None


class MpiRound:
    """Persistent MPI requests as one round of messages.

    Where each rank has a core MPI may spin. Elsewhere a round of few bytes is soon there, and the rank yields before it
    sleeps.
    """

    def __init__(self, t: MpiTransport, requests: list[MPI.Prequest], size_bytes: int) -> None:
        self._transport, self._requests = t, requests
        self._blocking = not (t.nap_s or t.oversubscribed)
        self._yielding_s = _YIELDING_S if t.nap_s and size_bytes <= _SMALL_BYTES else 0.0
        self._request = MpiRequest(cast(list[MPI.Request], requests))
        weakref.finalize(self, _free, requests)

    def start(self) -> Request:
        MPI.Prequest.Startall(self._requests)
        return self._request

    def run(self) -> None:
        MPI.Prequest.Startall(self._requests)
        if self._blocking:
            MPI.Request.Waitall(self._requests)
        else:
            wait(self._transport, [self._request], yielding_s=self._yielding_s)


class _SmallAllreduce:
    """The MPI library's allreduce of few bytes as a persistent request: so MPICH takes the fewest rounds for it."""

    def __init__(self, requests: MpiRound) -> None:
        self._requests = requests

    def run(self) -> None:
        self._requests.run()

    def start(self) -> CollectiveSteps:
        yield [self._requests.start()]


def _free(requests: list[MPI.Prequest]) -> None:
    if not MPI.Is_finalized():
        for request in requests:
            request.Free()


class MpiTransport:
    """MPI's messages, and shared memory where all ranks are on one machine.

    ``selection`` is what ``auto`` takes by size; one that is not of the place where it runs counts as none. ``world``:
    see ``networks.transport``. Where memory cannot be shared, that is printed to stderr. On shaped hosts, all of which
    are this machine's, nothing is shared, and ranks that share cores sleep while they wait, as all do with ``sleeps``:
    then the kernel's network threads have the cores.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        devices_a_node: int = 1,
        selection: Selection | None = None,
        world: Transport | None = None,
        network: Network | None = None,
        *,
        sleeps: bool = False,
    ) -> None:
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.network = network or Network()
        shaped = on_shaped_hosts()
        local_ranks = comm.size if shaped else _ranks_of_this_machine(comm)
        self.oversubscribed = local_ranks > (os.cpu_count() or 1) or (world is not None and world.oversubscribed)
        shared = max(1.0, local_ranks / (os.cpu_count() or 1))
        self.nap_s = shared * _SHAPED_NAP_S if shaped and (self.oversubscribed or sleeps) else 0.0
        self.memory = HOST
        self.devices_a_node = devices_a_node
        self._one_node = local_ranks == comm.size > 1 and not shaped
        self._shared: list[list[NDArray[np.uint8]]] = []
        self._group: SharedGroup | None = None
        self._kernels = algorithms_in("shared memory")
        self._selection = selection or Selection.usual(self.size)

    def allocate(self, size_bytes: int) -> NDArray[np.uint8]:
        """Return memory that, on one machine, all ranks see."""
        extent = max(-(-size_bytes // mmap.PAGESIZE), 1) * mmap.PAGESIZE
        shared = self._memory(extent * self.size, "dpsim-gradients") if self._one_node else None
        if shared is None:
            return aligned_bytes(size_bytes)
        if self._group is None:
            control = self._memory(SharedGroup.control_bytes(self.size), "dpsim-group")
            if control is None:
                return aligned_bytes(size_bytes)
            self._group = SharedGroup(self.rank, self.size, control, oversubscribed=self.oversubscribed)
        self._shared.append([shared[rank * extent : rank * extent + size_bytes] for rank in range(self.size)])
        return self._shared[-1][self.rank]

    def _memory(self, size_bytes: int, name: str) -> NDArray[np.uint8] | None:
        memory = shared_memory(self.comm, size_bytes, name)
        if memory is not None:
            return np.frombuffer(memory, np.uint8)
        self._one_node = False
        if self.rank == 0:
            print(
                f"dpsim: the {self.size} ranks of this machine cannot share {format_size(size_bytes)} of memory;"
                " messages are used instead, which are slower\n"
                "  to do:   raise the limits on memory and the size of files (ulimit -v, -f), or use fewer devices",
                file=sys.stderr,
            )
        return None

    def prepare(
        self,
        data: Array,
        algorithm: str,
        compression: Compression | None,
        order: SummationOrder | None = None,
        kind: CollectiveKind = "allreduce",
        replicas: int = 1,
    ) -> PersistentAllreduce | None:
        plain = compression is None and order is None and kind == "allreduce" and replicas == 1
        if algorithm == "mpi" and plain:
            return self._small(data)
        if algorithm not in self._kernels:
            return None
        kernel = self.kernel(data, algorithm, compression, order, kind, replicas)
        if kernel is None and algorithm == "auto" and plain and self._selection.by_messages:
            return allreduce.prepare(self, data, self._selection.algorithm(data.nbytes))
        return kernel

    def _small(self, data: Array) -> PersistentAllreduce | None:
        """Prepare MPI's allreduce of few bytes between nodes; ``None`` for others, and where MPI cannot."""
        if self._one_node or data.nbytes > _SMALL_BYTES or type(self.comm) is not MPI.Intracomm:
            return None
        try:
            request = self.comm.Allreduce_init(MPI.IN_PLACE, data)
        except NotImplementedError:  # before MPI 4
            return None
        return _SmallAllreduce(MpiRound(self, [request], data.nbytes))

    def kernel(
        self,
        data: Array,
        algorithm: str,
        compression: Compression | None = None,
        order: SummationOrder | None = None,
        kind: CollectiveKind = "allreduce",
        replicas: int = 1,
    ) -> PersistentAllreduce | None:
        """Prepare an allreduce by any version of the kernels; plans name only those in shared memory as algorithms."""
        if self._group is None:
            return None
        arrays = [self._counterparts(array) for array in (data, *(order.extra if order is not None else ()))]
        shared = [array for array in arrays if array is not None]
        if len(shared) < len(arrays):
            return None
        sums = order.slots if order is not None else node_by_node(self.size, self.size // replicas)
        operands = [shared[sums.of(owner).index(number)][owner] for number, owner in enumerate(sums.owners)]
        if kind != "allreduce" or replicas > 1:
            return shard_kernel(kind, replicas)(self._group, operands, sums)
        most = data.nbytes * max(map(sums.owners.count, sums.owners))
        name = algorithm
        if algorithm == "auto":
            selection = Selection.usual(self.size) if self._selection.by_messages else self._selection
            name = selection.algorithm(data.nbytes) if most <= STAGING_BYTES else "two-shot"
        version = find("cpu", name)
        if version.most_bytes is not None and most > version.most_bytes:
            raise ConfigError(
                f"a {name} allreduce of {format_size(most)} a rank",
                allowed=f"at most {format_size(version.most_bytes)}",
                remedy="lower --fusion-threshold, or choose auto or two-shot with --algorithm",
            )
        codes = (compression.dtype, compression.scale) if compression is not None else None
        each_sum = codes is not None and order is not None
        reduction: Reduction = version.make(self._group, operands, sums, compression=codes, each_sum=each_sum)
        return reduction

    def _counterparts(self, data: Array) -> list[Array] | None:
        """Return every rank's counterpart of ``data`` in the allocated memory; None if it is not shared."""
        address = data.ctypes.data
        for ranks in self._shared:
            first = address - ranks[self.rank].ctypes.data
            if 0 <= first < ranks[self.rank].nbytes:
                return [memory[first : first + data.nbytes].view(data.dtype) for memory in ranks]
        return None

    def sums_between_layers(self, sums: PartialSums, most_elements: Mapping[str, int]) -> OrderedSum | None:
        return None

    def prepare_round(
        self, receives: Sequence[tuple[Array, int]], sends: Sequence[tuple[Array, int]]
    ) -> PersistentRound | None:
        if type(self.comm) is not MPI.Intracomm:  # ranks that are threads (``dpsim.comm.local``)
            return None
        requests = [self.comm.Recv_init(data, source, _PAYLOAD_TAG) for data, source in receives]
        requests += [self.comm.Send_init(data, to, _PAYLOAD_TAG) for data, to in sends]
        return MpiRound(self, requests, max((data.nbytes for data, _ in receives), default=0))

    def send(self, data: Array, to: int) -> Request:
        return MpiRequest([self.comm.Isend(data, to, _PAYLOAD_TAG)])

    def receive(self, data: Array, source: int) -> Request:
        return MpiRequest([self.comm.Irecv(data, source, _PAYLOAD_TAG)])

    def native_allreduce(self, data: Array) -> None:
        if self.nap_s:
            wait(self, [self.start_native_allreduce(data)])
        else:
            self.comm.Allreduce(MPI.IN_PLACE, data)

    def start_native_allreduce(self, data: Array) -> Request:
        return MpiRequest([self.comm.Iallreduce(MPI.IN_PLACE, data)])

    def close(self) -> None:
        pass


def shares_memory(comm: MPI.Intracomm) -> bool:
    """Return whether all ranks of a group may share memory, on one host; collective."""
    return _ranks_of_this_machine(comm) == comm.size and not on_shaped_hosts()


def _ranks_of_this_machine(comm: MPI.Intracomm) -> int:
    """Return how many ranks of the group run on this machine; collective."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    ranks: int = node.size
    node.Free()
    return ranks
