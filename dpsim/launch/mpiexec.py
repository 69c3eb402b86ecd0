"""Runs ``mpiexec`` to its end: passes on what the ranks print, and ends a job that does not end by itself."""

from __future__ import annotations

import contextlib
import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpsim.launch import child_process
from dpsim.launch.control_channel import Lines, Listener
from dpsim.launch.failure_report import JobFailed, JobState

_POLL_S = 0.05
_LATE_MESSAGES_S = 2.0
"""How long after mpiexec's end messages from ranks on other hosts may still arrive."""
_FAILED_S, _KILLED_S = 5.0, 1.0
"""How long a job goes on after a rank has failed, and after a watched rank was killed: others may fail, too."""
_DONE_S = 10.0
"""How long finished ranks and mpiexec may take to end: one of them may be stopped."""

_MPICH_NOISE = re.compile(
    r"=+$|= +(BAD TERMINATION|PID \d|RANK \d|KILLED BY|EXIT CODE|CLEANING UP|YOU CAN IGNORE)"
    r"|YOUR APPLICATION TERMINATED WITH|This typically refers to a problem|Please see the FAQ page"
    r"|Abort\(-?\d+\) on node \d+|\[(mpiexec|proxy:[\d:]+)@"
)
_OPENMPI_RULE = re.compile(r"-{60,}$")
_OPENMPI_SIGNAL = re.compile(r"process rank (\d+) .* exited on\s+signal (\d+)", re.DOTALL)
_MPICH_INTERRUPTED = "Sending Ctrl-C to processes"
_MPICH_TERMINATED = re.compile(r"\[mpiexec@.* HYD_pmcd_pmiserv_send_signal .*: unable to write data to proxy")
"""It got SIGTERM before its proxies were connected; SIGINT it tells apart."""
_MPICH_LOST_PROXY = re.compile(r"\[mpiexec@.* (control_cb .*assert \(!closed\)|ui_cmd_cb .*Launch proxy failed)")
"""After the two were connected, and before."""
_MPICH_SIGNAL = re.compile(r"EXIT STRING: .*\(signal (\d+)\)")
_MPICH_STATUS = re.compile(r"= +EXIT CODE: (\d+)")

_PAGE_FAULTS_OF_ENDED_CHILDREN = 8
"""The index of ``cminflt`` among the fields of ``/proc/PID/stat`` after the name; no process starts without some."""


def to_stderr(line: str) -> None:
    """Print a line to stderr."""
    print(line, file=sys.stderr, flush=True)


class OutputFilter:
    """A filter that passes on the lines that the ranks print, and keeps back what mpiexec says about a failure.

    Which rank and signal mpiexec reports is recorded in ``state``.
    """

    def __init__(self, state: JobState, show: Callable[[str], None] = to_stderr) -> None:
        self._state, self._show = state, show
        self._block: list[str] | None = None

    def to_stderr(self, line: bytes) -> None:
        """Pass a line on to stderr, unless it is blank."""
        text = line.decode("utf-8", "replace")
        if self._is_from_rank(text) and text.strip("\0 \t\r"):
            self._show(text)

    def to_stdout(self, line: bytes) -> None:
        """Pass a line on to stdout."""
        text = line.decode("utf-8", "replace")
        if self._is_from_rank(text):
            print(text, flush=True)

    def _is_from_rank(self, line: str) -> bool:
        """Return whether a rank printed this line, not mpiexec. Open MPI's reports are blocks between two rules."""
        if _OPENMPI_RULE.match(line):
            if self._block is not None:
                self._record("\n".join(self._block))
            self._block = [] if self._block is None else None
        elif self._block is not None:
            self._block.append(line)
        elif _MPICH_NOISE.match(line):
            self._record(line)
        else:
            return True
        return False

    def _record(self, text: str) -> None:
        if match := _MPICH_SIGNAL.search(text):
            self._state.reported_signal = int(match.group(1))
        if match := _MPICH_STATUS.match(text):
            self._state.reported_status = int(match.group(1))
        if _MPICH_INTERRUPTED in text:
            self._state.launcher_signal = signal.SIGINT
        if _MPICH_TERMINATED.match(text) and self._state.launcher_signal is None:
            self._state.launcher_signal = signal.SIGTERM
        if _MPICH_LOST_PROXY.match(text):
            self._state.proxy_lost = True
        if match := _OPENMPI_SIGNAL.search(text):
            self._state.reported_rank, self._state.reported_signal = int(match.group(1)), int(match.group(2))


def run(
    command: Sequence[str],
    folder: Path,
    listener: Listener,
    state: JobState,
    environment: Mapping[str, str],
    timeout_s: float | None,
    *,
    stdout: bool,
    show: Callable[[str], None] = to_stderr,
) -> int:
    """Return the exit code of ``command``, an ``mpiexec``; 0 if all its ranks have finished their task.

    Where a rank fails or is killed, the others are ended soon after, and in any case no process that was started for
    ``folder`` is left behind on this machine. With ``stdout`` what the
    ranks print to stdout goes there, otherwise to ``show``, as what they print to stderr.
    Raises ``JobFailed`` after ``timeout_s``.
    """
    deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = child_process.start(command, signal.SIGTERM, env=environment, **pipes)
    with contextlib.ExitStack() as stack:
        stack.callback(child_process.stop, process, folder)
        lines = OutputFilter(state, show)
        assert process.stdout is not None and process.stderr is not None
        listener.add(Lines(process.stdout, lines.to_stdout if stdout else lines.to_stderr))
        listener.add(Lines(process.stderr, lines.to_stderr))
        ended_by_itself = _follow(process, listener, state, deadline_s)
    return process.returncode if ended_by_itself or not listener.all_done else 0


def _follow(process: subprocess.Popen[Any], listener: Listener, state: JobState, deadline_s: float) -> bool:
    """Handle output and messages until the job ends, or until it has had time to end; returns whether it ended.

    Raises ``JobFailed`` at the deadline.
    """
    give_up_at_s = lost_at_s = late_until_s = math.inf
    while True:
        ended = process.poll() is not None
        if ended:
            late_until_s = min(late_until_s, time.monotonic() + _LATE_MESSAGES_S)
        expects_messages = ended and listener.connected and time.monotonic() < late_until_s
        handled = listener.handle_events(0 if ended and not expects_messages else _POLL_S)
        if ended and (handled or expects_messages):
            continue
        if ended:
            if process.returncode == -signal.SIGPIPE:  # mpiexec wrote to a proxy that had ended
                state.proxy_lost = True
            elif process.returncode < 0:
                state.launcher_signal = -process.returncode
            return True
        now_s = time.monotonic()
        if (grace_s := _grace_s(listener, state)) is not None:
            give_up_at_s = min(give_up_at_s, now_s + grace_s)
        lost_at_s = min(lost_at_s, now_s) if _children_ended(process.pid) else math.inf
        state.proxy_lost |= (lost := now_s > lost_at_s + _FAILED_S)
        if lost or now_s > give_up_at_s:
            return False
        if now_s > deadline_s:
            raise JobFailed(
                "the ranks did not finish within the time limit", remedy="allow more time, or give less work"
            )


def _children_ended(pid: int) -> bool:
    """Return whether a process had children and has none now; False where the system does not tell.

    A ``mpiexec`` whose proxy ends before the two are connected waits for ever.
    """
    try:
        running = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return False
    return not running and int(fields[_PAGE_FAULTS_OF_ENDED_CHILDREN]) > 0


def _grace_s(listener: Listener, state: JobState) -> float | None:
    """Return the seconds within which the job should end; None while its ranks work."""
    if state.killed or state.orphaned or state.launcher_signal or state.hosts_ended:
        return _KILLED_S
    if state.errors or state.reported_status is not None:  # mpiexec does not end ranks of hosts that start only now
        return _FAILED_S
    if state.outlives and listener.all_done:
        return 0.0  # its ranks wait for the end
    return _DONE_S if listener.all_done else None
