"""The line between the process that starts a job and each of its ranks: a TCP connection with one JSON value a line.

It works alike on this machine and over several, needs no shared file system and leaves nothing behind. A rank
says hello with the job's secret and gets the request; then it sends progress, its failure, and rank 0's result; the
parent of a watched rank (``dpsim.comm.watch``) sends the signal that killed it.
What is no JSON object is what Python's faulthandler writes as the process crashes.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import resource
import secrets
import selectors
import socket
from collections.abc import Callable, Mapping
from typing import Any

from dpsim.comm.rank_output import Seen, Splitter
from dpsim.errors import CommunicationError

VARIABLE = "DPSIM_JOB"
"""In the ranks' environment: the job's secret and where to connect to. Other users can see no environment."""

_SPARE_FILES = 32
_CONNECT_S, _SEND_S = 5.0, 60.0


class Listener:
    """The launching side: takes the ranks' connections and passes on what comes in.

    It listens from the start, on this machine's loopback or ``everywhere``; ``environment`` is what the ranks'
    environment needs to find it.
    """

    def __init__(
        self, devices: int, request: dict[str, Any], seen: Seen, progress: Callable[[str], None], *, everywhere: bool
    ) -> None:
        self._request = (json.dumps(request) + "\n").encode()
        self._seen, self._progress = seen, progress
        self._secret = secrets.token_hex(16)
        self._server = _listening(devices, everywhere=everywhere)
        self._open: list[socket.socket] = []
        self._present: set[int] = set()
        port = self._server.getsockname()[1]
        places = own_addresses() if everywhere else ["127.0.0.1"]
        self.environment = {VARIABLE: " ".join([self._secret, *(f"{place}:{port}" for place in places)])}

    def serve(self, selector: selectors.BaseSelector) -> None:
        """Let ranks in from now on; what they say is read as ``selector`` tells that it is there."""
        selector.register(self._server, selectors.EVENT_READ, _Door(self, selector))

    def close(self) -> None:
        for one in (self._server, *self._open):
            one.close()

    @property
    def connected(self) -> bool:
        """Whether some rank is connected."""
        return bool(self._present)

    def accept(self, selector: selectors.BaseSelector) -> None:
        connection, _ = self._server.accept()
        self._open.append(connection)
        connection.settimeout(_SEND_S)
        selector.register(connection, selectors.EVENT_READ, _RankLine(self, connection))

    def hello(self, told: Mapping[str, Any], connection: socket.socket) -> int | None:
        """The rank that said hello, which now has its request; None for a stranger, who is sent away."""
        if not hmac.compare_digest(str(told.get("secret")), self._secret):
            connection.shutdown(socket.SHUT_RDWR)
            return None
        rank = int(told["rank"])
        self._seen.pids[rank] = (str(told["host"]), int(told["pid"]))
        self._present.add(rank)
        connection.sendall(self._request)
        return rank

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
        elif kind == "result":
            self._seen.result = [value]
        elif not self._seen.killed:  # what fails after a kill fails because of it
            self._seen.errors.append(value)

    def ended(self, rank: int) -> None:
        self._present.discard(rank)
        self._seen.ended(rank)


def _listening(devices: int, *, everywhere: bool) -> socket.socket:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        if soft != resource.RLIM_INFINITY and soft < devices + _SPARE_FILES:
            raise OSError(f"{soft} open files are allowed")
        return socket.create_server(("" if everywhere else "127.0.0.1", 0), backlog=devices)
    except OSError as error:
        raise CommunicationError(
            f"cannot start {devices} ranks: {error.strerror or error}",
            remedy="use fewer devices, or raise the limit of open files (ulimit -n)",
        ) from error


class _Door:
    """Reads nothing: each event is a rank that connects."""

    def __init__(self, listener: Listener, selector: selectors.BaseSelector) -> None:
        self._listener, self._selector = listener, selector

    def read(self, _: int) -> bool:
        self._listener.accept(self._selector)
        return True

    def end(self) -> None:
        pass


class _RankLine(Splitter):
    """One rank's connection. Its end is the end of the rank's process.

    A dying process closes its files early: in which order these ends come tells which rank died first, where
    ``mpiexec`` may name one that it killed itself.
    """

    def __init__(self, listener: Listener, connection: socket.socket) -> None:
        super().__init__(self._take)
        self._listener, self._connection, self._rank = listener, connection, -1

    def read(self, handle: int) -> bool:
        """As in ``Splitter``."""
        try:
            if super().read(handle):
                return True
        except ConnectionError:
            pass  # a killed process may end its connection so
        if self._rank >= 0:
            self._listener.ended(self._rank)
        return False

    def _take(self, line: str) -> None:
        if self._rank < 0:
            try:
                told = json.loads(line)
            except ValueError:
                told = {}
            rank = self._listener.hello(told if isinstance(told, dict) else {}, self._connection)
            self._rank = -1 if rank is None else rank
        else:
            self._listener.take(self._rank, line)


class Line:
    """A rank's side."""

    def __init__(self, connection: socket.socket, request: dict[str, Any]) -> None:
        self._connection, self.request = connection, request

    def fileno(self) -> int:
        """For faulthandler, which writes a crash straight to it."""
        return self._connection.fileno()

    def send(self, kind: str, value: Any) -> None:
        """``progress``, ``error`` or ``result``."""
        self._connection.sendall((json.dumps({kind: value}) + "\n").encode())

    def killed(self, number: int) -> None:
        """For the parent of a rank that a signal has ended, maybe amid a line; returns when the launcher hangs up."""
        with contextlib.suppress(OSError):  # the launcher has gone before
            self._connection.sendall(b"\n" + json.dumps({"killed": number}).encode() + b"\n")
            self._connection.recv(1)


def connect(rank: int, environment: Mapping[str, str] = os.environ) -> Line:
    """Say hello to the process that started this job, as its rank ``rank``. Raises ``CommunicationError``."""
    secret, *places = environment[VARIABLE].split()
    failure: OSError | None = None
    for place in places:
        host, _, port = place.rpartition(":")
        try:
            connection = socket.create_connection((host, int(port)), timeout=_CONNECT_S)
        except OSError as error:
            failure = error
            continue
        connection = _closed_first(connection)
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        hello = {"secret": secret, "rank": rank, "pid": os.getpid(), "host": socket.gethostname()}
        connection.sendall((json.dumps(hello) + "\n").encode())
        with connection.makefile("r", encoding="utf-8") as reader:
            return Line(connection, json.loads(reader.readline()))
    raise CommunicationError(
        f"rank {rank} on {socket.gethostname()} cannot reach the process that started it at {', '.join(places)}:"
        f" {failure}",
        remedy="let this host reach the one that starts the job, or start the ranks with the scheduler's own launcher",
    )


def _closed_first(connection: socket.socket) -> socket.socket:
    """The same connection under the highest file number that is free.

    Linux closes a killed process's files from the highest number down (the delayed closing of a task's files is a
    stack). This one must close before the one that tells ``mpiexec``, which then kills the other ranks: the order
    in which connections end is how the launcher knows who died first.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = (1 << 12 if soft == resource.RLIM_INFINITY else min(soft, 1 << 12)) - 1
    number = next((n for n in range(highest, highest - _SPARE_FILES, -1) if not _is_open(n)), None)
    if number is None:
        return connection
    moved = socket.socket(fileno=os.dup2(connection.fileno(), number, inheritable=False))
    connection.close()
    return moved


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


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
