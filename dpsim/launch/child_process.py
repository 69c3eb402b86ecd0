"""Runs a command that cannot outlive this process or its time limit, and neither can what it starts.

The command gets a session of its own. It is killed with all processes of that session when its time is over, when the
caller stops waiting, or (on Linux) when this process ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from dpsim.launch import teardown

_running: set[int] = set()
"""The sessions of the commands that run now, by the process that began each."""


@contextlib.contextmanager
def child(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdout: int | IO[str] | None = None,
    stderr: int | IO[str] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """The running command. Whatever of its session still runs when the context closes is killed."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        env=env,
        cwd=cwd,
        start_new_session=True,
        preexec_fn=teardown.end_with_parent(signal.SIGKILL),
    )
    _running.add(process.pid)
    try:
        yield process
    finally:
        _end(process.pid)
        process.wait()
        _running.discard(process.pid)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def end_all() -> None:
    """Kill the commands that run in any thread: each context goes on as if its command had ended by itself."""
    for session in tuple(_running):
        _end(session)


def _end(session: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # everything has ended
        os.killpg(session, signal.SIGKILL)


def run(
    command: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return what it printed. Raises ``subprocess.TimeoutExpired`` after ``timeout_s``."""
    with child(command, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        out, err = process.communicate(timeout=timeout_s)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
