"""The ranks of a script in its own environment, whose Python need not have anything that dpsim needs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Client, Listener, wait
from pathlib import Path
from typing import Any, Self

from dpsim import codec
from dpsim.errors import ConfigError, DpsimError
from dpsim.launch.child_process import child
from dpsim.launch.failure_report import JobState, failure
from dpsim.launch.job_python import JobPython
from dpsim.launch.protection import Protection, protected
from dpsim.launch.rank_process import WITHOUT_TERMINAL_SIGNALS
from dpsim.launch.script_output import shown_once, written
from dpsim.launch.shaped import VARIABLE, links
from dpsim.launch.shaped.hosts import ShapedHosts, shaped_hosts
from dpsim.network import NODE, Network, hosts_of
from dpsim.torch.script.probe.in_turns.visit import CONTROL, FAILED, NAMESPACES, PARTS, STARTER
from dpsim.torch.script.profile_script import START, script_environment
from dpsim.torch.script.request import Part

_GONE = -2
"""What is said in place of a part where the process that starts the ranks has ended."""
_LONGEST_END_S = 3.0
"""How long the process that starts the ranks takes to end where one of them has failed."""


class JobRanks:
    """The ranks of some parts, which are forked from one process of a job's Python when they are asked for."""

    def __init__(
        self,
        parts: Sequence[Part],
        folder: Path,
        listener: Listener,
        process: subprocess.Popen[str],
        hosts: ShapedHosts | None,
    ) -> None:
        self._parts, self._folder, self._listener, self._process = parts, folder, listener, process
        self._hosts = hosts
        threading.Thread(target=self._tell_end, daemon=True).start()
        self._starter: Any = listener.accept()
        if self._starter.recv() != (STARTER, 0):
            raise self._failure()

    @classmethod
    @contextlib.contextmanager
    def started(
        cls,
        parts: Sequence[Part],
        folder: Path,
        by: JobPython,
        protection: Protection | None = None,
        network: str = NODE,
    ) -> Iterator[Self]:
        """Yield them; whatever of them still runs at the end is killed. Raises ``DpsimError``.

        On a shaped ``network`` the first rank of each part is on the first host, the second on the second, and so on.
        """
        (folder / PARTS).write_text(json.dumps(list(map(codec.to_builtins, parts))), encoding="utf-8")
        ranks = sum(part.ranks for part in parts)
        command = [*WITHOUT_TERMINAL_SIGNALS, by.path, str(START), "in_turns.ranks", str(folder)]
        if protection is not None:
            command = protected(command, protection, folder)
        environment = script_environment(ranks, folder, by.environment())
        with contextlib.ExitStack() as stack:
            hosts = None
            for shaped in hosts_of([network]):
                hosts = stack.enter_context(shaped_hosts((shaped,), folder))
                links.check([shaped], hosts.environment[VARIABLE])
                command = hosts.among(command)
                environment |= {**hosts.environment, NAMESPACES: os.pathsep.join(hosts.namespaces)}
            yield stack.enter_context(cls._running(parts, folder, command, environment, hosts))

    @classmethod
    @contextlib.contextmanager
    def _running(
        cls,
        parts: Sequence[Part],
        folder: Path,
        command: list[str],
        environment: dict[str, str],
        hosts: ShapedHosts | None,
    ) -> Iterator[Self]:
        ranks = sum(part.ranks for part in parts)
        with (
            shown_once() as output,
            Listener(str(folder / CONTROL), "AF_UNIX", backlog=ranks + 2) as listener,
            written(folder, output) as file,
            child(command, env=environment, stdout=file, stderr=file) as process,
        ):
            job = cls(parts, folder, listener, process, hosts)
            yield job
            job._starter.close()
            job._await_end()

    def shape(self, network: Network | None) -> None:
        """Give the links of the hosts the rates of a network. Raises ``ConfigError``."""
        assert self._hosts is not None
        links.shape(network, self._hosts.environment[VARIABLE])

    def start(self, parts: list[int]) -> None:
        """Start the ranks of parts, by their numbers. Each then connects."""
        self._starter.send(parts)

    def accept(self) -> Any:
        """Return the connection of the next rank."""
        return self._listener.accept()

    def receive(self, connection: Any) -> Any:
        """Return what a rank sends. Raises ``DpsimError`` where one has failed."""
        with contextlib.suppress(EOFError, OSError):
            if connection in wait([connection, self._starter]):
                received = connection.recv()
                if received != (_GONE, 0):
                    return received
        raise self._failure()

    def _tell_end(self) -> None:
        """Connect once the process has ended, so that nobody waits for its ranks for ever."""
        self._process.wait()
        with contextlib.suppress(OSError), Client(str(self._folder / CONTROL), "AF_UNIX") as gone:
            gone.send((_GONE, 0))

    def _await_end(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LONGEST_END_S)

    def _failure(self) -> DpsimError:
        """Return why the first rank failed."""
        self._await_end()
        failed: list[tuple[Any, Part]] = [
            (codec.read_raw(path, "failure"), part) for part in self._parts for path in self._told(part)
        ]
        first, part = min(
            failed, key=lambda each: each[0]["at_s"], default=(dict[str, Any](exit_code=0), self._parts[0])
        )
        if first.get("exit_code") == 0:
            return ConfigError(
                f"{Path(part.script).name} ended its process before enough was measured",
                allowed="a script that trains until dpsim ends it",
                remedy="see what it printed above",
            )
        if "error" in first:
            given, allowed, remedy = first["error"]
            return ConfigError(given, allowed=allowed, remedy=remedy)
        rank, state = first["rank"], JobState(first_ended=first["rank"])
        if "signal" in first:
            state.killed[rank] = first["signal"]
        elif "traceback" in first:
            of_error = {"kind": None, "exit_code": None, "remedy": "", "consequence": False, "time": first["at_s"]}
            state.errors.append(of_error | {name: first[name] for name in ("rank", "line", "traceback")})
        return failure(first.get("exit_code", 1), state, part.ranks)

    def _told(self, part: Part) -> list[Path]:
        paths = [self._folder / FAILED.format(part.number, rank) for rank in range(part.ranks)]
        return [path for path in paths if path.exists()]
