"""What the kernel counts of this node's cores in ``/proc/stat``, in clock ticks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class CoreTicks(NamedTuple):
    """The ticks in which a core, or all of them, was busy, those that the hypervisor took, and of the busy ones those
    of interrupts, in which no process ran.
    """

    busy: int
    stolen: int
    interrupts: int = 0


class NodeTicks(NamedTuple):
    """The ticks of all cores, where they are counted, and of each, and how many threads have or want a core."""

    every: CoreTicks | None
    cores: Mapping[int, CoreTicks]
    runnable: int


def read_ticks(stat: Path = STAT) -> NodeTicks | None:
    """Return what the kernel has counted so far; ``None`` where it counts nothing."""
    try:
        rows = [line.split(maxsplit=9) for line in stat.read_text(encoding="utf-8", errors="replace").splitlines()]
        cores = {row[0][3:]: _core_ticks(row) for row in rows if row and row[0].startswith("cpu")}
        every = cores.pop("", None)
        return NodeTicks(
            every,
            {int(core): ticks for core, ticks in cores.items()},
            next((int(row[1]) for row in rows if row and row[0] == "procs_running"), 0),
        )
    except (OSError, ValueError):
        return None


def _core_ticks(row: list[str]) -> CoreTicks:
    user, nice, system, _, _, irq, softirq, stolen = map(int, row[1:9])
    return CoreTicks(user + nice + system + irq + softirq, stolen, irq + softirq)
