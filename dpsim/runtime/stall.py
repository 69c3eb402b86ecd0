"""Reports which ranks wait for which when training stalls: one line a stall on each node, and one at its end."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dpsim.comm.clock import now
from dpsim.runtime import rank_status
from dpsim.runtime.rank_status import Board, Entry

_STAGGER_S = 0.1
"""How much later each further rank of a node checks, so that only one of them reports."""

_ASLEEP_PERIODS = 3

_LOCATIONS = {
    rank_status.INITIAL_STATE: "for the initial parameters",
    rank_status.EVALUATION: "in the evaluation",
    rank_status.EPOCH_LOSS: "to add up the losses of an epoch",
    rank_status.CHECKPOINT: "in a checkpoint",
    rank_status.RESULTS: "to gather the results",
}
_SHOWN_TENSORS, _SHOWN_RANKS = 3, 4


class Labels(NamedTuple):
    """The meaning of a board's numbers: the tensors of each bucket, and the operations of a step."""

    buckets: Sequence[Sequence[str]]
    operations: Sequence[str]


class StallWatch:
    """A thread that checks a few times in ``after_s`` whether this rank has been waiting for ``after_s`` or longer.

    ``progress`` returns what the board does not have: the bucket being reduced, and the number of the operation that
    finished last.
    """

    def __init__(self, own: Board, after_s: float, labels: Labels, progress: Callable[[], tuple[int, int]]) -> None:
        self._board, self._after_s, self._labels, self._progress = own, after_s, labels, progress
        self._reported_since_s: float | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dpsim-stall-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        period_s, checked_s = min(1.0, self._after_s / 4), now()
        while not self._ended.wait(period_s):
            bucket, last_done = self._progress()
            self._board.status.note(bucket=bucket, last_done=last_done)
            if now() - checked_s < _ASLEEP_PERIODS * period_s:  # else this rank was stopped itself
                self._report()
            checked_s = now()

    def _report(self) -> None:
        status = self._board.status
        since_s, now_s = status.waits_since_s, now()
        if self._reported_since_s is not None:
            if since_s != self._reported_since_s:
                status.reported = False
                _to_stderr(f"going on after {_seconds(now_s - self._reported_since_s)}")
                self._reported_since_s = None
        elif since_s is not None and self._waits_too_long(now_s - since_s) and not self._board.reported:
            status.reported = True
            self._reported_since_s = since_s
            _to_stderr(stalled(self._board.entries(), self._board.size, now_s, now_s - since_s, self._labels))

    def _waits_too_long(self, for_s: float) -> bool:
        return for_s > self._after_s + _STAGGER_S * self._board.index


def stalled(entries: Sequence[Entry], size: int, now_s: float, for_s: float, labels: Labels) -> str:
    """Describe a stall: which ranks wait, where, and for which others. ``entries`` are this node's ranks."""
    halted = [entry for entry in entries if entry.state in ("", "Z", "T", "t")]
    waiting = [entry for entry in entries if entry.doing == rank_status.WAITING and entry not in halted]
    behind = [entry for entry in entries if entry.doing != rank_status.WAITING or entry in halted]
    step = max(entry.step for entry in waiting)
    who = ", ".join(
        _waits(location, waiting, labels) for location in dict.fromkeys(entry.location for entry in waiting)
    )
    where = f" in step {step}" if step else ""
    line = f"stalled for {_seconds(for_s)}{where}: {who}"
    if behind:
        named = [_is(entry, now_s, labels) for entry in behind[:_SHOWN_RANKS]]
        if len(behind) > _SHOWN_RANKS:
            named.append(ranks([entry.rank for entry in behind[_SHOWN_RANKS:]]))
        return f"{line} for {' and for '.join(named)}"
    others = sorted(set(range(size)) - {entry.rank for entry in entries})
    if others:
        return f"{line}; the cause is on another node: {ranks(others)}"
    return f"{line}; no rank computes, so MPI or the network has lost a message, or the ranks wait for different things"


def ranks(numbers: Sequence[int]) -> str:
    """Return ``rank 1``, ``ranks 0 and 2``, ``ranks 0, 2 and 4-7``."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    parts: list[str] = []
    rest = sorted(numbers)
    while rest:
        run = next((n for n in range(len(rest), 0, -1) if rest[n - 1] - rest[0] == n - 1), 1)
        run = run if run > 2 else 1
        parts.append(f"{rest[0]}-{rest[run - 1]}" if run > 1 else str(rest[0]))
        rest = rest[run:]
    return "ranks " + (" and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0])


def _waits(location: int, waiting: Sequence[Entry], labels: Labels) -> str:
    """Return ``ranks 0 and 2 wait in bucket 4 (dense2.weight, dense2.bias)``."""
    own = [entry.rank for entry in waiting if entry.location == location]
    where = _LOCATIONS.get(location, "")
    if 0 <= location < len(labels.buckets):
        tensors = labels.buckets[location]
        more = f" and {len(tensors) - _SHOWN_TENSORS} more" if len(tensors) > _SHOWN_TENSORS else ""
        where = f"in bucket {location} ({', '.join(tensors[:_SHOWN_TENSORS])}{more})"
    return f"{ranks(own)} {'waits' if len(own) == 1 else 'wait'} {where}".rstrip()


def _is(entry: Entry, now_s: float, labels: Labels) -> str:
    """Return ``rank 1, which is computing in step 17 since 61 s (last done: backward conv3)``."""
    since = f"since {_seconds(now_s - entry.since_s)}"
    if entry.state in ("", "Z"):
        return f"rank {entry.rank}, whose process {entry.pid} is gone"
    if entry.state in ("T", "t"):
        why = "stopped" if entry.state == "T" else "held by a debugger"
        return f"rank {entry.rank}, whose process {entry.pid} is {why} (step {entry.step}, {since})"
    does = {
        rank_status.STARTING: "starting",
        rank_status.COMPUTING: f"computing in step {entry.step}",
        rank_status.EVALUATING: "evaluating",
        rank_status.BETWEEN: f"between steps {entry.step} and {entry.step + 1}",
    }[entry.doing]
    done = ""
    if entry.doing == rank_status.COMPUTING and 0 <= entry.last_done < len(labels.operations):
        done = f" (last done: {labels.operations[entry.last_done]})"
    return f"rank {entry.rank}, which is {does} {since}{done}"


def _seconds(duration_s: float) -> str:
    return f"{duration_s:.0f} s" if duration_s >= 10 else f"{duration_s:.1f} s"


def _to_stderr(line: str) -> None:
    print(f"dpsim: {line}", file=sys.stderr, flush=True)
