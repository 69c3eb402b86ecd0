"""A rank's side of the line to the process that starts the job; ``dpsim.launch.control_channel`` is the other one."""

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
from dpsim.launch import authentication, control_channel

_CONNECT_S, _TRY_S, _AGAIN_S = 5.0, 5.0, 0.2


class Line:
    """A rank's side."""

    def __init__(self, connection: socket.socket, request: dict[str, Any]) -> None:
        self._connection, self.request = connection, request
        self._one_at_a_time = threading.Lock()

    def fileno(self) -> int:
        """For faulthandler, which writes a crash straight to it."""
        return self._connection.fileno()

    def send(self, kind: str, value: Any) -> None:
        """``progress``, ``error``, ``result`` or ``deserted``."""
        with self._one_at_a_time:
            self._connection.sendall((json.dumps({kind: value}) + "\n").encode())

    def killed(self, number: int) -> None:
        """For the parent of a rank that a signal has ended, maybe amid a line; returns when the launcher hangs up."""
        with contextlib.suppress(OSError):  # the launcher has gone before
            self._connection.sendall(b"\n" + json.dumps({"killed": number}).encode() + b"\n")
            self.wait_for_end()

    def wait_for_end(self, process: int = -1, timeout_s: float | None = None) -> bool:
        """Wait until the launcher hangs up or ``process`` (a pidfd) ends; whether the launcher did. False also in time.

        Sleeps in the kernel: nothing of it is felt beside a computation.
        """
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)  # the launcher says nothing more: what comes is its end
        if process >= 0:
            poll.register(process, select.POLLIN)
        ready = poll.poll(None if timeout_s is None else timeout_s * 1000)
        return self._connection.fileno() in {handle for handle, _ in ready}


def connect(rank: int, environment: Mapping[str, str] = os.environ) -> Line:
    """Say hello to the process that started this job, as its rank ``rank``. Raises ``CommunicationError``.

    Tries for some seconds: the launcher may close a connection while strangers keep it busy.
    """
    secret, *places = environment[control_channel.VARIABLE].split()
    until = time.monotonic() + _TRY_S
    while True:
        failures = []
        for place in places:
            try:
                return _introduced(place, secret, rank)
            except (OSError, CommunicationError) as error:
                failures.append(f"{place}: {error}")
        if time.monotonic() > until:
            break
        time.sleep(_AGAIN_S)
    raise CommunicationError(
        f"rank {rank} on {socket.gethostname()} cannot reach the process that started it ({'; '.join(failures)})",
        remedy="let this host reach the one that starts the job, or start the ranks with the scheduler's own launcher",
    )


def _introduced(place: str, secret: str, rank: int) -> Line:
    """The line to the launcher at ``place``. Raises ``OSError``, and ``CommunicationError`` for another one's."""
    host, _, port = place.rpartition(":")
    connection = _closed_first(socket.create_connection((host, int(port)), timeout=_CONNECT_S))
    try:
        connection.settimeout(control_channel.SEND_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with connection.makefile("rb") as reader:
            given = reader.readline(authentication.CHALLENGE_BYTES + 1)
            if not given.endswith(b"\n"):
                raise ConnectionError("it has closed the connection")
            own = authentication.challenge()
            hello = {"rank": rank, "pid": os.getpid(), "host": socket.gethostname(), "challenge": own}
            connection.sendall(authentication.signed(secret, "rank", given[:-1].decode("latin-1"), json.dumps(hello)))
            request = json.loads(authentication.verified(secret, "launcher", own, reader.readline()))
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return Line(connection, request)


def _closed_first(connection: socket.socket) -> socket.socket:
    """The same connection under the highest file number that is free.

    Linux closes a killed process's files from the highest number down (the delayed closing of a task's files is a
    stack). This one must close before the one that tells ``mpiexec``, which then kills the other ranks: the order
    in which connections end is how the launcher knows who died first.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = (1 << 12 if soft == resource.RLIM_INFINITY else min(soft, 1 << 12)) - 1
    number = next((n for n in range(highest, highest - control_channel.SPARE_FILES, -1) if not _is_open(n)), None)
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
