"""What comes out of a job of ranks: their lines without the launcher's own noise, and why the job failed."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dpsim import errors
from dpsim.errors import CommunicationError, DpsimError

_MPICH_NOISE = re.compile(
    r"=+$|= +(BAD TERMINATION|PID \d|RANK \d|KILLED BY|EXIT CODE|CLEANING UP|YOU CAN IGNORE)"
    r"|YOUR APPLICATION TERMINATED WITH|This typically refers to a problem|Please see the FAQ page"
    r"|Abort\(-?\d+\) on node \d+|\[(mpiexec|proxy:[\d:]+)@"
)
_OPENMPI_RULE = re.compile(r"-{60,}$")
_OPENMPI_SIGNAL = re.compile(r"process rank (\d+) .* exited on\s+signal (\d+)", re.DOTALL)
_SIGNAL = re.compile(r"EXIT STRING: .*\(signal (\d+)\)")
_FAULTS = {
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Aborted": signal.SIGABRT,
    "Floating": signal.SIGFPE,
    "Illegal instruction": signal.SIGILL,
}
_OUTSIDE = "something ended it from outside"
_HANDED_ON = f"{_OUTSIDE}, or mpiexec, which hands this signal on to its ranks"
_REMEDIES: dict[int, str] = {
    signal.SIGTERM: _HANDED_ON,
    signal.SIGINT: _HANDED_ON,
    signal.SIGKILL: f"{_OUTSIDE}; if memory ran out, use a smaller batch or fewer devices",
    signal.SIGSEGV: "if /dev/shm is small, shared memory may be the reason: dpsim doctor shows its size",
    signal.SIGBUS: "shared memory may be too small: dpsim doctor shows the size of /dev/shm",
}


class JobFailed(CommunicationError):
    """A rank crashed or was killed. ``rank`` is None where it is not known; ``traceback`` is the rank's, or empty.

    ``exit_code`` is what a command that fails so exits with: a script's own, where the rank ran one. ``lost`` is how
    many ranks were killed by SIGKILL, where that is what ended the job: all of a watched job, at least one of another.
    """

    def __init__(
        self,
        given: str,
        *,
        remedy: str = "",
        rank: int | None = None,
        traceback: str = "",
        exit_code: int = 1,
        lost: int = 0,
    ) -> None:
        super().__init__(given, remedy=remedy)
        self.rank, self.traceback, self.exit_code, self.lost = rank, traceback, exit_code, lost


@dataclass
class JobState:
    """What is known of a job's ranks.

    ``pids``: host and process id by rank; ``errors``: what failed, as ``worker.describe`` puts it; ``faults``: what
    Python wrote as a rank crashed, in the order of the crashes; ``result``: rank 0's result, in a list of one;
    ``rank`` and ``signal``: what the launcher told of a rank that was killed; ``killed``: the signals of watched
    ranks, in the order in which these were killed; ``deserted``: the process, by rank, that started it under mpiexec
    and has ended before it; ``done``: the ranks that have done their task; ``launcher_signal``: what killed mpiexec.
    """

    pids: dict[int, tuple[str, int]] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)
    result: list[Any] = field(default_factory=list)
    first_ended: int | None = None
    rank: int | None = None
    signal: int | None = None
    killed: dict[int, int] = field(default_factory=dict)
    deserted: dict[int, str] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    launcher_signal: int | None = None

    def ended(self, rank: int) -> None:
        """A rank's process is over."""
        if self.first_ended is None:
            self.first_ended = rank


class LineReader:
    """Reads a non-blocking file descriptor and acts on each whole line."""

    def __init__(self, act: Callable[[str], Any]) -> None:
        self._act, self._rest = act, b""

    def read(self, handle: int) -> bool:
        """Take what is there. False at the end of the file."""
        try:
            data = os.read(handle, 1 << 16)
        except BlockingIOError:
            return True
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._act(line.decode("utf-8", "replace"))
        return bool(data)

    def end(self) -> None:
        """Act on a last line that has no newline."""
        if self._rest:
            self._act(self._rest.decode("utf-8", "replace"))
            self._rest = b""


class OutputFilter:
    """Passes the ranks' lines on to stderr and keeps back what the launcher says about a failure."""

    def __init__(self, seen: JobState) -> None:
        self._seen = seen
        self._block: list[str] | None = None

    def ordinary(self, line: str) -> None:
        """One line that a rank or the launcher wrote to stderr, or that goes there."""
        if self._kept(line) and line.strip("\0 \t\r"):
            print(line, file=sys.stderr, flush=True)

    def own(self, line: str) -> None:
        """One line of stdout that stays one, blank or not."""
        if self._kept(line):
            print(line, flush=True)

    def _kept(self, line: str) -> bool:
        """Whether a line is a rank's own, not the launcher's."""
        if _OPENMPI_RULE.match(line):
            if self._block is not None:
                self._note("\n".join(self._block))
            self._block = [] if self._block is None else None
        elif self._block is not None:
            self._block.append(line)
        elif _MPICH_NOISE.match(line):
            self._note(line)
        else:
            return True
        return False

    def _note(self, text: str) -> None:
        if match := _SIGNAL.search(text):
            self._seen.signal = int(match.group(1))
        if match := _OPENMPI_SIGNAL.search(text):
            self._seen.rank, self._seen.signal = int(match.group(1)), int(match.group(2))


def failure(code: int, seen: JobState, devices: int) -> DpsimError:
    """The error to raise for a job that ended badly: the first failure, and no consequence of it."""
    records = sorted(seen.errors, key=lambda r: (r["consequence"], r["time"]))
    outside = seen.signal or seen.killed or seen.launcher_signal or seen.deserted
    if records and not (records[0]["consequence"] and outside):
        return _raised(records[0], devices)
    if seen.launcher_signal is not None:
        return JobFailed(f"mpiexec was killed by {_name(seen.launcher_signal)}", remedy=_OUTSIDE)
    if seen.deserted:
        deserted, process = next(iter(seen.deserted.items()))
        given = f"{process}, under which rank {deserted} of {devices} ran, ended before it"
        return JobFailed(given, remedy=_OUTSIDE)
    if (fault := _fault(seen.faults, devices)) is not None:
        return fault
    if seen.killed:
        first = next(iter(seen.killed.values()))
        return _killed(sorted(rank for rank, number in seen.killed.items() if number == first), first, devices)
    rank = seen.rank
    if rank is None and len(seen.pids) in (0, devices):  # else it may be one that had not yet said hello
        rank = seen.first_ended
    if seen.signal:
        return _killed([rank], seen.signal, devices)
    who = f"rank {rank} of {devices}" if rank is not None else f"one of {devices} ranks"
    if code == 0:
        return JobFailed(f"the job of {devices} ranks ended without a result", rank=rank)
    return JobFailed(f"{who} ended with exit code {code}", rank=rank, remedy="its last words may stand above")


def _killed(ranks: Sequence[int | None], number: int, devices: int) -> JobFailed:
    """The error for ranks that a signal killed (None: it is not known which one)."""
    who = f"rank {ranks[0]} of {devices} was" if ranks[0] is not None else f"one of {devices} ranks was"
    if len(ranks) > 1:
        who = f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} of {devices} were"
    lost = len(ranks) if number == signal.SIGKILL else 0
    return JobFailed(f"{who} killed by {_name(number)}", remedy=_REMEDIES.get(number, ""), rank=ranks[0], lost=lost)


def _name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else str(number)


def _fault(faults: dict[int, str], devices: int) -> JobFailed | None:
    """The crash that Python's faulthandler wrote down on some rank, if any."""
    for rank, text in faults.items():
        for words, number in _FAULTS.items():
            if text.startswith(f"Fatal Python error: {words}"):
                given = f"rank {rank} of {devices} was killed by {number.name}"
                return JobFailed(given, remedy=_REMEDIES.get(number, ""), rank=rank, traceback=text)
    return None


def _raised(record: dict[str, Any], devices: int) -> DpsimError:
    if (kind := record["kind"]) is not None:
        known = getattr(errors, kind, DpsimError)
        again: DpsimError = known(record["given"], allowed=record["allowed"], remedy=record["remedy"])
        return again
    given = f"rank {record['rank']} of {devices} failed: {record['line']}"
    if record["exit_code"] is not None:
        return JobFailed(given, rank=record["rank"], exit_code=record["exit_code"])
    return JobFailed(given, rank=record["rank"], traceback=record["traceback"])
