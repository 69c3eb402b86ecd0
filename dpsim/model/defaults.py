"""What is assumed of machines that nobody calibrated: inputs that published tables and logs leave open.

Each default is what published sets of step times imply (``dpsim.validation.defaults``), with what they differ by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dpsim.errors import ConfigError
from dpsim.machine import ComputeSlowdown, Machine
from dpsim.model.past import with_past_studies
from dpsim.model.uncertainty import NORMAL_95
from dpsim.uncertainty import IntervalWidth
from dpsim.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Default:
    """What is assumed of a ``field`` of a machine: a ``value``, and ``doubt``, its standard error.

    That of factors and shares is the error of the logarithm.
    """

    field: str
    text: str
    value: float
    doubt: float

    def stated(self, workload: Workload, machine: Machine) -> str:
        """Return what of machine or workload says it, as ``step_spread of the workload``; empty where neither does."""
        other: dict[str, bool] = {}
        match self.field:
            case "compute_slowdown":
                other = {"step_spread of the workload": bool(workload.step_spread)}
            case "fixed_share":
                other = {"several local_batches of the workload": len(workload.local_batches) > 1}
            case "contention":
                other = {"overlap tables of the machine": bool(machine.overlap)}
            case "computation_taken":
                other = {"overlap tables of the machine": bool(machine.overlap)}
            case "loss_growth":
                other = {"step_spread of the workload": bool(workload.step_spread)}
        said = {f"{self.field} of the machine": getattr(machine, self.field) not in (None, ())} | other
        return next((what for what, stated in said.items() if stated), "")

    def fields(self) -> dict[str, Any]:
        """Return the fields of a machine of which it is assumed; a slowdown is that of two devices."""
        if self.field == "compute_slowdown":
            slowdown = ComputeSlowdown(devices=2, factor=self.value, half_width=NORMAL_95 * self.doubt)
            return {self.field: (slowdown,)}
        return {self.field: self.value, f"{self.field.removesuffix('_s')}_uncertainty": self.doubt}


DEFAULTS = (
    Default(
        field="computation_taken",
        text="seconds of computation that a second of a collective inside a node takes away from a backward beside it",
        value=0.5,
        doubt=0.2,
    ),
    Default(
        field="contention",
        text="how many times as long an allreduce takes beside a running backward as alone",
        value=1.8,
        doubt=0.27,
    ),
    Default(
        field="compute_slowdown",
        text="how many times as long computation takes on two devices as on one: what waiting for the slowest, and for "
        "launches and input beside it, costs",
        value=1.05,
        doubt=0.035,
    ),
    Default(
        field="loss_growth",
        text="the logarithm of how many times as long computation takes for each doubling of the devices beyond two",
        value=0.01,
        doubt=0.02,
    ),
    Default(
        field="fixed_share",
        text="the share of the computing time at the known local batch that a step takes whatever the batch",
        value=0.09,
        doubt=0.5,
    ),
)
"""In the order in which their values are estimated from published sets (``dpsim.validation.defaults``).

What was tried and is not among them, for it made errors of other clusters no smaller: the part of a stated bandwidth
that collectives reach (from 0.45 to 1 the mean error of nine clusters was 4.6 to 4.8 %); computation taken by
collectives between nodes (5.6 % in place of 5.1); and what the host adds to a collective (``collective_overhead_s``),
which tables and data sheets hold most of.
"""


WIDTHS = (
    IntervalWidth(group="step on known devices", factor=0.96, clusters=5),
    IntervalWidth(group="step on other devices", factor=0.9, clusters=13),
    IntervalWidth(group="step of another batch", factor=1.02, clusters=7),
    IntervalWidth(group="collective on known devices", factor=1.1, clusters=4),
    IntervalWidth(group="collective on other devices", factor=1.17, clusters=6),
)
"""How many times as wide as the model's own intervals of predictions from files are, in each cell: what predictions of
the other clusters' published rows say (``dpsim.validation.widths``), with the clusters that have such rows."""

CERTAIN = 1e-9
"""The doubt of what somebody states; 0 would be a doubt that is not known."""


def with_stated(workload: Workload, machine: Machine, field: str, value: float) -> Machine:
    """Return a machine with what somebody states of it: the value of a field that may be assumed.

    Raises ``ConfigError`` where machine or workload say it themselves, or for a value that a machine cannot have.
    """
    statement = Default(field=field, text="", value=value, doubt=CERTAIN)
    if said := statement.stated(workload, machine):
        raise ConfigError(
            f"it is stated already, by {said} (machine {machine.name!r}, workload {workload.name!r})",
            allowed="one of the two, the flag or the file",
            remedy="leave the flag out, or take it out of the file",
        )
    return msgspec.structs.replace(machine, **statement.fields())


def for_prediction(workload: Workload, machine: Machine) -> Machine:
    """Return a machine of a file with what is assumed of it, and with what past studies on it say of intervals."""
    return with_past_studies(with_defaults(workload, machine), workload.device)


def with_defaults(
    workload: Workload,
    machine: Machine,
    defaults: Sequence[Default] = DEFAULTS,
    widths: Sequence[IntervalWidth] = WIDTHS,
) -> Machine:
    """Return a machine on which what it does not state is assumed. Pure.

    A machine that dpsim calibrated stays as it is: its number of cores is known. ``assumed`` names what is filled in.
    """
    if machine.cores or machine.emulated_network or workload.emulated_compute:
        return machine
    filled = [default for default in defaults if not default.stated(workload, machine)]
    names, fields = [default.field for default in filled], dict[str, Any]()
    for default in filled:
        fields |= default.fields()
    if widths and not machine.interval_widths:
        names.append("interval_widths")
        fields["interval_widths"] = tuple(widths)
    return msgspec.structs.replace(machine, assumed=(*machine.assumed, *names), **fields) if names else machine
