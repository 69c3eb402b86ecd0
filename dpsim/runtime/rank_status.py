"""A board in shared memory: what each rank of this node is doing, for the others to see without asking it.

A rank writes its own row by a few plain stores a step. Nothing here has a name in a file system, so that nothing
can be left behind.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpsim.comm.clock import now
from dpsim.comm.shared import shared_memory
from dpsim.records.checks import check_stall_after

if TYPE_CHECKING:
    from mpi4py import MPI

STARTING, COMPUTING, EVALUATING, BETWEEN, WAITING = range(5)
UNKNOWN = -1
INITIAL_STATE, EVALUATION, EPOCH_LOSS, CHECKPOINT, RESULTS = range(-2, -7, -1)
"""Locations to wait in that are no bucket: a bucket's location is its number, 0 or more."""

ROW_BYTES = 64
_PID, _STEP, _DOING, _LOCATION, _SINCE, _DETAIL, _DETAIL_SINCE, _REPORTED = range(8)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A row as read: rank ``rank`` does ``doing`` since ``since_s`` on the clock of its node.

    ``location`` is where it waits, ``last_done`` the number of the operation it finished last while it computes; both
    are ``UNKNOWN`` where it has not been so long enough to have been noted. ``state`` is the kernel's word for
    its process: ``T`` stopped, ``t`` held by a debugger, ``Z`` or empty: gone.
    """

    rank: int
    pid: int
    step: int
    doing: int
    since_s: float
    location: int = UNKNOWN
    last_done: int = UNKNOWN
    state: str = "R"


class RankStatus:
    """The status of one rank, written by it alone."""

    __slots__ = ("_numbers", "_times")

    def __init__(self, memory: memoryview | None = None) -> None:
        memory = memoryview(bytearray(ROW_BYTES)) if memory is None else memory
        self._numbers, self._times = memory.cast("q"), memory.cast("d")

    def begin(self) -> None:
        """Take the row for this process."""
        self._numbers[_PID] = os.getpid()
        self._do(STARTING)

    def computes(self, step: int | None = None) -> None:
        """Note that step ``step`` (from 1) begins; without it, that computing goes on after a wait within the step."""
        if step is not None:
            self._numbers[_STEP] = step
        self._do(COMPUTING)

    def evaluates(self) -> None:
        self._do(EVALUATING)

    def rests(self) -> None:
        """Note that a step has ended and the next has not begun."""
        self._do(BETWEEN)

    def waits(self, location: int = UNKNOWN) -> None:
        """Note that this rank goes on only when others have done their part."""
        self._numbers[_LOCATION] = location
        self._do(WAITING)

    @contextmanager
    def waiting(self, location: int) -> Iterator[None]:
        """Note a wait between steps."""
        self.waits(location)
        yield
        self.rests()

    def note(self, *, bucket: int, last_done: int) -> None:
        """Write down what is known besides the row: called now and then by another thread of the same process."""
        numbers, since_s = self._numbers, self._times[_SINCE]
        numbers[_DETAIL] = bucket if numbers[_DOING] == WAITING else last_done
        self._times[_DETAIL_SINCE] = since_s

    def read(self, rank: int) -> Entry:
        numbers, times = self._numbers, self._times
        doing, since_s, location = numbers[_DOING], times[_SINCE], numbers[_LOCATION]
        detail = numbers[_DETAIL] if times[_DETAIL_SINCE] == since_s else UNKNOWN
        waits = doing == WAITING
        return Entry(
            rank=rank,
            pid=numbers[_PID],
            step=numbers[_STEP],
            doing=doing,
            since_s=since_s,
            location=(detail if location == UNKNOWN else location) if waits else UNKNOWN,
            last_done=UNKNOWN if waits else detail,
            state=_process_state(numbers[_PID]),
        )

    @property
    def reported(self) -> bool:
        """Whether this rank has reported a stall that is not over."""
        return bool(self._numbers[_REPORTED])

    @reported.setter
    def reported(self, value: bool) -> None:
        self._numbers[_REPORTED] = value

    @property
    def waits_since_s(self) -> float | None:
        """Since when this rank has been waiting; None while it does not wait."""
        since_s = self._times[_SINCE]
        return since_s if self._numbers[_DOING] == WAITING else None

    def _do(self, doing: int) -> None:
        self._numbers[_DOING] = doing
        self._times[_SINCE] = now()


class Board:
    """The rows of the ranks of ``comm`` on this node; ``ranks`` are their numbers in ``comm``, ascending.

    Collective over ``comm``. Where the system lets no process see another's memory, a rank sees its own row alone.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        from mpi4py import MPI

        node = MPI.Intracomm(comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank))
        self.size: int = comm.size
        self.ranks: tuple[int, ...] = tuple(node.allgather(comm.rank))
        memory = shared_memory(node, ROW_BYTES * node.size, "dpsim-board")
        if memory is None:
            self.ranks, memory = (comm.rank,), mmap.mmap(-1, ROW_BYTES)
        self.index = self.ranks.index(comm.rank)
        view = memoryview(memory)
        self._rows = [RankStatus(view[start : start + ROW_BYTES]) for start in range(0, len(view), ROW_BYTES)]
        self.status = self._rows[self.index]
        self.status.begin()
        node.Barrier()  # every row is filled before any is read
        node.Free()

    def entries(self) -> list[Entry]:
        """Return every row of this node, in the order of the ranks."""
        return [status.read(rank) for rank, status in zip(self.ranks, self._rows, strict=True)]

    @property
    def reported(self) -> bool:
        """Whether some rank of this node has reported a stall that is not over."""
        return any(status.reported for status in self._rows)


def _process_state(pid: int) -> str:
    """Return the kernel's letter for a process's state; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def watched_board(comm: MPI.Intracomm, stall_after_s: float) -> Board | None:
    """Return a board where somebody watches for waits of so many seconds. Raises ``ConfigError`` for a bad time."""
    check_stall_after(stall_after_s)
    return Board(comm) if comm.size > 1 and 0 < stall_after_s < math.inf else None
