"""What is assumed of machines that nobody calibrated: inputs that published tables and logs leave open.

Each default is what published sets of step times imply (``dpsim.validation.defaults``), with what they differ by.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dpsim.errors import ConfigError
from dpsim.machine import ComputeSlowdown, Machine
from dpsim.model.past import with_past_studies
from dpsim.model.residuals import ANY_GROUP
from dpsim.model.uncertainty import NORMAL_95
from dpsim.uncertainty import IntervalWidth
from dpsim.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Default:
    """What is assumed of a ``field`` of a machine: a ``value``; ``doubt`` is the standard error of its logarithm."""

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
        said = {f"{self.field} of the machine": getattr(machine, self.field) not in (None, ())} | other
        return next((what for what, stated in said.items() if stated), "")

    def fields(self, devices: Iterable[int]) -> dict[str, Any]:
        """Return the fields of a machine of which it is assumed, for these numbers of devices."""
        match self.field:
            case "compute_slowdown":
                half_width, counts = NORMAL_95 * self.doubt, sorted({*devices} - {1})
                slowdowns = (ComputeSlowdown(devices=n, factor=self.value, half_width=half_width) for n in counts)
                return {"compute_slowdown": tuple(slowdowns)}
            case "contention" | "collective_overhead_s":
                return {self.field: self.value, f"{self.field.removesuffix('_s')}_uncertainty": self.doubt}
            case "interval_widths":
                return {"interval_widths": (IntervalWidth(group=ANY_GROUP, factor=self.value),)}
            case _:
                return {self.field: self.value}


DEFAULTS = (
    Default(  # sets imply 1.00 (GPT-2 XL, 2 GPUs), 1.04 (DDP on V100), 1.06 to 1.08 (CNNs of 2017), 1.1 (GoogLeNet)
        field="compute_slowdown",
        text="how many times as long computation takes on several devices as on one: what waiting for the slowest, and "
        "for launches and input beside it, costs",
        value=1.05,
        doubt=0.034,
    ),
    Default(  # 0.07 to 0.09 (CNNs of 2017), 0.09 (MLPerf) and 0.2 (large-batch records)
        field="fixed_share",
        text="the share of the computing time at the known local batch that a step takes whatever the batch",
        value=0.09,
        doubt=0.46,
    ),
    Default(  # at most 1.35 (CNNs of 2017) and 1.75 (MLPerf), 2.0 (GPT-2 XL) and 2.5 (GoogLeNet on K80)
        field="contention",
        text="how many times as long an allreduce takes beside a running backward as alone",
        value=1.875,
        doubt=0.27,
    ),
    Default(
        field="interval_widths",
        text="how many times as wide as the model's own the interval of a step is",
        value=0.58,
        doubt=0.0,
    ),
)
"""In the order in which they are estimated from published sets.

What the host adds to a collective (``collective_overhead_s``) has none: all sets that tell of it are predicted best
with 1 us or less, for tables and data sheets hold most of it.
"""


CERTAIN = 1e-9
"""The doubt of what somebody states; 0 would be a doubt that is not known."""


def with_stated(workload: Workload, machine: Machine, devices: Iterable[int], field: str, value: float) -> Machine:
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
    return msgspec.structs.replace(machine, **statement.fields(devices))


def for_prediction(workload: Workload, machine: Machine, devices: Iterable[int]) -> Machine:
    """Return a machine of a file with what is assumed of it, and with what past studies on it say of intervals."""
    return with_past_studies(with_defaults(workload, machine, devices))


def with_defaults(
    workload: Workload, machine: Machine, devices: Iterable[int], defaults: Sequence[Default] = DEFAULTS
) -> Machine:
    """Return a machine on which what it does not state is assumed, for these numbers of devices. Pure.

    A machine that dpsim calibrated stays as it is: its number of cores is known. ``assumed`` names what is filled in.
    """
    if machine.cores or machine.emulated_network or workload.emulated_compute:
        return machine
    filled = [default for default in defaults if not default.stated(workload, machine)]
    numbers, fields = {*devices}, dict[str, Any]()
    for default in filled:
        fields |= default.fields(numbers)
    if not fields:
        return machine
    assumed = (*machine.assumed, *(default.field for default in filled))
    return msgspec.structs.replace(machine, assumed=assumed, **fields)
