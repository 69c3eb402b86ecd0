"""The launching side of the line between the process that starts a job and each of its ranks: one JSON value a line.

It is a TCP connection, which works alike on this machine and over several and leaves nothing behind; ``rank_channel``
is the rank's side. A rank proves that it knows the job's secret (``authentication``) and gets the request; then it
sends progress, its failure, and rank 0's result; the parent of a watched rank (``dpsim.launch.supervisor``) sends the
signal that killed it.
What is no JSON object is what Python's faulthandler writes as the process crashes.

Anybody on this machine may connect, and on the network where other hosts take part. Such a connection can do no more
than be closed: of what it sends at most ``HELLO_BYTES`` are kept, nothing is parsed, and its time is bounded.
"""

from __future__ import annotations

import contextlib
import json
import resource
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from dpsim.errors import CommunicationError
from dpsim.launch import authentication
from dpsim.launch.failure_report import JobState, LineReader

VARIABLE = "DPSIM_JOB"
"""In the ranks' environment: the job's secret and where to connect to. Other users can see no environment."""

SPARE_FILES = 32
SEND_S = 60.0
HELLO_S = 10.0
HELLO_BYTES = 1024
_NEWCOMERS = 8


class Listener:
    """The launching side: takes the ranks' connections and passes on what comes in.

    It listens from the start, on this machine's loopback or ``everywhere``; ``environment`` is what the ranks'
    environment needs to find it.
    """

    def __init__(
        self,
        devices: int,
        request: dict[str, Any],
        seen: JobState,
        progress: Callable[[str], None],
        *,
        everywhere: bool,
    ) -> None:
        self._devices, self._request = devices, json.dumps(request)
        self._seen, self._progress = seen, progress
        self._secret = secrets.token_hex(16)
        self._server = _listening(devices, everywhere=everywhere)
        self._newcomers: list[_Newcomer] = []
        self._ranks: dict[int, socket.socket] = {}
        port = self._server.getsockname()[1]
        places = own_addresses() if everywhere else ["127.0.0.1"]
        self.environment = {VARIABLE: " ".join([self._secret, *(f"{place}:{port}" for place in places)])}

    def serve(self, selector: selectors.BaseSelector) -> None:
        """Let ranks in from now on; what they say is read as ``selector`` tells that it is there."""
        selector.register(self._server, selectors.EVENT_READ, _Door(self, selector))

    def close(self) -> None:
        for connection in (self._server, *(new.connection for new in self._newcomers), *self._ranks.values()):
            connection.close()

    @property
    def connected(self) -> bool:
        """Whether some rank is connected."""
        return bool(self._ranks)

    @property
    def all_done(self) -> bool:
        """Whether every rank has done its task."""
        return len(self._seen.done) == self._devices

    def accept(self, selector: selectors.BaseSelector) -> None:
        """Send a challenge to whoever connects. One that has gone before leaves nothing to be done."""
        with contextlib.suppress(OSError):
            connection, _ = self._server.accept()
            newcomer = _Newcomer(self, selector, connection)
            self._newcomers.append(newcomer)
            selector.register(connection, selectors.EVENT_READ, newcomer)
            newcomer.challenge()

    def close_silent(self, selector: selectors.BaseSelector) -> None:
        """Close connections that have not said hello in time, and the oldest of too many: files are limited."""
        too_many = len(self._ranks) + len(self._newcomers) - self._devices - _NEWCOMERS
        for number, newcomer in enumerate(list(self._newcomers)):
            if number < too_many or time.monotonic() > newcomer.until_s:
                selector.unregister(newcomer.connection)
                newcomer.end()

    def hello(self, newcomer: _Newcomer, line: bytes) -> int:
        """The rank that sent ``line``, which now has its request. Raises ``CommunicationError`` for anybody else."""
        hello = json.loads(authentication.verified(self._secret, "rank", newcomer.sent, line))
        rank = int(hello["rank"])
        newcomer.connection.settimeout(SEND_S)
        newcomer.connection.sendall(authentication.signed(self._secret, "launcher", hello["challenge"], self._request))
        self._seen.pids[rank] = (str(hello["host"]), int(hello["pid"]))
        self._ranks[rank] = newcomer.connection
        self._newcomers.remove(newcomer)
        return rank

    def leaves(self, newcomer: _Newcomer) -> None:
        """Close a connection that was never a rank's."""
        self._newcomers.remove(newcomer)
        newcomer.connection.close()

    def take(self, rank: int, line: str) -> None:
        """One line of a rank's. A rank that is killed as it sends one leaves it unfinished: that says nothing."""
        if not line.startswith("{"):
            self._seen.faults[rank] = self._seen.faults.get(rank, "") + line + "\n"
            return
        try:
            ((kind, value),) = json.loads(line).items()
        except ValueError:
            return
        if kind == "progress":
            self._progress(value)
        elif kind == "killed":
            self._seen.killed.setdefault(rank, value)
        elif kind == "deserted":
            self._seen.deserted.setdefault(rank, value)
        elif kind == "done":
            self._seen.done.add(rank)
        elif kind == "result":
            self._seen.result = [value]
        elif not self._seen.killed:  # what fails after a kill fails because of it
            self._seen.errors.append(value)

    def ended(self, rank: int) -> None:
        self._ranks.pop(rank).close()
        self._seen.ended(rank)


def _listening(devices: int, *, everywhere: bool) -> socket.socket:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        if soft != resource.RLIM_INFINITY and soft < devices + SPARE_FILES:
            raise OSError(f"{soft} open files are allowed")
        return socket.create_server(("" if everywhere else "127.0.0.1", 0), backlog=devices + _NEWCOMERS)
    except OSError as error:
        raise CommunicationError(
            f"cannot start {devices} ranks: {error.strerror or error}",
            remedy="use fewer devices, or raise the limit of open files (ulimit -n)",
        ) from error


class _Door:
    """Reads nothing: each event is a connection that somebody makes."""

    def __init__(self, listener: Listener, selector: selectors.BaseSelector) -> None:
        self._listener, self._selector = listener, selector

    def read(self, _: int) -> bool:
        self._listener.accept(self._selector)
        return True

    def end(self) -> None:
        pass


class _Newcomer:
    """A connection that has not yet proved to be a rank's. It has ``HELLO_S`` seconds and ``HELLO_BYTES`` for that."""

    def __init__(self, listener: Listener, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        self._listener, self._selector, self.connection = listener, selector, connection
        self.sent, self.until_s = authentication.challenge(), time.monotonic() + HELLO_S
        self._said = b""
        connection.setblocking(False)

    def challenge(self) -> None:
        self.connection.sendall(f"{self.sent}\n".encode())

    def read(self, _: int) -> bool:
        """Take what is there. False for who has gone, has sent too much, or is no rank of this job."""
        try:
            data = self.connection.recv(HELLO_BYTES - len(self._said))
            self._said += data
            if not self._said.endswith(b"\n"):  # a rank says nothing more until it has the request
                return bool(data) and len(self._said) < HELLO_BYTES
            rank = self._listener.hello(self, self._said)
        except BlockingIOError:
            return True
        except (OSError, CommunicationError):
            return False
        self._selector.modify(self.connection, selectors.EVENT_READ, _RankLine(self._listener, rank))
        return True

    def end(self) -> None:
        self._listener.leaves(self)


class _RankLine(LineReader):
    """One rank's connection. Its end is the end of the rank's process.

    A dying process closes its files early: in which order these ends come tells which rank died first, where
    ``mpiexec`` may name one that it killed itself.
    """

    def __init__(self, listener: Listener, rank: int) -> None:
        super().__init__(lambda line: listener.take(rank, line))
        self._listener, self._rank = listener, rank

    def read(self, handle: int) -> bool:
        """As in ``LineReader``."""
        try:
            if super().read(handle):
                return True
        except ConnectionError:
            pass  # a killed process may end its connection so
        self.end()
        self._listener.ended(self._rank)
        return False


def own_addresses() -> list[str]:
    """Where other hosts may reach this one: its name first, then its addresses, loopback last."""
    import psutil

    found = [
        address.address
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family == socket.AF_INET
    ]
    found.sort(key=lambda address: address.startswith("127."))
    return [socket.gethostname(), *found]
