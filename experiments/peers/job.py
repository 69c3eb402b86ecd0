"""One system's ranks as a job of their own that lives through all rounds and sleeps while it is not asked."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from dpsim import codec
from dpsim.comm.launch import on_ranks
from dpsim.errors import CommunicationError
from dpsim.experiments.peers.setting import Work

_TASK = "dpsim.experiments.peers.ranks:serve_on_ranks"
_LOOK_S = 0.2
_PATIENCE_S = 300.0
_END_S = 10.0


class Job:
    """Ranks of ``system`` doing ``work``, started by ``on_ranks`` on a thread; each rank listens on its own socket.

    ``folder`` must be a new one. ``close`` ends the ranks; so does leaving the process.
    """

    def __init__(self, system: str, work: Work, folder: Path, environment: Mapping[str, str], *, pin: bool) -> None:
        self.system, self.work = system, work
        self._error: BaseException | None = None
        self._lines: list[tuple[socket.socket, TextIO]] = []
        address = str(folder / "ranks.socket")
        argument = {"system": system, "work": codec.to_builtins(work), "socket": address, "folder": str(folder)}

        def run() -> None:
            try:
                on_ranks(_TASK, argument, devices=work.devices, env=environment, pin=pin)
            except BaseException as error:  # handed to the thread that asks, which raises it
                self._error = error

        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(work.devices)
            self._thread = threading.Thread(target=run, name=f"job {system}", daemon=True)
            self._thread.start()
            try:
                self._accept(listener)
            except BaseException:
                self.close()
                raise

    def ask(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """Give every rank a command; their replies, rank after rank. Raises what a rank raised."""
        for _, text in self._lines:
            self._write(text, command)
        return [self._read(text) for _, text in self._lines]

    def close(self) -> None:
        """Let the ranks end: each sees its socket closed once it has done what it is doing."""
        for line, text in self._lines:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(OSError):
                text.close()
            line.close()
        self._lines = []
        self._thread.join(_END_S)

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(_LOOK_S)
        waited_s = 0.0
        found: dict[int, tuple[socket.socket, TextIO]] = {}
        while len(found) < self.work.devices:
            try:
                line, _ = listener.accept()
            except TimeoutError:
                waited_s += _LOOK_S
                if not self._thread.is_alive() or waited_s > _PATIENCE_S:
                    raise self._failure() from None
                continue
            line.settimeout(_PATIENCE_S)
            text = line.makefile("rw", encoding="utf-8")
            self._lines.append((line, text))
            found[int(self._read(text)["rank"])] = (line, text)
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
        self._thread.join(_END_S)
        if self._error is not None:
            return self._error
        return CommunicationError(
            f"the ranks of {self.system} did not answer for {_PATIENCE_S:.0f} s",
            remedy="see what they printed above; run it again with fewer systems (--systems)",
        )
