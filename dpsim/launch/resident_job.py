"""Ranks that stay alive for a whole benchmark and sleep between commands."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TextIO

from dpsim.errors import CommunicationError, ConfigError
from dpsim.launch import jobs, scratch, teardown
from dpsim.launch.rank_process import WITHOUT_TERMINAL_SIGNALS

_POLL_S = 0.2
_REPLY_S = 300.0
_END_S = 10.0
_LAST_LINES = 12


class Ranks(Protocol):
    """The running processes of a job."""

    def alive(self) -> bool:
        """Whether all of them still run, as far as this process can tell."""

    def end(self, within_s: float) -> BaseException | None:
        """Wait until they end, which they do when their sockets close. Returns the error that ended them, or None."""


class Job:
    """Ranks that connect to a socket of this process and carry out its commands.

    ``start`` starts them, given the socket's address. Each rank first sends an object with its number, ``rank``.
    ``folder`` must be a new folder. ``close`` ends the ranks; so does the end of this process. While this process waits
    for the ranks of one job, it also notices when those of another that is open have ended.
    """

    _open: ClassVar[list[Job]] = []

    def __init__(self, name: str, ranks: int, folder: Path, start: Callable[[str], Ranks]) -> None:
        self.name, self._count = name, ranks
        self._connections: list[tuple[socket.socket, TextIO]] = []
        address = str(folder / "ranks.socket")
        with socket.socket(socket.AF_UNIX) as listener:
            try:
                listener.bind(address)
            except OSError as error:  # the path of a socket may have some 100 characters
                raise ConfigError(
                    f"cannot make a socket in {folder}: {error.strerror or error}",
                    allowed="a folder for temporary files with a short path",
                    remedy="choose one with TMPDIR: TMPDIR=/tmp dpsim ...",
                ) from error
            listener.listen(ranks)
            self._ranks = start(address)
            self._open.append(self)
            try:
                self._accept(listener)
            except BaseException:
                self.close(within_s=0.0)  # ranks that are still starting would not notice the closing
                raise

    def ask(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """Send every rank a command; returns their replies in the order of the ranks. Raises the error of a rank."""
        for _, text in self._connections:
            self._write(text, command)
        return [self._read(*connection) for connection in self._connections]

    def close(self, within_s: float = _END_S) -> None:
        """Let the ranks end: each notices that its socket is closed when it has finished its command."""
        for connection, text in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(OSError):
                text.close()
            connection.close()
        self._connections = []
        if self in self._open:
            self._open.remove(self)
        self._ranks.end(within_s)

    def _accept(self, listener: socket.socket) -> None:
        """Wait until every rank has connected; ``hello`` keeps the first object that the last of them sent."""
        by_rank: dict[int, tuple[socket.socket, TextIO]] = {}
        self.hello: dict[str, Any] = {}
        while len(by_rank) < self._count:
            self._wait_for(listener)
            connection, _ = listener.accept()
            connection.settimeout(_REPLY_S)
            text = connection.makefile("rw", encoding="utf-8")
            self._connections.append((connection, text))
            self.hello = self._read(connection, text)
            by_rank[int(self.hello["rank"])] = (connection, text)
        self._connections = [by_rank[rank] for rank in sorted(by_rank)]

    def _write(self, text: TextIO, command: dict[str, Any]) -> None:
        try:
            text.write(json.dumps(command) + "\n")
            text.flush()
        except OSError as error:
            raise self._failure() from error

    def _wait_for(self, connection: socket.socket) -> None:
        """Wait until something can be read. Raises the error of the job whose ranks end before."""
        until_s = time.monotonic() + _REPLY_S
        while not select.select([connection], [], [], _POLL_S)[0]:
            for job in self._open:
                if not job._ranks.alive():
                    raise job._failure()
            if time.monotonic() > until_s:
                raise self._failure()

    def _read(self, connection: socket.socket, text: TextIO) -> dict[str, Any]:
        self._wait_for(connection)
        try:
            reply = text.readline()
        except OSError as error:
            raise self._failure() from error
        if not reply:
            raise self._failure()
        return dict(json.loads(reply))

    def _failure(self) -> BaseException:
        """The reason why the ranks do not answer: their own error if there is one."""
        return self._ranks.end(_END_S) or CommunicationError(
            f"the ranks of {self.name} did not answer for {_REPLY_S:.0f} s",
            remedy="see what they printed above; leave them out to measure the others",
        )


class OnRanks:
    """``Ranks`` that ``jobs.on_ranks`` runs, called in a thread of its own."""

    def __init__(self, task: str, argument: dict[str, Any], **options: Any) -> None:
        self._error: BaseException | None = None

        def run() -> None:
            try:
                jobs.on_ranks(task, argument, **options)
            except BaseException as error:  # the thread that sends the commands raises it
                self._error = error

        self._thread = threading.Thread(target=run, name=f"job {task}", daemon=True)
        self._thread.start()

    def alive(self) -> bool:
        return self._thread.is_alive()

    def end(self, within_s: float) -> BaseException | None:
        self._thread.join(within_s)
        return self._error


class Processes:
    """``Ranks`` that are ordinary commands. They end with this process and print to a file in ``folder``."""

    def __init__(self, name: str, commands: Sequence[Sequence[str]], folder: Path, env: Mapping[str, str]) -> None:
        self._name, self._folder, self._output = name, folder, folder / "output.txt"
        marked = {**env, **scratch.environment(folder)}
        with self._output.open("wb") as output:
            self._processes = [
                subprocess.Popen(
                    [*WITHOUT_TERMINAL_SIGNALS, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=marked,
                    cwd=folder,
                    start_new_session=True,
                    preexec_fn=teardown.end_with_parent(signal.SIGTERM),
                )
                for command in commands
            ]

    def alive(self) -> bool:
        return all(process.poll() is None for process in self._processes)

    def end(self, within_s: float) -> BaseException | None:
        """As in ``Ranks``. If one of the processes has failed, the others are ended at once."""
        failed = [process.returncode for process in self._processes if process.poll()]
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0 if failed else within_s)
            if process.poll() is None:
                teardown.stop(process, self._folder)
        failed = failed or [process.returncode for process in self._processes if process.returncode]
        if not failed:
            return None
        lines = self._output.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
        how = f"exit code {failed[0]}" if failed[0] > 0 else signal.Signals(-failed[0]).name
        return CommunicationError(
            f"{self._name} ended with {how}: " + "\n  ".join(lines or ["it printed nothing"]),
            remedy="correct it, or leave it out with --peers",
        )
