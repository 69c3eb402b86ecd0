"""What is asked beyond what is known: predictions of one cell are alike in how far they reach, and in how far off."""

from __future__ import annotations

from typing import Literal, get_args

from dpsim.machine import Machine
from dpsim.model.cost import idle_curve
from dpsim.model.prices import local_share
from dpsim.schedule import Schedule

Cell = Literal[
    "step on known devices",
    "step on other devices",
    "step of another batch",
    "collective on known devices",
    "collective on other devices",
]
CELLS: tuple[Cell, ...] = get_args(Cell)


def cell_of(machine: Machine, schedule: Schedule) -> Cell:
    """Return the cell of a step or a collective alone, by what it asks beyond what is known.

    Of a collective (a workload that computes nothing) a table of its devices is known, or not. A step whose local batch
    lies outside those of the workload is one of another batch, whatever its devices; else its devices are known where
    steps on as many of them were fitted (``Machine.known_devices``), and one device always is.
    """
    plan, workload = schedule.plan, schedule.workload
    if not computes(schedule):
        curve = idle_curve(machine, machine.priced(plan.collective))
        return "collective on known devices" if curve.first_bytes <= curve.last_bytes else "collective on other devices"
    if not workload.local_batches[0] <= local_share(plan) <= workload.local_batches[-1]:
        return "step of another batch"
    return "step on known devices" if plan.devices in (1, *machine.known_devices) else "step on other devices"


def computes(schedule: Schedule) -> bool:
    """Return whether a workload computes at all; one of a collective alone does not."""
    workload = schedule.workload
    return bool(workload.update_s or workload.overhead_s) or any(
        any(layer.forward_s) or any(layer.backward_s) for layer in workload.layers
    )
