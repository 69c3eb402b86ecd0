"""A rank's side of the connection to the process that started the job (``dpsim.launch.control_channel``)."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from dpsim.errors import CommunicationError
from dpsim.launch import authentication
from dpsim.launch.control_channel import SEND_S, SPARE_FILES

_CONNECT_S, _RETRY_FOR_S, _RETRY_AFTER_S = 5.0, 5.0, 0.2


class LauncherConnection:
    """The connection of a rank to the launching process; ``request`` is what that process asked for."""

    def __init__(self, connection: socket.socket, request: dict[str, Any]) -> None:
        self._socket, self.request = connection, request
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """For Python's faulthandler, which writes the report of a crash straight to the connection."""
        return self._socket.fileno()

    def send(self, kind: str, value: Any) -> None:
        """Send a message; ``kind`` is ``progress``, ``error``, ``result``, ``done`` or ``orphaned``."""
        with self._sending:
            self._socket.sendall((json.dumps({kind: value}) + "\n").encode())

    def send_killed(self, signal_number: int) -> None:
        """For the parent of a rank that a signal has killed; returns when the launching process hangs up.

        The rank may have been killed while it sent a line, so this message begins with a line end.
        """
        with contextlib.suppress(OSError):  # the launching process may have ended
            self._socket.sendall(b"\n" + json.dumps({"killed": signal_number}).encode() + b"\n")
            self.wait_for_end()

    def wait_for_end(self, process: int = -1, timeout_s: float | None = None) -> bool:
        """Wait until the launching process hangs up, or until ``process`` (a pidfd) ends or ``timeout_s`` is over.

        True if the launching process has hung up. The wait sleeps in the kernel and takes no core time.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)  # the launching process sends nothing more: an event is its end
        if process >= 0:
            poll.register(process, select.POLLIN)
        ready = poll.poll(None if timeout_s is None else timeout_s * 1000)
        return self._socket.fileno() in {descriptor for descriptor, _ in ready}


def connect(rank: int, environment: Mapping[str, str] = os.environ) -> LauncherConnection:
    """Connect this process, as rank ``rank``, to the process that started the job. Raises ``CommunicationError``.

    Retries for some seconds, because the launching process may close a connection while strangers keep it busy.
    """
    secret, *addresses = environment[authentication.VARIABLE].split()
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
    """The connection to the launching process at ``address``.

    Raises ``OSError``, or ``CommunicationError`` if the process at that address does not know the secret.
    """
    host, _, port = address.rpartition(":")
    connection = _with_highest_descriptor(socket.create_connection((host, int(port)), timeout=_CONNECT_S))
    try:
        connection.settimeout(SEND_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with connection.makefile("rb") as reader:
            line = reader.readline(authentication.CHALLENGE_BYTES + 1)
            if not line.endswith(b"\n"):
                raise ConnectionError("the connection was closed")
            own = authentication.challenge()
            hello = {"rank": rank, "pid": os.getpid(), "host": socket.gethostname(), "challenge": own}
            connection.sendall(authentication.signed(secret, "rank", line[:-1].decode("latin-1"), json.dumps(hello)))
            request = json.loads(authentication.verified(secret, "launcher", own, reader.readline()))
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return LauncherConnection(connection, request)


def _with_highest_descriptor(connection: socket.socket) -> socket.socket:
    """The same connection under the highest file descriptor that is free.

    Linux closes the files of a killed process from the highest number down (the delayed closing of a task's files is a
    stack). This connection must close before the one to ``mpiexec``, which then kills the other ranks: the launching
    process tells from the order in which connections end which rank died first.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = (1 << 12 if soft == resource.RLIM_INFINITY else min(soft, 1 << 12)) - 1
    number = next((n for n in range(highest, highest - SPARE_FILES, -1) if not _is_open(n)), None)
    if number is None:
        return connection
    moved = socket.socket(fileno=os.dup2(connection.fileno(), number, inheritable=False))
    connection.close()
    return moved


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
