"""Starts processes that end with this one, and ends processes so that nothing of them is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from dpsim.launch import scratch_keeper

_GRACE_S = 2.0
_TERMINATING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_running: set[int] = set()
"""The sessions of the commands that run now, by the process that began each."""


def end_with_parent(number: signal.Signals) -> Callable[[], None] | None:
    """Return a function that a child calls first, so that the kernel sends it this signal when its parent ends.

    None on systems other than Linux, whose kernels do not offer this.
    """
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    set_parent_death_signal = 1
    return lambda: libc.prctl(set_parent_death_signal, number) and None


def start(command: Sequence[str], number: signal.Signals, **options: Any) -> subprocess.Popen[Any]:
    """Start a command in a session of its own. It gets signal ``number`` when the thread that calls this ends."""
    end_first = end_with_parent(number)
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=end_first, **options)


def stop(process: subprocess.Popen[Any], folder: Path) -> None:
    """End ``process`` (for instance ``mpiexec``) and every process on this machine that was started for ``folder``.

    Takes a few seconds at most; Ctrl-C is ignored meanwhile.
    """
    with signals_ignored():
        if process.poll() is None:
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        scratch_keeper.end_processes(str(folder))
        if process.poll() is None:
            process.kill()
        process.wait()


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore SIGINT, SIGTERM and SIGHUP while the context is open. Only works in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) or signal.SIG_DFL for number in _TERMINATING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def child(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Run a command. Whatever of its session still runs when the context closes is killed.

    So is all of it when ``end_all`` is called, and (on Linux) the command itself when this process ends.
    """
    process = start(command, signal.SIGKILL, stdout=stdout, stderr=stderr, text=True, env=env, cwd=cwd)
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
