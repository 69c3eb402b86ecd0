"""A link emulated in user space: every message of a real run is held to a latency and a bandwidth.

Each device has one full-duplex link. A message of s bytes sent at t leaves when the sender's link is free,
occupies it for s / bandwidth, and arrives latency later (and not before the receiver's link has taken what
came earlier). Times are absolute: polling one message late does not delay the next. The bytes themselves
travel at once through MPI; the receiver sees them when they are due.

Messages between devices of one node of a layout are not the link's: they go as fast as this machine can.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from dpsim.comm.clock import now
from dpsim.comm.mpi import MpiTransport, test
from dpsim.comm.transport import Array, PersistentRound, Request, Transport
from dpsim.constraints import check
from dpsim.machine import Network

_HEADER_TAG, _PAYLOAD_TAG = 1, 2
_NAPS, _LEAST_NAP_S, _MOST_NAP_S = 4, 40e-6, 500e-6
"""A rank that sleeps while it waits looks so often within the link's latency, to see messages before they are due."""
_TESTS = 3
"""MPI's handshake for a long message takes up to three tests; a rank that polls rarely should do them in one poll."""


def _complete(requests: list[MPI.Request]) -> bool:
    return any(test(requests) for _ in range(_TESTS))


class _Outgoing:
    """A message that has left: its buffer is free once MPI has taken it. Keeps the header alive."""

    __slots__ = ("_header", "_requests")

    def __init__(self, requests: list[MPI.Request], header: NDArray[np.float64]) -> None:
        self._requests = requests
        self._header = header

    def done(self) -> bool:
        return _complete(self._requests)

    def due_s(self) -> float | None:
        return None  # nothing to wait for but MPI


class _Incoming:
    """A message that is done once its bytes have arrived and its time has come."""

    __slots__ = ("_arrived", "_due_s", "_header", "_link", "_requests")

    def __init__(self, link: _Link, requests: list[MPI.Request], header: NDArray[np.float64]) -> None:
        self._link = link
        self._requests = requests
        self._header = header
        self._arrived = False
        self._due_s: float | None = None

    def done(self) -> bool:
        if not self._arrived:
            if not _complete(self._requests):
                return False
            self._arrived = True
            self._due_s = self._link.take(self._header[0], self._header[1])
        return now() >= self._due_s  # type: ignore[operator]  # set with _arrived

    def due_s(self) -> float | None:
        return self._due_s


class _Link:
    """The times when a device's link is free again, in each direction. Several threads may use it."""

    __slots__ = ("_incoming_free_s", "_lock", "_outgoing_free_s")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outgoing_free_s = self._incoming_free_s = 0.0

    def leave(self, transmission_s: float) -> float:
        """Return when a message that is sent now has left."""
        with self._lock:
            self._outgoing_free_s = max(now(), self._outgoing_free_s) + transmission_s
            return self._outgoing_free_s

    def take(self, due_s: float, transmission_s: float) -> float:
        """Return when a message is through the receiver's own link, which it shares with what came earlier."""
        with self._lock:
            self._incoming_free_s = max(due_s, self._incoming_free_s + transmission_s)
            return self._incoming_free_s


class PacedTransport(MpiTransport):
    """MPI messages between nodes held to ``network``'s latency and bandwidth. Emulated: label what it times as such.

    With ``sleeps`` a rank that waits sleeps, so that many ranks can share a few cores. A transport has a link of its
    own, or shares that of ``world``.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        network: Network,
        devices_a_node: int = 1,
        *,
        sleeps: bool = False,
        world: Transport | None = None,
    ) -> None:
        super().__init__(comm, devices_a_node, world=world)
        self.network = network
        if sleeps:
            self.nap_s = min(max(network.latency_s / _NAPS, _LEAST_NAP_S), _MOST_NAP_S)
        self._one_node = False  # an emulated link joins the ranks, not memory
        self.link: _Link = world.link if isinstance(world, PacedTransport) else _Link()

    def _on_same_node(self, rank: int) -> bool:
        """Return whether that rank is on this rank's node."""
        return rank // self.devices_a_node == self.rank // self.devices_a_node

    def prepare_round(
        self, receives: Sequence[tuple[Array, int]], sends: Sequence[tuple[Array, int]]
    ) -> PersistentRound | None:
        return None  # each message leaves at a moment of its own

    def send(self, data: Array, to: int) -> Request:
        if self._on_same_node(to):
            return super().send(data, to)
        transmission_s = data.nbytes / self.network.bandwidth_bytes_per_s
        header = np.array([self.link.leave(transmission_s) + self.network.latency_s, transmission_s])
        requests = [self.comm.Isend(header, to, _HEADER_TAG), self.comm.Isend(data, to, _PAYLOAD_TAG)]
        return _Outgoing(requests, header)

    def receive(self, data: Array, source: int) -> Request:
        if self._on_same_node(source):
            return super().receive(data, source)
        header = np.empty(2)
        requests = [self.comm.Irecv(header, source, _HEADER_TAG), self.comm.Irecv(data, source, _PAYLOAD_TAG)]
        return _Incoming(self.link, requests, header)

    def native_allreduce(self, data: Array) -> None:
        check("network", algorithm="mpi", network=self.network)

    def start_native_allreduce(self, data: Array) -> Request:
        check("network", algorithm="mpi", network=self.network)
        raise AssertionError("unreachable: it was refused")
