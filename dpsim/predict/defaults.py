"""What is assumed of machines that nobody calibrated: inputs that published tables and logs leave open.

Each default is what published sets of step times imply (``dpsim.validation.defaults``), with what they differ by.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from dpsim.machine import ComputeSlowdown, Machine
from dpsim.predict.past import with_past_studies
from dpsim.predict.uncertainty import NORMAL_95
from dpsim.workload import Workload

SYNCHRONISATION_LOSS, SYNCHRONISATION_DOUBT = 1.05, 0.05
"""How many times as long computation takes on several devices as on one, as each waits for the slowest, and one
relative standard error: the sets imply 1.00 (GPT-2 XL, 2 GPUs), 1.04 (DDP on V100), 1.06 (CNNs of 2017) and 1.10
(GoogLeNet on K80)."""
CONTENTION, CONTENTION_DOUBT = 2.0, 0.3
"""How many times as long as alone a collective takes beside backward: the sets imply 1.2 (CNNs of 2017), 2.0 (GPT-2 XL)
and 2.5 (GoogLeNet on K80)."""


def for_prediction(workload: Workload, machine: Machine, devices: Iterable[int]) -> Machine:
    """Return a machine of a file with what is assumed of it, and with what past studies on it say of intervals."""
    return with_past_studies(with_defaults(workload, machine, devices))


def with_defaults(workload: Workload, machine: Machine, devices: Iterable[int]) -> Machine:
    """Return a machine on which what it does not state is assumed, for these numbers of devices. Pure.

    A machine that dpsim calibrated stays as it is: its number of cores is known. ``assumed`` names what is filled in.
    """
    if machine.cores or machine.emulated_network or workload.emulated_compute:
        return machine
    fields: dict[str, Any] = {}
    if not machine.compute_slowdown and not workload.step_spread:
        fields["compute_slowdown"] = tuple(
            ComputeSlowdown(devices=count, factor=SYNCHRONISATION_LOSS, half_width=NORMAL_95 * SYNCHRONISATION_DOUBT)
            for count in sorted({*devices} - {1})
        )
    if not machine.overlap and machine.contention is None:
        fields |= {"contention": CONTENTION, "contention_uncertainty": CONTENTION_DOUBT}
    return msgspec.structs.replace(machine, assumed=tuple(fields), **fields) if fields else machine
