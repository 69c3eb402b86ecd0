"""Ranks that live through all rounds of a benchmark as one job, and sleep while they have no command."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from dpsim.errors import CommunicationError, ConfigError
from dpsim.launch import jobs, scratch, teardown

_ACCEPT_S = 0.2
_TIMEOUT_S = 300.0
_TEARDOWN_S = 10.0
_SHOWN_LINES = 12


class Ranks(Protocol):
    """The running processes of a job."""

    def alive(self) -> bool:
        """Whether all of them still run."""

    def end(self, within_s: float) -> BaseException | None:
        """Wait until they have ended, which they do when their sockets close; their error, if one failed."""


class Job:
    """Ranks that run commands. ``start`` starts them, given the address of a socket to which each rank connects.

    The first message of a rank holds its number. ``folder`` must be a new one. ``close`` ends the ranks, and so does
    the end of this process.
    """

    def __init__(self, name: str, ranks: int, folder: Path, start: Callable[[str], Ranks]) -> None:
        self.name, self._count = name, ranks
        self._connections: list[tuple[socket.socket, TextIO]] = []
        address = str(folder / "ranks.socket")
        with socket.socket(socket.AF_UNIX) as listener:
            try:
                listener.bind(address)
            except OSError as error:  # the system allows some 100 characters
                raise ConfigError(
                    f"cannot make a socket in {folder}: {error.strerror or error}",
                    allowed="a folder for temporary files with a short path",
                    remedy="name one: TMPDIR=/tmp dpsim ...",
                ) from error
            listener.listen(ranks)
            self._ranks = start(address)
            try:
                self._accept(listener)
            except BaseException:
                self.close(within_s=0.0)  # ranks that still start have no socket whose closing they could notice
                raise

    def ask(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """Send every rank a command and return the replies, rank after rank. Raises what a rank raised."""
        for _, text in self._connections:
            self._write(text, command)
        return [self._read(text) for _, text in self._connections]

    def close(self, within_s: float = _TEARDOWN_S) -> None:
        """End the ranks: each ends when it has run its command and finds its socket closed."""
        for connection, text in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(OSError):
                text.close()
            connection.close()
        self._connections = []
        self._ranks.end(within_s)

    def _accept(self, listener: socket.socket) -> None:
        """Wait until every rank is connected. ``hello`` is the first message of the rank that connected last."""
        listener.settimeout(_ACCEPT_S)
        waited_s = 0.0
        by_rank: dict[int, tuple[socket.socket, TextIO]] = {}
        self.hello: dict[str, Any] = {}
        while len(by_rank) < self._count:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                waited_s += _ACCEPT_S
                if not self._ranks.alive() or waited_s > _TIMEOUT_S:
                    raise self._failure() from None
                continue
            connection.settimeout(_TIMEOUT_S)
            text = connection.makefile("rw", encoding="utf-8")
            self._connections.append((connection, text))
            self.hello = self._read(text)
            by_rank[int(self.hello["rank"])] = (connection, text)
        self._connections = [by_rank[rank] for rank in sorted(by_rank)]

    def _write(self, text: TextIO, command: dict[str, Any]) -> None:
        try:
            text.write(json.dumps(command) + "\n")
            text.flush()
        except OSError as error:
            raise self._failure() from error

    def _read(self, text: TextIO) -> dict[str, Any]:
        try:
            reply = text.readline()
        except OSError as error:
            raise self._failure() from error
        if not reply:
            raise self._failure()
        return dict(json.loads(reply))

    def _failure(self) -> BaseException:
        """The error for ranks that do not reply: their own one, if there is one."""
        return self._ranks.end(_TEARDOWN_S) or CommunicationError(
            f"the ranks of {self.name} did not answer for {_TIMEOUT_S:.0f} s",
            remedy="read their output above, or run it again without them",
        )


class OnRanks:
    """The ranks of a ``jobs.on_ranks`` task, which runs in a thread."""

    def __init__(self, task: str, argument: dict[str, Any], **options: Any) -> None:
        self._error: BaseException | None = None

        def run() -> None:
            try:
                jobs.on_ranks(task, argument, **options)
            except BaseException as error:  # raised by the thread that asks
                self._error = error

        self._thread = threading.Thread(target=run, name=f"job {task}", daemon=True)
        self._thread.start()

    def alive(self) -> bool:
        return self._thread.is_alive()

    def end(self, within_s: float) -> BaseException | None:
        self._thread.join(within_s)
        return self._error


class Processes:
    """Processes of commands that need not know dpsim. They end with this process, and their output goes to a file."""

    def __init__(self, name: str, commands: Sequence[Sequence[str]], folder: Path, env: Mapping[str, str]) -> None:
        self._name, self._folder, self._output = name, folder, folder / "output.txt"
        environment = {**env, **scratch.environment(folder)}
        with self._output.open("wb") as output:
            self._processes = [
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    cwd=folder,
                    start_new_session=True,
                    preexec_fn=teardown.end_with_parent(signal.SIGTERM),
                )
                for command in commands
            ]

    def alive(self) -> bool:
        return all(process.poll() is None for process in self._processes)

    def end(self, within_s: float) -> BaseException | None:
        """Wait for the end of all processes. Where one has failed, the others are stopped."""
        failed = [process.returncode for process in self._processes if process.poll()]
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0 if failed else within_s)
            if process.poll() is None:
                teardown.stop(process, self._folder)
        failed = failed or [process.returncode for process in self._processes if process.returncode]
        if not failed:
            return None
        lines = self._output.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:]
        return CommunicationError(
            f"{self._name} ended with exit code {failed[0]}: " + "\n  ".join(lines or ["it printed nothing"]),
            remedy="repair it, or leave it out with --peers",
        )
