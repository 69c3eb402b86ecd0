"""Movers: they bring pieces of device memory from rank to rank, and add nothing.

``HostMover`` copies pieces to page-locked host memory and sends them by MPI: it works wherever MPI does. ``NcclMover``
has NCCL send them from GPU to GPU. Whichever moves them, the project's kernel adds them (``moved``), so the bits of a
sum depend on no mover and on no layout.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class Piece(NamedTuple):
    """An array of bytes on this rank's device, and the rank that it goes to or comes from."""

    peer: int
    array: DeviceArray


class Mover(Protocol):
    """Moves pieces in the order of a stream: what the stream had before is done first, what it gets later comes after.

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


class HostMover:
    """Through page-locked host memory and MPI's messages, for GPUs of several nodes or without peer access.

    Its host memory is used again and again: one exchange or all-gather is under way at a time.
    """

    how = "through host memory by MPI"
    queued = False

    def __init__(self, comm: MPI.Intracomm, device: Device) -> None:
        self._comm, self._device = comm, device
        self._host: NDArray[np.uint8] = np.empty(0, np.uint8)

    def exchange(self, stream: Stream, outgoing: Sequence[Piece], incoming: Sequence[Piece]) -> CollectiveSteps:
        sent, received = sorted(outgoing, key=_peer), sorted(incoming, key=_peer)
        sizes = [piece.array.nbytes for piece in (*sent, *received)]
        places = self._places(stream, sizes)
        coming = places[len(sent) :]
        for piece, place in zip(sent, places, strict=False):
            self._device.download(stream, piece.array, place)
        yield [stream.record()]  # from here on nothing reads what was received before
        from_peers = [(piece.peer, place) for piece, place in zip(received, coming, strict=True)]
        to_peers = [(piece.peer, place) for piece, place in zip(sent, places, strict=False)]
        yield [self._messages(from_peers, to_peers)]
        self._device.use()
        for piece, place in zip(received, coming, strict=True):
            self._device.upload(stream, place, piece.array)

    def all_gather(self, stream: Stream, shards: Sequence[DeviceArray]) -> CollectiveSteps:
        rank, size_bytes = self._comm.rank, shards[0].nbytes
        places = self._places(stream, [size_bytes] * len(shards))
        self._device.download(stream, shards[rank], places[rank])
        yield [stream.record()]
        others = [number for number in range(len(shards)) if number != rank]
        yield [self._messages([(n, places[n]) for n in others], [(n, places[rank]) for n in others])]
        self._device.use()
        for number in others:
            self._device.upload(stream, places[number], shards[number])

    def check(self) -> None:
        """MPI ends the job itself."""

    def close(self) -> None:
        self._host = np.empty(0, np.uint8)

    def _messages(
        self, received: Sequence[tuple[int, NDArray[np.uint8]]], sent: Sequence[tuple[int, NDArray[np.uint8]]]
    ) -> MpiRequest:
        requests = [self._comm.Irecv(part, peer, _TAG) for peer, place in received for part in _cut(place)]
        requests += [self._comm.Isend(part, peer, _TAG) for peer, place in sent for part in _cut(place)]
        return MpiRequest(requests)

    def _places(self, stream: Stream, sizes: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Host memory for arrays of these sizes."""
        starts = np.cumsum([0, *(-(-size // _LINE_BYTES) * _LINE_BYTES for size in sizes)]).tolist()
        if self._host.nbytes < starts[-1]:
            stream.wait()  # copies from the memory that is given back
            self._host = self._device.host_memory(starts[-1])
        return [self._host[start : start + size] for start, size in zip(starts, sizes, strict=False)]


class NcclMover:
    """NCCL's messages between GPUs, in the stream: grouped send and receive, and its all-gather."""

    how = "by NCCL"
    queued = True

    def __init__(self, nccl: Nccl, rank: int) -> None:
        self._nccl, self._rank = nccl, rank

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

    def check(self) -> None:
        self._nccl.check()

    def close(self) -> None:
        self._nccl.close()


def _peer(piece: Piece) -> int:
    return piece.peer


def _cut(place: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """A place in parts that MPI's count of bytes, an int, can name."""
    return [place[start : start + _MOST_BYTES] for start in range(0, len(place), _MOST_BYTES)]
