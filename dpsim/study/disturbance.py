"""Whether other processes disturbed a sample, by what the kernel counts of cores: a rule that is fixed beforehand.

A sample is disturbed where the threads of some rank waited for a core for longer than the larger of 1 % of it and
50 us, or where the hypervisor took more than a tick in its visit. Where dpsim's own threads outnumber the cores, they
wait for each other, which is no disturbance: there a block of visits is disturbed where other processes used more than
2 % of the cores' time. That rule holds on shaped hosts too, where ranks wait for the kernel's threads that work for
their links; interrupts, which do so as well, are no other processes there. What the kernel does not count is not known.
Of what was measured the rule reads only how long the sample was.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dpsim.comm.clock import now
from dpsim.launch.shaped import background, on_shaped_hosts
from dpsim.model.observed import LEAST_WAITED_S, MOST_WAITED
from dpsim.study.core_ticks import TICKS_PER_S, CoreTicks, read_ticks
from dpsim.study.rows import CLEAN, Rows, Subject

if TYPE_CHECKING:
    from mpi4py import MPI

RUN_QUEUE, OTHERS = "run-queue/1", "other-processes/1"
"""The names of the two rules in records, with their version."""
MOST_STOLEN_TICKS = 1
MOST_OTHERS = 0.02
"""Of the cores' time."""
LEAST_BLOCK_S = 0.2
_TICKS_OF_LIMIT = 4
"""A block is so long that this many ticks of ``/proc/stat`` are within the limit: its counters are whole ticks."""
_NANOSECOND_S = 1e-9
_CPU_CLOCK = 2
"""Linux's number of the clock that counts the CPU time of all threads of a process (``CPUCLOCK_SCHED``)."""
Mark = bool | None
"""Whether a sample is clean; ``None``: not known."""


class RunQueue:
    """How long the threads of this process were ready to run and had no core, from the files of ``folder``."""

    def __init__(self, folder: Path = Path("/proc/self/task")) -> None:
        self._folder = folder
        self._files: dict[str, int] = {}
        self._waited_ns: dict[str, int] = {}

    def refresh(self) -> None:
        """Open the files of new threads, and close those of threads that have ended."""
        try:
            names = {entry.name for entry in self._folder.iterdir()}
        except OSError:
            names = set()
        for name in self._files.keys() - names:
            os.close(self._files.pop(name))
        for name in names - self._files.keys():
            with contextlib.suppress(OSError):  # a thread that has just ended, or a system without the file
                self._files[name] = os.open(self._folder / name / "schedstat", os.O_RDONLY)

    def waited_s(self) -> float | None:
        """Return the seconds of all threads since they began; ``None`` where the kernel does not count them.

        A process that has come this far has waited for some nanoseconds.
        """
        for name, file in self._files.items():
            with contextlib.suppress(OSError, ValueError, IndexError):  # the thread has ended: its last value stays
                self._waited_ns[name] = int(os.pread(file, 64, 0).split()[1])
        return sum(self._waited_ns.values()) * _NANOSECOND_S or None


def node_ticks() -> CoreTicks | None:
    """Return what the kernel has counted of all cores of this node; ``None`` where it does not."""
    ticks = read_ticks()
    return ticks and ticks.every


def cpu_s(processes: Iterable[int]) -> float | None:
    """Return the CPU time of processes; ``None`` where one has ended, or the system has no such clock."""
    try:
        return sum(time.clock_gettime((~process << 3) | _CPU_CLOCK) for process in processes)
    except OSError:
        return None


class Seen(NamedTuple):
    """What one rank saw of a visit: the seconds that its threads waited for a core in each step or sample, the ticks
    that were stolen, the CPU time of processes that are not dpsim's on its node, and how long the visit was.
    """

    waited_s: list[float | None]
    stolen_ticks: int | None
    others_s: float | None
    wall_s: float


class Watcher:
    """Watches the visits of one rank; ``processes`` are all that dpsim runs on this node."""

    def __init__(
        self,
        processes: Sequence[int],
        run_queue: RunQueue | None = None,
        node: Callable[[], CoreTicks | None] = node_ticks,
        cpu: Callable[[Iterable[int]], float | None] = cpu_s,
    ) -> None:
        self.processes, self._run_queue, self._node, self._cpu = processes, run_queue or RunQueue(), node, cpu

    @classmethod
    def on(cls, comm: MPI.Intracomm) -> Watcher:
        """Return the watcher of this rank; its processes are the ranks of this node, and those that started them.

        Collective.
        """
        from mpi4py import MPI

        node = comm.Dup() if on_shaped_hosts() else comm.Split_type(MPI.COMM_TYPE_SHARED)
        ranks = node.allgather(os.getpid())
        node.Free()
        return cls(ranks)

    def crowded(self, *, waits: bool = False, communication_thread: bool = False) -> bool:
        """Whether dpsim's own threads outnumber their cores: also where ranks sleep instead of computing (``waits``),
        where each has a communication thread on its core, and on shaped hosts.
        """
        return on_shaped_hosts() or waits or communication_thread or len(self.processes) > (os.cpu_count() or 1)

    def begin(self) -> None:
        """Begin a visit."""
        self._run_queue.refresh()
        self._begin_s, self._begin = now(), self._read()
        self._last_s, self._waited_s = self._run_queue.waited_s(), list[float | None]()

    def sample_begins(self) -> None:
        """Begin a sample later than the one before it ended."""
        self._last_s = self._run_queue.waited_s()

    def sample_ends(self) -> None:
        """End a step or another sample, and begin the next one."""
        before_s, self._last_s = self._last_s, self._run_queue.waited_s()
        known = before_s is not None and self._last_s is not None
        self._waited_s.append(self._last_s - before_s if known else None)  # type: ignore[operator]

    def seen(self) -> Seen:
        """End the visit, and return what was seen."""
        (node, own_s), (node_before, own_before_s) = self._read(), self._begin
        stolen = None if node is None or node_before is None else node.stolen - node_before.stolen
        others_s = None
        if node is not None and node_before is not None and own_s is not None and own_before_s is not None:
            busy, before = (each.busy - each.interrupts * on_shaped_hosts() for each in (node, node_before))
            others_s = (busy - before) / TICKS_PER_S - (own_s - own_before_s)
        return Seen(self._waited_s, stolen, others_s, now() - self._begin_s)

    def _read(self) -> tuple[CoreTicks | None, float | None]:
        return self._node(), self._cpu([*self.processes, *ancestors(), *background()])


def ancestors(process: int | None = None) -> list[int]:
    """Return the processes above this one: its launcher, and what started that."""
    found, parent = [], os.getppid() if process is None else process
    while parent > 1:
        found.append(parent)
        try:
            parent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
    return found


def run_queue_marks(ranks: Sequence[Seen], samples_s: Mapping[int, float]) -> list[Mark]:
    """Return whether each sample of a visit is clean; ``samples_s`` are their seconds, by their index on each rank."""
    stolen = [rank.stolen_ticks for rank in ranks]
    marks: list[Mark] = []
    for number, sample_s in samples_s.items():
        waited_s, most_s = [rank.waited_s[number] for rank in ranks], max(MOST_WAITED * sample_s, LEAST_WAITED_S)
        disturbed = any(each is not None and each > most_s for each in waited_s)
        disturbed = disturbed or any(ticks is not None and ticks > MOST_STOLEN_TICKS for ticks in stolen)
        marks.append(False if disturbed else None if None in waited_s or None in stolen else True)
    return marks


class Judge:
    """Marks the samples of what is visited again and again, by the rule of other processes where it is ``crowded``.

    Under that rule samples are marked together, those of as many visits as make a block of ``block_s`` seconds.
    """

    def __init__(self, *, crowded: bool, cores: int | None = None) -> None:
        self.rule = OTHERS if crowded else RUN_QUEUE
        self._cores = cores or os.cpu_count() or 1
        self.block_s = max(LEAST_BLOCK_S, _TICKS_OF_LIMIT / (TICKS_PER_S * MOST_OTHERS * self._cores))
        self._block: list[tuple[Sequence[Seen], int]] = []

    def marks(self, ranks: Sequence[Seen], samples_s: Mapping[int, float]) -> list[Mark]:
        """Return whether the last samples, those of this visit included, are clean: as many as are known by now."""
        if self.rule == RUN_QUEUE:
            return run_queue_marks(ranks, samples_s)
        self._block.append((ranks, len(samples_s)))
        wall_s = sum(max(rank.wall_s for rank in visit) for visit, _ in self._block)
        if wall_s < self.block_s:
            return []
        block, self._block = self._block, []
        mark = self._block_mark([visit for visit, _ in block], wall_s)
        return [mark] * sum(samples for _, samples in block)

    def _block_mark(self, visits: Sequence[Sequence[Seen]], wall_s: float) -> Mark:
        seen = [rank for visit in visits for rank in visit]
        if any(rank.others_s is None for rank in seen):
            return None
        others_s = sum(max(rank.others_s or 0.0 for rank in visit) for visit in visits)
        stolen = any((rank.stolen_ticks or 0) > MOST_STOLEN_TICKS for rank in seen)
        return not stolen and others_s <= MOST_OTHERS * self._cores * wall_s


class Block(NamedTuple):
    """A time on this node, in seconds of ``comm.clock``, and whether other processes left the cores to a job in it."""

    begin_s: float
    end_s: float
    clean: bool


class JobBlocks:
    """Marks blocks of time by what processes that are no part of a job used of the cores, while the job runs.

    The job are the processes below ``process``; ``dpsim explain``, which started it, is no other one.
    """

    def __init__(self, process: int, node: Callable[[], CoreTicks | None] = node_ticks) -> None:
        self._process, self._node = process, node
        self._judge = Judge(crowded=True)
        self._before: tuple[float, CoreTicks | None, dict[int, float]] | None = None
        self.blocks: list[Block] = []

    def look(self) -> None:
        """End a block where it is long enough, and begin the next one."""
        if self._before is not None and now() - self._before[0] < self._judge.block_s:
            return
        at_s, ticks, cpu = now(), self._node(), {each: cpu_s([each]) or 0.0 for each in self._processes()}
        if self._before is not None:
            before_s, ticks_before, cpu_before = self._before
            if ticks is not None and ticks_before is not None:
                own_s = sum(seconds - cpu_before.get(process, 0.0) for process, seconds in cpu.items())
                others_s = (ticks.busy - ticks_before.busy) / TICKS_PER_S - own_s
                seen = Seen([], ticks.stolen - ticks_before.stolen, others_s, at_s - before_s)
                mark = self._judge.marks([seen], {0: at_s - before_s})
                self.blocks.append(Block(before_s, at_s, mark == [True]))
        self._before = at_s, ticks, cpu

    def reach(self, moment_s: float) -> bool:
        """Whether there are blocks up to a moment; also where nothing is counted here."""
        nothing = self._before is not None and self._before[1] is None
        return nothing or bool(self.blocks and self.blocks[-1].end_s >= moment_s)

    def _processes(self) -> list[int]:
        import psutil

        try:
            below = [each.pid for each in psutil.Process(self._process).children(recursive=True)]
        except psutil.Error:  # the job has ended
            below = []
        return [os.getpid(), *ancestors(), self._process, *below]


class RowMarks:
    """Keeps which values of a subject of ``Rows`` are clean, as a series of their own: ``dpsim.study.rows.CLEAN``."""

    def __init__(self, subject: Subject, judge: Judge) -> None:
        self._subject, self._judge = subject, judge
        self._unmarked: list[tuple[int, int]] = []

    def add(
        self, rows: Rows, visit: int, ranks: Sequence[Seen], samples_s: Mapping[int, float], parts: Sequence[int] = ()
    ) -> list[Mark]:
        """Mark the samples of a visit, and return their marks; each is of the part at its place in ``parts``."""
        self._unmarked += [(visit, part) for part in parts or [0] * len(samples_s)]
        marks = self._judge.marks(ranks, samples_s)
        if marks:
            marked, self._unmarked = self._unmarked[-len(marks) :], []
            for (of_visit, part), mark in zip(marked, marks, strict=True):
                if any(each is not None for each in marks):  # else nothing is known here
                    rows.add(self._subject, CLEAN, of_visit, [float(mark is True)], part)
        return marks if len(marks) == len(samples_s) else [None] * len(samples_s)
