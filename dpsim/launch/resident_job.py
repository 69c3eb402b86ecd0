"""A system's ranks as a job that lives through all rounds of a contest and sleeps while it is not asked."""

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

_LOOK_S = 0.2
_PATIENCE_S = 300.0
_END_S = 10.0
_LAST_WORDS = 12


class Ranks(Protocol):
    """The running processes of a job."""

    def alive(self) -> bool:
        """Whether all of them are, as far as one can see."""

    def end(self, within_s: float) -> BaseException | None:
        """Wait for their end, which comes when their sockets close; why it came before that, if it did."""


class Job:
    """Ranks that ``start`` starts, given the address of a socket; each connects to it, tells its number and obeys.

    ``folder`` must be a new one. ``close`` ends the ranks; so does leaving the process.
    """

    def __init__(self, name: str, ranks: int, folder: Path, start: Callable[[str], Ranks]) -> None:
        self.name, self._count = name, ranks
        self._lines: list[tuple[socket.socket, TextIO]] = []
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
        """Give every rank a command; their replies, rank after rank. Raises what a rank raised."""
        for _, text in self._lines:
            self._write(text, command)
        return [self._read(text) for _, text in self._lines]

    def close(self, within_s: float = _END_S) -> None:
        """Let the ranks end: each sees its socket closed once it has done what it is doing."""
        for line, text in self._lines:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(OSError):
                text.close()
            line.close()
        self._lines = []
        self._ranks.end(within_s)

    def _accept(self, listener: socket.socket) -> None:
        """Wait until every rank is there; ``hello`` keeps what each said first."""
        listener.settimeout(_LOOK_S)
        waited_s = 0.0
        found: dict[int, tuple[socket.socket, TextIO]] = {}
        self.hello: dict[str, Any] = {}
        while len(found) < self._count:
            try:
                line, _ = listener.accept()
            except TimeoutError:
                waited_s += _LOOK_S
                if not self._ranks.alive() or waited_s > _PATIENCE_S:
                    raise self._failure() from None
                continue
            line.settimeout(_PATIENCE_S)
            text = line.makefile("rw", encoding="utf-8")
            self._lines.append((line, text))
            self.hello = self._read(text)
            found[int(self.hello["rank"])] = (line, text)
        self._lines = [found[rank] for rank in sorted(found)]

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
        """Why the ranks do not answer: their own error if there is one."""
        return self._ranks.end(_END_S) or CommunicationError(
            f"the ranks of {self.name} did not answer for {_PATIENCE_S:.0f} s",
            remedy="see what they printed above; run it again without them",
        )


class OnRanks:
    """``jobs.on_ranks`` on a thread of its own."""

    def __init__(self, task: str, argument: dict[str, Any], **options: Any) -> None:
        self._error: BaseException | None = None

        def run() -> None:
            try:
                jobs.on_ranks(task, argument, **options)
            except BaseException as error:  # handed to the thread that asks, which raises it
                self._error = error

        self._thread = threading.Thread(target=run, name=f"job {task}", daemon=True)
        self._thread.start()

    def alive(self) -> bool:
        return self._thread.is_alive()

    def end(self, within_s: float) -> BaseException | None:
        self._thread.join(within_s)
        return self._error


class Processes:
    """Commands that know nothing of dpsim, run as processes that end with this one; what they print goes to a file."""

    def __init__(self, name: str, commands: Sequence[Sequence[str]], folder: Path, env: Mapping[str, str]) -> None:
        self._name, self._folder, self._said = name, folder, folder / "said.txt"
        marked = {**env, **scratch.environment(folder)}
        with self._said.open("wb") as said:
            self._processes = [
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
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
        """Of several processes, one that ended badly ends the others."""
        failed = [process.returncode for process in self._processes if process.poll()]
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0 if failed else within_s)
            if process.poll() is None:
                teardown.stop(process, self._folder)
        failed = failed or [process.returncode for process in self._processes if process.returncode]
        if not failed:
            return None
        words = self._said.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_WORDS:]
        return CommunicationError(
            f"{self._name} ended with exit code {failed[0]}: " + "\n  ".join(words or ["it printed nothing"]),
            remedy="mend it, or leave it out with --peers",
        )
