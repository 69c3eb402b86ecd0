"""Ranks that stay alive for a whole benchmark and sleep between commands."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, ClassVar

from dpsim.errors import CommunicationError, ConfigError
from dpsim.launch import child_process, scratch, scratch_keeper
from dpsim.launch.rank_process import WITHOUT_TERMINAL_SIGNALS

_POLL_S = 0.2
_REPLY_S = 300.0
_END_S = 10.0
_LAST_LINES = 12


class Job:
    """Ranks that connect to a socket of this process and carry out its commands.

    ``run``, given the socket's address, starts them and returns when they have ended, or raises the error that ended
    them: ``jobs.on_ranks`` or ``run_commands``. It is called in a thread of its own. Each rank first sends ``hello``,
    a dictionary with its number, ``rank``. Only this user can connect: the socket is in a scratch folder. ``folder``
    must be a new folder there. ``close`` ends the ranks; so does the end of this process. While this process waits for
    the ranks of one job, it also notices when those of another that is open have ended.
    """

    _open: ClassVar[list[Job]] = []

    def __init__(self, name: str, ranks: int, folder: Path, run: Callable[[str], object]) -> None:
        self.name, self._folder = name, folder
        self._connections: list[Connection] = []
        self._error: BaseException | None = None
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
            self._thread = threading.Thread(target=self._run, args=(run, address), name=f"job {name}", daemon=True)
            self._thread.start()
            self._open.append(self)
            try:
                by_rank = dict(self._accept(listener) for _ in range(ranks))
            except BaseException:
                self.close(within_s=0.0)  # ranks that are still starting would not notice the closing
                raise
        self._connections = [by_rank[rank] for rank in sorted(by_rank)]

    def ask(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """Send every rank a command; returns their replies in the order of the ranks. Raises the error of a rank."""
        try:
            for connection in self._connections:
                connection.send(command)
        except OSError as error:
            raise self._failure() from error
        return [self._receive(connection) for connection in self._connections]

    def close(self, within_s: float = _END_S) -> None:
        """Let the ranks end: each notices that its socket is closed when it has finished its command."""
        for connection in self._connections:
            connection.close()
        self._connections = []
        if self in self._open:
            self._open.remove(self)
        self._thread.join(within_s)
        if self._thread.is_alive():
            scratch_keeper.end_processes(str(self._folder))

    def _run(self, run: Callable[[str], object], address: str) -> None:
        try:
            run(address)
        except BaseException as error:  # the thread that sends the commands raises it
            self._error = error

    def _accept(self, listener: socket.socket) -> tuple[int, Connection]:
        """Wait for the next rank; ``hello`` keeps what the last of them sent."""
        self._wait_for(listener)
        connection = Connection(listener.accept()[0].detach())
        self._connections.append(connection)
        self.hello = self._receive(connection)
        return int(self.hello["rank"]), connection

    def _wait_for(self, readable: socket.socket | Connection) -> None:
        """Wait until something can be read. Raises the error of the job whose ranks end before."""
        until_s = time.monotonic() + _REPLY_S
        while not wait([readable], _POLL_S):
            for job in self._open:
                if not job._thread.is_alive():
                    raise job._failure()
            if time.monotonic() > until_s:
                raise self._failure()

    def _receive(self, connection: Connection) -> dict[str, Any]:
        self._wait_for(connection)
        try:
            return dict(connection.recv())
        except (EOFError, OSError) as error:
            raise self._failure() from error

    def _failure(self) -> BaseException:
        """Return the reason why the ranks do not answer: their own error if there is one."""
        self._thread.join(_END_S)
        return self._error or CommunicationError(
            f"the ranks of {self.name} did not answer for {_REPLY_S:.0f} s",
            remedy="see what they printed above; leave them out to measure the others",
        )


def run_commands(name: str, commands: Sequence[Sequence[str]], folder: Path, env: Mapping[str, str]) -> None:
    """Run commands until all have ended; if one fails, the others are ended at once.

    They print to a file in ``folder``. Raises ``CommunicationError`` with its last lines if a command failed.
    """
    output, marked = folder / "output.txt", {**env, **scratch.environment(folder)}
    with output.open("wb") as file, contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                child_process.child(
                    [*WITHOUT_TERMINAL_SIGNALS, *command], env=marked, cwd=folder, stdout=file, stderr=file
                )
            )
            for command in commands
        ]
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            time.sleep(_POLL_S)
    scratch_keeper.end_processes(str(folder))
    if not any(codes):
        return
    failed = next(code for code in codes if code)
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
    how = f"exit code {failed}" if failed > 0 else signal.Signals(-failed).name
    raise CommunicationError(
        f"{name} ended with {how}: " + "\n  ".join(lines or ["it printed nothing"]),
        remedy="correct it, or leave it out with --peers",
    )
