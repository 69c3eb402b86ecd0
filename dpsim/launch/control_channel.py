"""The launching side of the connection between the process that starts a job and each rank: one JSON object a line.

It is a TCP connection, which works alike on one machine and between several, and leaves nothing behind.
``rank_channel`` is the rank's side. A rank proves that it knows the job's secret (``authentication``) and receives the
request; then it sends progress, its failure, and on rank 0 the result. The parent of a watched rank
(``dpsim.launch.supervisor``) sends the signal that killed the rank. A line that is not a JSON object was written by
Python's faulthandler while the process crashed.

Anybody on this machine can connect, and anybody on the network if other hosts take part. An unverified connection can
do no harm: at most ``HELLO_BYTES`` of what it sends are kept, nothing is parsed, and it is closed after ``HELLO_S``.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from dpsim.errors import CommunicationError
from dpsim.launch import authentication
from dpsim.launch.failure_report import JobState
from dpsim.progress import Progress

SPARE_FILES = 32
SEND_S = 60.0
HELLO_S = 10.0
HELLO_BYTES = 1024
_MOST_UNVERIFIED = 8


class LineReader:
    """Reads a non-blocking file descriptor and calls ``handle_line`` with each whole line."""

    def __init__(self, handle_line: Callable[[str], Any]) -> None:
        self._handle_line, self._partial = handle_line, b""

    def read(self, descriptor: int) -> bool:
        """Read what has arrived. False at the end of the file."""
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return True
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._handle_line(line.decode("utf-8", "replace"))
        return bool(data)

    def end(self) -> None:
        """Handle a last line that has no newline."""
        if self._partial:
            self._handle_line(self._partial.decode("utf-8", "replace"))
            self._partial = b""


class Listener:
    """Accepts the ranks' connections and records in ``state`` what they send.

    It listens as soon as it is made, on the loopback interface or on all (``all_interfaces``). The ranks find it by
    the variables in ``environment``.
    """

    def __init__(
        self,
        devices: int,
        request: dict[str, Any],
        state: JobState,
        progress: Progress,
        *,
        all_interfaces: bool,
    ) -> None:
        self._devices, self._request = devices, json.dumps(request)
        self._state, self._progress = state, progress
        self._secret = secrets.token_hex(16)
        self._server = _server(devices, all_interfaces=all_interfaces)
        self._unverified: list[_UnverifiedConnection] = []
        self._ranks: dict[int, socket.socket] = {}
        port = self._server.getsockname()[1]
        addresses = own_addresses() if all_interfaces else ["127.0.0.1"]
        self.environment = {
            authentication.VARIABLE: " ".join([self._secret, *(f"{address}:{port}" for address in addresses)])
        }

    def serve(self, selector: selectors.BaseSelector) -> None:
        """Accept connections from now on. The data of each ``selector`` event has ``read(descriptor)`` to be called."""
        selector.register(self._server, selectors.EVENT_READ, _Acceptor(self, selector))

    def close(self) -> None:
        unverified = (connection.socket for connection in self._unverified)
        for connection in (self._server, *unverified, *self._ranks.values()):
            connection.close()

    @property
    def connected(self) -> bool:
        """Whether any rank is connected."""
        return bool(self._ranks)

    @property
    def all_done(self) -> bool:
        """Whether every rank has finished its task."""
        return len(self._state.done) == self._devices

    def accept(self, selector: selectors.BaseSelector) -> None:
        """Accept a connection and send it a challenge. If it has already been closed, nothing happens."""
        with contextlib.suppress(OSError):
            accepted, _ = self._server.accept()
            connection = _UnverifiedConnection(self, selector, accepted)
            self._unverified.append(connection)
            selector.register(accepted, selectors.EVENT_READ, connection)
            connection.send_challenge()

    def close_silent(self, selector: selectors.BaseSelector) -> None:
        """Close unverified connections whose time is over, and the oldest if there are too many: files are limited."""
        excess = len(self._ranks) + len(self._unverified) - self._devices - _MOST_UNVERIFIED
        for number, connection in enumerate(list(self._unverified)):
            if number < excess or time.monotonic() > connection.deadline_s:
                selector.unregister(connection.socket)
                connection.end()

    def verify(self, connection: _UnverifiedConnection, hello: bytes) -> int:
        """The rank that sent ``hello``; it gets the request. Raises ``CommunicationError`` if it is not a rank."""
        fields = json.loads(authentication.verified(self._secret, "rank", connection.challenge, hello))
        rank = int(fields["rank"])
        connection.socket.settimeout(SEND_S)
        connection.socket.sendall(authentication.signed(self._secret, "launcher", fields["challenge"], self._request))
        self._state.pids[rank] = (str(fields["host"]), int(fields["pid"]))
        self._ranks[rank] = connection.socket
        self._unverified.remove(connection)
        return rank

    def discard(self, connection: _UnverifiedConnection) -> None:
        """Close a connection that did not prove to be a rank's."""
        self._unverified.remove(connection)
        connection.socket.close()

    def receive(self, rank: int, line: str) -> None:
        """Record one line that a rank sent. A line that a killed rank left unfinished is dropped."""
        if not line.startswith("{"):
            self._state.faults[rank] = self._state.faults.get(rank, "") + line + "\n"
            return
        try:
            ((kind, value),) = json.loads(line).items()
        except ValueError:
            return
        if kind == "progress":
            self._progress(value)
        elif kind == "killed":
            self._state.killed.setdefault(rank, value)
        elif kind == "orphaned":
            self._state.orphaned.setdefault(rank, value)
        elif kind == "done":
            self._state.done.add(rank)
        elif kind == "result":
            self._state.result = [value]
        elif not self._state.killed:  # an error after a rank was killed is a consequence of that
            self._state.errors.append(value)

    def ended(self, rank: int) -> None:
        """Record that a rank's process has ended."""
        self._ranks.pop(rank).close()
        self._state.ended(rank)


def _server(devices: int, *, all_interfaces: bool) -> socket.socket:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        if soft != resource.RLIM_INFINITY and soft < devices + SPARE_FILES:
            raise OSError(f"only {soft} open files are allowed")
        return socket.create_server(("" if all_interfaces else "127.0.0.1", 0), backlog=devices + _MOST_UNVERIFIED)
    except OSError as error:
        raise CommunicationError(
            f"cannot start {devices} ranks: {error.strerror or error}",
            remedy="use fewer devices, or raise the limit of open files (ulimit -n)",
        ) from error


class _Acceptor:
    """The selector's data for the server socket: each event is a new connection."""

    def __init__(self, listener: Listener, selector: selectors.BaseSelector) -> None:
        self._listener, self._selector = listener, selector

    def read(self, _: int) -> bool:
        self._listener.accept(self._selector)
        return True

    def end(self) -> None:
        pass


class _UnverifiedConnection:
    """A connection that has yet to prove, in ``HELLO_S`` seconds and ``HELLO_BYTES`` bytes, that it is a rank's."""

    def __init__(self, listener: Listener, selector: selectors.BaseSelector, accepted: socket.socket) -> None:
        self._listener, self._selector, self.socket = listener, selector, accepted
        self.challenge, self.deadline_s = authentication.challenge(), time.monotonic() + HELLO_S
        self._received = b""
        accepted.setblocking(False)

    def send_challenge(self) -> None:
        self.socket.sendall(f"{self.challenge}\n".encode())

    def read(self, _: int) -> bool:
        """Read what has arrived. False if the connection has ended, has sent too much, or is not a rank's."""
        try:
            data = self.socket.recv(HELLO_BYTES - len(self._received))
            self._received += data
            if not self._received.endswith(b"\n"):  # a rank sends nothing more until it has the request
                return bool(data) and len(self._received) < HELLO_BYTES
            rank = self._listener.verify(self, self._received)
        except BlockingIOError:
            return True
        except (OSError, CommunicationError):
            return False
        self._selector.modify(self.socket, selectors.EVENT_READ, _RankConnection(self._listener, rank))
        return True

    def end(self) -> None:
        self._listener.discard(self)


class _RankConnection(LineReader):
    """One rank's connection. It ends when the rank's process ends.

    A dying process closes its files early. So the order in which connections end shows which rank died first, where
    ``mpiexec`` may report a rank that it killed itself.
    """

    def __init__(self, listener: Listener, rank: int) -> None:
        super().__init__(lambda line: listener.receive(rank, line))
        self._listener, self._rank = listener, rank

    def read(self, descriptor: int) -> bool:
        """As in ``LineReader``."""
        try:
            if super().read(descriptor):
                return True
        except ConnectionError:
            pass  # this may be how the connection of a killed process ends
        self.end()
        self._listener.ended(self._rank)
        return False


def own_addresses() -> list[str]:
    """Where other hosts may reach this one: its name first, then its IPv4 addresses, loopback last."""
    import psutil

    addresses = [
        address.address
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family == socket.AF_INET
    ]
    addresses.sort(key=lambda address: address.startswith("127."))
    return [socket.gethostname(), *addresses]
