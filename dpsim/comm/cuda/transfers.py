"""Transfers: they bring pieces of device memory from rank to rank, and add nothing.

``HostTransfer`` copies pieces to page-locked host memory and sends them by MPI: it works wherever MPI does.
``NcclTransfer`` has NCCL send them from GPU to GPU. Whichever it is, the project's kernel adds the pieces (``staged``),
so the bits of a sum depend on no transfer and on no layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from dpsim.comm.cuda.device import Device, DeviceArray, Stream
from dpsim.comm.cuda.nccl import Nccl
from dpsim.comm.mpi import MpiRequest
from dpsim.comm.transport import CollectiveSteps

_TAG = 3
_MOST_BYTES = 1 << 30
_LINE_BYTES = 64
"""Pieces begin at multiples of it in host memory."""

_HostPieces = Sequence[tuple[int, NDArray[np.uint8]]]


class Piece(NamedTuple):
    """An array of bytes on this rank's device, and the rank that it goes to or comes from."""

    peer: int
    array: DeviceArray


class Transfer(Protocol):
    """A transport of pieces in the order of a stream: after earlier work, before later work.

    ``queued``: all of the work is put into the stream at once, and the host need not wait. All ranks ask for the same
    in the same order. ``how`` says it for people.
    """

    how: str
    queued: bool

    def exchange(self, stream: Stream, outgoing: Sequence[Piece], incoming: Sequence[Piece]) -> CollectiveSteps:
        """Send and receive pieces; those between two ranks are in the same order on both."""

    def all_gather(self, stream: Stream, shards: Sequence[DeviceArray]) -> CollectiveSteps:
        """Fill every other rank's shard, an array of bytes each, of one size and one behind the other."""

    def check(self) -> None:
        """Raise ``CommunicationError`` if something went wrong in the stream."""

    def close(self) -> None:
        """Give everything back; nothing may be under way. Collective."""


class HostTransfer:
    """A transfer through page-locked host memory and MPI's messages, for GPUs of several nodes or without peer access.

    Its host memory is used again and again: one exchange or all-gather is under way at a time.
    """

    how = "through host memory by MPI"
    queued = False

    def __init__(self, comm: MPI.Intracomm, device: Device) -> None:
        self._comm, self._device = comm, device
        self._host: NDArray[np.uint8] = np.empty(0, np.uint8)

    def exchange(self, stream: Stream, outgoing: Sequence[Piece], incoming: Sequence[Piece]) -> CollectiveSteps:
        sent, received = (sorted(pieces, key=attrgetter("peer")) for pieces in (outgoing, incoming))
        host = self._host_arrays(stream, [piece.array.nbytes for piece in (*sent, *received)])
        going = list(zip(sent, host, strict=False))
        coming = list(zip(received, host[len(sent) :], strict=True))
        for piece, array in going:
            self._device.download(stream, piece.array, array)
        yield [stream.record()]  # from here on nothing reads what was received before
        yield [self._messages(*([(piece.peer, array) for piece, array in pieces] for pieces in (coming, going)))]
        self._device.use()
        for piece, array in coming:
            self._device.upload(stream, array, piece.array)

    def all_gather(self, stream: Stream, shards: Sequence[DeviceArray]) -> CollectiveSteps:
        rank, host = self._comm.rank, self._host_arrays(stream, [shards[0].nbytes] * len(shards))
        self._device.download(stream, shards[rank], host[rank])
        yield [stream.record()]
        others = [number for number in range(len(shards)) if number != rank]
        yield [self._messages([(n, host[n]) for n in others], [(n, host[rank]) for n in others])]
        self._device.use()
        for number in others:
            self._device.upload(stream, host[number], shards[number])

    def check(self) -> None:
        """Do nothing: MPI ends the job itself."""

    def close(self) -> None:
        self._host = np.empty(0, np.uint8)

    def _messages(self, received: _HostPieces, sent: _HostPieces) -> MpiRequest:
        requests = [self._comm.Irecv(part, peer, _TAG) for peer, array in received for part in _cut(array)]
        requests += [self._comm.Isend(part, peer, _TAG) for peer, array in sent for part in _cut(array)]
        return MpiRequest(requests)

    def _host_arrays(self, stream: Stream, sizes: Sequence[int]) -> list[NDArray[np.uint8]]:
        starts = np.cumsum([0, *(-(-size // _LINE_BYTES) * _LINE_BYTES for size in sizes)]).tolist()
        if self._host.nbytes < starts[-1]:
            stream.wait()  # copies from the memory that is given back
            self._host = self._device.host_memory(starts[-1])
        return [self._host[start : start + size] for start, size in zip(starts, sizes, strict=False)]


class NcclTransfer:
    """NCCL's messages between GPUs, in the stream: grouped send and receive, and its all-gather."""

    how = "by NCCL"
    queued = True

    def __init__(self, nccl: Nccl, rank: int) -> None:
        self._nccl, self._rank = nccl, rank
        self.check, self.close = nccl.check, nccl.close

    def exchange(self, stream: Stream, outgoing: Sequence[Piece], incoming: Sequence[Piece]) -> CollectiveSteps:
        with self._nccl.group():
            for piece in outgoing:
                self._nccl.send(piece.array, piece.peer, stream)
            for piece in incoming:
                self._nccl.receive(piece.array, piece.peer, stream)
        yield from ()

    def all_gather(self, stream: Stream, shards: Sequence[DeviceArray]) -> CollectiveSteps:
        self._nccl.all_gather(shards[self._rank], shards[0], stream)
        yield from ()


def _cut(array: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """Return an array in parts that MPI's count of bytes, an int, can name."""
    return [array[start : start + _MOST_BYTES] for start in range(0, len(array), _MOST_BYTES)]
