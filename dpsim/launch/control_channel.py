"""The connection between the process that starts a job and each rank: one JSON object a line, over TCP.

TCP works alike on one machine and between several, and leaves nothing behind; only ranks on shaped hosts, which it does
not reach, have a socket in a folder. A rank and the starting process prove to each other that they know the job's
secret, without sending it: each end sends a challenge, and signs its first message with HMAC-SHA-256 over its role, the
other end's challenge and the message. So a recorded message cannot be sent again. The rank's first message says who it
is, the answer is the request; then the rank sends progress, its failure, and on rank 0 the result. The parent of a
watched rank (``dpsim.launch.worker``) sends the signal that killed the rank. A line that is not a JSON object was
written by Python's faulthandler while the process crashed.

Anybody on this machine can connect, and anybody on the network if other hosts take part. A stranger's connection can do
no harm: nobody waits for it, less than ``HELLO_BYTES`` of an unfinished line are kept, nothing is parsed before its
sender is known, and it is closed after ``HELLO_S``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import os
import resource
import secrets
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from dpsim.errors import CommunicationError
from dpsim.launch.failure_report import JobState
from dpsim.progress import Progress

VARIABLE = "DPSIM_JOB"
"""In the ranks' environment: the job's secret and the addresses to connect to. Other users cannot read it there."""

HELLO_S, HELLO_BYTES = 10.0, 1024
_SPARE_FILES = 32
_SEND_S = 60.0
_MOST_STRANGERS = 8
_CONNECT_S, _RETRY_FOR_S, _RETRY_AFTER_S = 5.0, 5.0, 0.2


def signed(secret: str, role: str, challenge: str, message: str) -> bytes:
    """Return one line: the signature of ``message`` in answer to ``challenge``, a space, and the message (ASCII)."""
    signature = hmac.new(secret.encode(), f"{role} {challenge} {message}".encode(), "sha256")
    return f"{signature.hexdigest()} {message}\n".encode()


def verified(secret: str, role: str, challenge: str, line: bytes) -> Any:
    """Return the JSON value in a line that ``signed`` made.

    Raises ``CommunicationError`` if the signature is not that of this ``role`` for this ``challenge``.
    """
    message = line.rstrip(b"\n").partition(b" ")[2].decode("latin-1")
    if not hmac.compare_digest(line.rstrip(b"\n") + b"\n", signed(secret, role, challenge, message)):
        raise CommunicationError(f"the other end of the connection is no {role} of this job")
    return json.loads(message)


class Lines:
    """Lines that arrive at a file: ``handle_line`` gets each. ``rank`` is set where a rank has sent them."""

    rank: int | None = None

    def __init__(self, file: IO[bytes] | socket.socket, handle_line: Callable[[bytes], Any]) -> None:
        os.set_blocking(file.fileno(), False)
        self.file, self.handle_line, self.partial = file, handle_line, b""

    def read(self) -> bool:
        """Read what has arrived. False at the end of the file."""
        try:
            data = os.read(self.file.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        except ConnectionError:  # the connection of a killed process may end so
            return False
        *lines, self.partial = (self.partial + data).split(b"\n")
        for line in lines:
            self.handle_line(line)
        return bool(data)

    def close(self) -> None:
        """Handle a last line that has no line end, and close the file."""
        if self.partial:
            self.handle_line(self.partial)
        self.file.close()


class Listener:
    """The starting process's end: accepts the ranks' connections and records in ``state`` what they send.

    It listens as soon as it is made, on the loopback interface or on all (``all_interfaces``); or on a socket of the
    folder ``between``, which ranks in other network namespaces of this machine reach. The ranks find it by the
    variables in ``environment``.
    """

    def __init__(
        self,
        devices: int,
        request: dict[str, Any],
        state: JobState,
        progress: Progress,
        *,
        all_interfaces: bool,
        between: Path | None = None,
    ) -> None:
        self._devices, self._request, self._secret = devices, json.dumps(request), secrets.token_hex(16)
        self._state, self._progress = state, progress
        self._server = _server(devices, all_interfaces=all_interfaces, between=between)
        self._strangers: list[_Connection] = []
        self._ranks: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        name = self._server.getsockname()
        hosts = own_addresses() if all_interfaces else ["127.0.0.1"]
        addresses = [f"{host}:{name[1]}" for host in hosts] if between is None else [name]
        self.environment = {VARIABLE: " ".join([self._secret, *addresses])}

    @property
    def connected(self) -> bool:
        """Whether any rank is connected."""
        return bool(self._ranks)

    @property
    def all_done(self) -> bool:
        """Whether every rank has finished its task."""
        return len(self._state.done) == self._devices

    def add(self, lines: Lines) -> None:
        """Read these lines, too, from now on."""
        self._selector.register(lines.file, selectors.EVENT_READ, lines)

    def handle_events(self, timeout_s: float) -> bool:
        """Read whatever has arrived; returns whether anything had. Strangers are sent away in time."""
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            if key.data is None:
                self._accept()
            elif not key.data.read():
                self._remove(key.data)
        excess = len(self._ranks) + len(self._strangers) - self._devices - _MOST_STRANGERS  # files are limited
        for number, stranger in enumerate(list(self._strangers)):
            if number < excess or time.monotonic() > stranger.deadline_s:
                self._remove(stranger)
        return bool(ready)

    def close(self) -> None:
        """Handle the last lines of all that is read, and close it."""
        for key in self._selector.get_map().values():
            (key.data or self._server).close()
        self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it may have been closed already
            accepted, _ = self._server.accept()
            stranger = _Connection(self, accepted)
            self._strangers.append(stranger)
            self.add(stranger)
            accepted.sendall(f"{stranger.challenge}\n".encode())

    def _remove(self, lines: Lines) -> None:
        self._selector.unregister(lines.file)
        lines.close()
        if lines in self._strangers:
            self._strangers.remove(lines)
        if lines.rank is not None:
            self._ranks.discard(lines.rank)
            if self._state.first_ended is None:
                self._state.first_ended = lines.rank

    def verify(self, stranger: _Connection, hello: bytes) -> int:
        """Return the rank that sent ``hello``; it gets the request. Raises ``CommunicationError`` if it is no rank."""
        fields = verified(self._secret, "rank", stranger.challenge, hello)
        rank = int(fields["rank"])
        stranger.file.settimeout(_SEND_S)
        stranger.file.sendall(signed(self._secret, "launcher", fields["challenge"], self._request))
        self._state.pids[rank] = (str(fields["host"]), int(fields["pid"]))
        self._strangers.remove(stranger)
        self._ranks.add(rank)
        return rank

    def receive(self, rank: int, line: str) -> None:
        """Record one line that a rank sent. A line that a killed rank left unfinished is dropped."""
        state = self._state
        if not line.startswith("{"):
            state.faults[rank] = state.faults.get(rank, "") + line + "\n"
            return
        try:
            ((kind, value),) = json.loads(line).items()
        except ValueError:
            return
        if kind == "progress":
            self._progress(value)
        elif kind in ("killed", "orphaned"):
            getattr(state, kind).setdefault(rank, value)
        elif kind == "lost":
            state.lost[rank] = value
            state.done.add(rank)
            if len(state.lost) == self._devices or len(state.independent) < self._devices:
                state.killed.update(state.lost)
        elif kind == "independent":
            state.independent.add(rank)
        elif kind == "done":
            state.done.add(rank)
        elif kind == "result":
            state.result = [value]
        elif not state.killed:  # an error after a rank was killed is a consequence of that
            state.errors.append(value)


class _Connection(Lines):
    """A stranger's connection, until its first line proves that it is a rank's.

    It ends when the rank's process ends. A dying process closes its files early. So the order in which connections end
    shows which rank died first, where ``mpiexec`` may report a rank that it killed itself.
    """

    file: socket.socket

    def __init__(self, listener: Listener, accepted: socket.socket) -> None:
        super().__init__(accepted, self._handle)
        self._listener, self.challenge, self.deadline_s = listener, secrets.token_hex(16), time.monotonic() + HELLO_S

    def read(self) -> bool:
        """Read what has arrived. False if the connection has ended, or is not a rank's."""
        if self.rank is not None:
            return super().read()
        try:
            return super().read() and len(self.partial) < HELLO_BYTES
        except (OSError, CommunicationError):
            return False

    def close(self) -> None:
        if self.rank is None:
            self.partial = b""
        super().close()

    def _handle(self, line: bytes) -> None:
        if self.rank is None:
            self.rank = self._listener.verify(self, line)
        else:
            self._listener.receive(self.rank, line.decode("utf-8", "replace"))


def _server(devices: int, *, all_interfaces: bool, between: Path | None) -> socket.socket:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        if soft != resource.RLIM_INFINITY and soft < devices + _SPARE_FILES:
            raise OSError(f"only {soft} open files are allowed")
        backlog = devices + _MOST_STRANGERS
        if between is not None:
            server = socket.socket(socket.AF_UNIX)
            server.bind(str(between / "launcher.socket"))
            server.listen(backlog)
            return server
        return socket.create_server(("" if all_interfaces else "127.0.0.1", 0), backlog=backlog)
    except OSError as error:
        raise CommunicationError(
            f"cannot start {devices} ranks: {error.strerror or error}",
            remedy="use fewer devices, or raise the limit of open files (ulimit -n)",
        ) from error


def own_addresses() -> list[str]:
    """Return where other hosts may reach this one: its name first, then its IPv4 addresses, loopback last."""
    import psutil

    interfaces = psutil.net_if_addrs().values()
    addresses = [each.address for interface in interfaces for each in interface if each.family == socket.AF_INET]
    return [socket.gethostname(), *sorted(addresses, key=lambda address: address.startswith("127."))]


class LauncherConnection:
    """The rank's end; ``request`` is what the starting process asked for."""

    def __init__(self, connection: socket.socket, request: dict[str, Any]) -> None:
        self._socket, self.request = connection, request
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """Return the descriptor to which Python's faulthandler writes the report of a crash."""
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(self, kind: str, value: Any) -> None:
        """Send a message; ``kind`` is ``progress``, ``error``, ``result``, ``done``, ``orphaned``, ``independent``,
        ``killed`` or ``lost``.

        The last two begin with a line end: the rank may have been killed while it sent a line.
        """
        line = json.dumps({kind: value}) + "\n"
        with self._sending:
            self._socket.sendall(("\n" * (kind in ("killed", "lost")) + line).encode())

    def wait_for_end(self, process: int | None = None, timeout_s: float | None = None) -> bool:
        """Wait until the starting process hangs up, or until ``process`` (a pidfd) ends or ``timeout_s`` is over.

        Returns whether the starting process has hung up: it sends nothing more. The wait takes no core time.
        """
        poll = select.poll()
        for descriptor in [self.fileno()] if process is None else [self.fileno(), process]:
            poll.register(descriptor, select.POLLIN)
        ready = poll.poll(None if timeout_s is None else timeout_s * 1000)
        return self.fileno() in {descriptor for descriptor, _ in ready}


def connect(rank: int, environment: Mapping[str, str] = os.environ) -> LauncherConnection:
    """Connect this process, as rank ``rank``, to the process that started the job. Raises ``CommunicationError``.

    Retries for some seconds, because the starting process may close a connection while strangers keep it busy.
    """
    secret, *addresses = environment[VARIABLE].split()
    deadline_s = time.monotonic() + _RETRY_FOR_S
    while True:
        failures = []
        for address in addresses:
            try:
                return _connected(address, secret, rank)
            except (OSError, CommunicationError) as error:
                failures.append(f"{address}: {error}")
        if time.monotonic() > deadline_s:
            break
        time.sleep(_RETRY_AFTER_S)
    raise CommunicationError(
        f"rank {rank} on {socket.gethostname()} cannot reach the process that started it ({'; '.join(failures)})",
        remedy="let this host connect to the one that starts the job, or start the ranks with the scheduler's launcher",
    )


def _connected(address: str, secret: str, rank: int) -> LauncherConnection:
    """Connect to ``address``. Raises ``OSError``, or ``CommunicationError`` if nobody there knows the secret."""
    connection = _with_high_descriptor(_connection(address))
    try:
        connection.settimeout(_SEND_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with connection.makefile("rb") as reader:
            challenge, own = reader.readline(HELLO_BYTES).decode("latin-1"), secrets.token_hex(16)
            if not challenge.endswith("\n"):
                raise ConnectionError("the connection was closed")
            hello = {"rank": rank, "pid": os.getpid(), "host": socket.gethostname(), "challenge": own}
            connection.sendall(signed(secret, "rank", challenge.strip(), json.dumps(hello)))
            request = verified(secret, "launcher", own, reader.readline())
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return LauncherConnection(connection, request)


def _connection(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    if host:
        return socket.create_connection((host, int(port)), timeout=_CONNECT_S)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    return connection


def _with_high_descriptor(connection: socket.socket) -> socket.socket:
    """Give a connection a file descriptor above all others.

    Linux closes the files of a killed process from the highest number down (the delayed closing of a task's files is a
    stack). This connection must close before the one to ``mpiexec``, which then kills the other ranks: the starting
    process tells from the order in which connections end which rank died first.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = (1 << 12 if soft == resource.RLIM_INFINITY else min(soft, 1 << 12)) - _SPARE_FILES
    try:
        moved = socket.socket(fileno=fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, lowest))
    except OSError:
        return connection
    connection.close()
    return moved
