"""Runs ``mpiexec`` to its end: passes on what the ranks say, and notices what will not end by itself."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dpsim.launch import control_channel, failure_report, teardown

_LATE_WORDS_S = 2.0
_FAILED_S, _KILLED_S = 5.0, 1.0
"""How long a job goes on after a rank has failed, and after a watched one was killed: others may be so too."""
_DONE_S = 10.0
"""How long ranks whose task is done, and mpiexec, have for their end: one of them may be stopped."""


def run(
    command: Sequence[str],
    folder: Path,
    listener: control_channel.Listener,
    seen: failure_report.JobState,
    environment: Mapping[str, str],
    timeout_s: float | None,
    *,
    stdout: bool,
) -> int:
    """The exit code of ``command``, an ``mpiexec``, or 0 when all its ranks have done their task.

    Whatever happens, no process that was started for ``folder`` is left behind on this machine.
    """
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        listener.serve(selector)
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            preexec_fn=teardown.end_with_parent(signal.SIGTERM),
        )
        stack.callback(teardown.stop, process, folder)
        lines = failure_report.OutputFilter(seen)
        for output, act in (
            (process.stdout, lines.own if stdout else lines.ordinary),
            (process.stderr, lines.ordinary),
        ):
            assert output is not None
            stack.enter_context(output)
            os.set_blocking(output.fileno(), False)
            selector.register(output, selectors.EVENT_READ, failure_report.LineReader(act))
        by_itself = _follow(process, selector, listener, seen, deadline)
        for key in selector.get_map().values():
            key.data.end()
    return process.returncode if by_itself or not listener.all_done else 0


def _follow(
    process: subprocess.Popen[bytes],
    selector: selectors.BaseSelector,
    listener: control_channel.Listener,
    seen: failure_report.JobState,
    deadline: float,
) -> bool:
    """Pass output on until the job has ended, or has failed or done its task for some seconds; whether it has ended.

    Raises ``JobFailed`` at the deadline.
    """
    give_up_at = math.inf
    late_until = math.inf
    while True:
        ended = process.poll() is not None
        if ended:  # the last words of ranks elsewhere may arrive after mpiexec's end
            late_until = min(late_until, time.monotonic() + _LATE_WORDS_S)
        late = ended and listener.connected and time.monotonic() < late_until
        ready = _pass_on(selector, 0 if ended and not late else 0.05)
        listener.close_silent(selector)
        if ended and not ready and not late:
            if process.returncode < 0:
                seen.launcher_signal = -process.returncode
            return True
        if ended:
            continue
        if (patience_s := _patience(listener, seen)) is not None:
            give_up_at = min(give_up_at, time.monotonic() + patience_s)
        if time.monotonic() > give_up_at:
            return False
        if time.monotonic() > deadline:
            raise failure_report.JobFailed(
                "the ranks did not finish in the time given to them", remedy="give more time, or less work"
            )


def _pass_on(selector: selectors.BaseSelector, within_s: float) -> bool:
    """Act on what has come in; whether there was anything."""
    ready = selector.select(within_s)
    for key, _ in ready:
        if not key.data.read(key.fd):
            selector.unregister(key.fileobj)
            key.data.end()
    return bool(ready)


def _patience(listener: control_channel.Listener, seen: failure_report.JobState) -> float | None:
    """How many seconds from now on the job may take at the most; None where it is at work."""
    if seen.killed or seen.deserted:
        return _KILLED_S
    if seen.errors:
        return _FAILED_S
    return _DONE_S if listener.all_done else None
