"""Who uses this machine's cores beside dpsim: shares of cores by process, from two readings of ``/proc``."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from dpsim.errors import ConfigError
from dpsim.launch import rank_info
from dpsim.progress import Progress
from dpsim.study.core_ticks import TICKS_PER_S, CoreTicks, read_ticks
from dpsim.units import format_duration

PROC = Path("/proc")
QUIET_SHARE = 0.05
"""The share of the cores that other processes may use on a quiet machine."""
QUIET_S = 10.0
"""Seconds for which a machine is quiet before it is called so."""
_WINDOW_S, _EVERY_S, _REPORT_S = 0.5, 1.0, 30.0
_STOLEN_BY, _HIDDEN = "other virtual machines", "processes that cannot be seen or have ended"
_MOST_NAMES = 4
_RANKS = 2
"""Ranks of most measurements."""


class Process(NamedTuple):
    """A process at one moment: its name, its parent, the core it ran on last, and its CPU time in clock ticks."""

    name: str
    parent: int
    core: int
    ticks: int


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The clock ticks that the usable cores and all visible processes have spent until ``at_s``.

    ``cores`` is empty where their ticks are not counted.
    ``runnable`` is how many threads had or wanted a core. Processes have their number and the moment of their start.
    """

    at_s: float
    usable: frozenset[int]
    cores: Mapping[int, CoreTicks]
    runnable: int
    processes: Mapping[tuple[int, str], Process]


@dataclass(frozen=True, kw_only=True)
class Use:
    """The cores that other processes used, of ``cores``, and the shares of them by name, the largest first.

    ``runnable`` is how many of their threads wanted a core, at least.
    """

    cores: int
    used: float
    shares: Mapping[str, float] = field(default_factory=dict)
    runnable: float = 0.0

    @property
    def busy(self) -> bool:
        """Whether they used more than a quiet machine's share."""
        return self.used > QUIET_SHARE * self.cores

    @property
    def sentence(self) -> str:
        """Say how much they used, and who they are."""
        named = ", ".join(f"{name} {share:.1f}" for name, share in self.shares.items() if share >= QUIET_SHARE)
        return f"other processes use {self.used:.1f} of {self.cores} cores{f' ({named})' if named else ''}"

    def times_as_long(self) -> float:
        """Return how many times as long two ranks take, which share the cores fairly with the other threads."""
        return max(1.0, (max(self.used, self.runnable) + min(_RANKS, self.cores)) / self.cores)


def read(proc: Path = PROC, clock: Callable[[], float] = time.monotonic) -> Reading | None:
    """Return what ``/proc`` says now; ``None`` where there is none that can be read."""
    at_s, processes = clock(), dict[tuple[int, str], Process]()
    node = read_ticks(proc / "stat")
    try:
        names = [entry.name for entry in os.scandir(proc) if entry.name.isdecimal()]
    except OSError:
        return None
    if node is None:
        return None
    for name in names:
        try:
            text = (proc / name / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # it has ended, or is another user's
        values = text[text.rindex(")") + 1 :].split()
        process = Process(
            name=text[text.index("(") + 1 : text.rindex(")")],
            parent=int(values[1]),
            core=int(values[36]),
            ticks=int(values[11]) + int(values[12]),
        )
        processes[int(name), values[19]] = process
    usable = _usable(node.cores)
    return Reading(
        at_s=at_s,
        usable=usable,
        cores={core: ticks for core, ticks in node.cores.items() if core in usable},
        runnable=node.runnable if usable == node.cores.keys() else 0,
        processes=processes,
    )


def _usable(present: Mapping[int, object]) -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(present)


def between(before: Reading, after: Reading, root: int | None = None) -> Use:
    """Return what processes other than ``root``, by default dpsim's own, and its children used between two readings.

    That is the larger of what ``/proc/stat`` counts, which includes processes that nobody may look at, and of what the
    processes themselves do: in a container one of both may be missing.
    """
    seconds = max(after.at_s - before.at_s, 1e-9)
    own = _family(after.processes, _own_root() if root is None else root)
    used, own_used = dict[str, float](), 0.0
    for key, process in after.processes.items():
        earlier = before.processes.get(key)
        share = (process.ticks - (earlier.ticks if earlier else 0)) / TICKS_PER_S / seconds
        if key[0] in own:
            own_used += share
        elif process.core in after.usable and share > 0:
            used[process.name] = used.get(process.name, 0.0) + share
    busy = stolen = 0.0
    for core, ticks in after.cores.items():
        earlier_ticks = before.cores.get(core, ticks)
        busy += (ticks.busy - earlier_ticks.busy) / TICKS_PER_S / seconds
        stolen += (ticks.stolen - earlier_ticks.stolen) / TICKS_PER_S / seconds
    used |= {_STOLEN_BY: stolen, _HIDDEN: max(0.0, busy - own_used - sum(used.values()))}
    largest = sorted(used.items(), key=lambda item: -item[1])[:_MOST_NAMES]
    shares = {name: share for name, share in largest if share > 0}
    count = len(after.usable)
    total = min(sum(used.values()), float(count))
    crowded = total > (1 - 2 * QUIET_SHARE) * count
    runnable = max(0.0, min(before.runnable, after.runnable) - 1.0) if crowded else 0.0
    return Use(cores=count, used=total, shares=shares, runnable=runnable)


def _own_root() -> int:
    """The process above all of dpsim's: this one, or the launcher that started it as one of several ranks."""
    return os.getpid() if rank_info.job() is None else os.getppid()


def _family(processes: Mapping[tuple[int, str], Process], root: int) -> set[int]:
    """Return a process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for (number, _), process in processes.items():
        children.setdefault(process.parent, []).append(number)
    family, waiting = {root}, [root]
    while waiting:
        new = [each for each in children.get(waiting.pop(), []) if each not in family]
        family.update(new)
        waiting += new
    return family


def look(proc: Path = PROC, sleep: Callable[[float], None] = time.sleep) -> Use | None:
    """Return what other processes use during half a second; ``None`` where that cannot be seen."""
    before = read(proc)
    if before is None:
        return None
    sleep(_WINDOW_S)
    after = read(proc)
    return None if after is None else between(before, after)


def wait_until_quiet(
    limit_s: float,
    report: Progress,
    *,
    proc: Path = PROC,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until other processes have used less than 5 % of the cores for 10 s; every 30 s say who uses them.

    Raises ``ConfigError`` where that takes longer than ``limit_s``.
    """
    first = read(proc, clock)
    if first is None:
        report("warning: who uses the cores cannot be seen here: measuring begins without waiting")
        return
    readings, reported_s = deque([first]), first.at_s
    while True:
        sleep(_EVERY_S)
        latest = read(proc, clock)
        if latest is None:
            return
        readings.append(latest)
        while len(readings) > 2 and latest.at_s - readings[1].at_s >= QUIET_S:
            readings.popleft()
        use = between(readings[0], latest)
        if latest.at_s - readings[0].at_s >= QUIET_S and not use.busy:
            return
        waited_s = latest.at_s - first.at_s
        if waited_s >= limit_s:
            raise ConfigError(
                f"after {format_duration(waited_s)} of waiting {use.sentence}",
                allowed=f"less than {QUIET_SHARE:.0%} of the cores for {QUIET_S:.0f} s",
                remedy="stop these processes, wait longer (--wait-until-quiet 1h), or leave the flag out to measure "
                "beside them",
            )
        if latest.at_s - reported_s >= _REPORT_S:
            reported_s = latest.at_s
            report(f"waiting until the machine is quiet, {waited_s:.0f} of at most {limit_s:.0f} s: {use.sentence}")


def before_measuring(wait_s: float | None, report: Progress) -> None:
    """Wait until the machine is quiet, for ``wait_s`` at most, or without it say who uses its cores, if anybody does.

    Raises ``ConfigError`` as ``wait_until_quiet``.
    """
    if wait_s is not None:
        wait_until_quiet(wait_s, report)
    elif (use := look()) is not None and use.busy:
        report(
            f"warning: {use.sentence}: measuring will take about {use.times_as_long():.1f} times as long as on a quiet "
            "machine, and say less; --wait-until-quiet waits until they have finished"
        )
