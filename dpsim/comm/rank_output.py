"""What comes out of a job of ranks: their lines without the launcher's own noise, and why the job failed."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
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
_REMEDIES: dict[int, str] = {
    signal.SIGKILL: "something ended it from outside; if memory ran out, use a smaller batch or fewer devices",
    signal.SIGBUS: "shared memory may be too small: dpsim doctor shows the size of /dev/shm",
}


class JobFailed(CommunicationError):
    """A rank crashed or was killed. ``rank`` is None where it is not known; ``traceback`` is the rank's, or empty."""

    def __init__(self, given: str, *, remedy: str = "", rank: int | None = None, traceback: str = "") -> None:
        super().__init__(given, remedy=remedy)
        self.rank, self.traceback = rank, traceback


@dataclass
class Seen:
    """What is known of a job's ranks: their process ids, which of them ended first, and what the launcher told."""

    pids: dict[int, int] = field(default_factory=dict)
    first_ended: int | None = None
    rank: int | None = None
    signal: int | None = None

    def ended(self, rank: int) -> None:
        """A rank's process is over."""
        if self.first_ended is None:
            self.first_ended = rank


class Splitter:
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


class RankPipe(Splitter):
    """One rank's own pipe: a number is its process id, text is progress, and the end of the file is its end.

    A dying process closes its files early: in which order these ends come tells which rank died first, where
    ``mpiexec`` may name one that it killed itself.
    """

    def __init__(self, rank: int, seen: Seen, progress: Callable[[str], None]) -> None:
        super().__init__(self._take)
        self._rank, self._seen, self._progress = rank, seen, progress

    def read(self, handle: int) -> bool:
        """As in ``Splitter``."""
        if super().read(handle):
            return True
        self._seen.ended(self._rank)
        return False

    def _take(self, line: str) -> None:
        value = json.loads(line)
        if isinstance(value, int):
            self._seen.pids[self._rank] = value
        else:
            self._progress(value)


class Lines:
    """Passes the ranks' lines on to stderr and keeps back what the launcher says about a failure."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._block: list[str] | None = None

    def ordinary(self, line: str) -> None:
        """One line that a rank or the launcher wrote."""
        if _OPENMPI_RULE.match(line):
            if self._block is not None:
                self._note("\n".join(self._block))
            self._block = [] if self._block is None else None
        elif self._block is not None:
            self._block.append(line)
        elif _MPICH_NOISE.match(line):
            self._note(line)
        elif line.strip("\0 \t\r"):
            print(line, file=sys.stderr, flush=True)

    def _note(self, text: str) -> None:
        if match := _SIGNAL.search(text):
            self._seen.signal = int(match.group(1))
        if match := _OPENMPI_SIGNAL.search(text):
            self._seen.rank, self._seen.signal = int(match.group(1)), int(match.group(2))


def save_error(folder: Path, record: dict[str, Any], rank: int) -> None:
    """Write one rank's failure where ``failure`` finds it, whole or not at all."""
    partial = folder / f".error-{rank}.partial"
    partial.write_text(json.dumps(record), encoding="utf-8")
    partial.replace(folder / f"error-{rank}.json")


def failure(folder: Path, code: int, seen: Seen, devices: int) -> DpsimError:
    """The error to raise for a job that ended badly: the first failure, and no consequence of it."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("error-*.json")]
    records.sort(key=lambda r: (r["consequence"], r["time"]))
    if records and not (records[0]["consequence"] and seen.signal):
        return _raised(records[0], devices)
    if (fault := _fault(folder, devices)) is not None:
        return fault
    rank = seen.rank if seen.rank is not None else seen.first_ended
    who = f"rank {rank} of {devices}" if rank is not None else f"one of {devices} ranks"
    if seen.signal:
        name = signal.Signals(seen.signal).name if seen.signal in set(signal.Signals) else str(seen.signal)
        return JobFailed(f"{who} was killed by {name}", remedy=_REMEDIES.get(seen.signal, ""), rank=rank)
    if code == 0:
        return JobFailed(f"the job of {devices} ranks ended without a result", rank=rank)
    return JobFailed(f"{who} ended with exit code {code}", rank=rank, remedy="its last words may stand above")


def _fault(folder: Path, devices: int) -> JobFailed | None:
    """The crash that Python's faulthandler wrote down on some rank, if any."""
    for path in sorted(folder.glob("fault-*.txt"), key=lambda path: path.stat().st_mtime_ns):
        text = path.read_text(encoding="utf-8", errors="replace")
        for words, number in _FAULTS.items():
            if text.startswith(f"Fatal Python error: {words}"):
                rank = int(path.stem.removeprefix("fault-"))
                given = f"rank {rank} of {devices} was killed by {number.name}"
                return JobFailed(given, remedy=_REMEDIES.get(number, ""), rank=rank, traceback=text)
    return None


def _raised(record: dict[str, Any], devices: int) -> DpsimError:
    if (kind := record["kind"]) is not None:
        known = getattr(errors, kind, DpsimError)
        again: DpsimError = known(record["given"], allowed=record["allowed"], remedy=record["remedy"])
        return again
    given = f"rank {record['rank']} of {devices} failed: {record['line']}"
    return JobFailed(given, rank=record["rank"], traceback=record["traceback"])
