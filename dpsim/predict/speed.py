"""A machine whose speed changes, as machines of one speed each, with the part of the time that each holds."""

from __future__ import annotations

import msgspec

from dpsim.machine import ComputeSlowdown, Machine
from dpsim.memo import remember


def slow_share(machine: Machine, devices: int) -> tuple[float, float]:
    """(part of the time at which the slowest of ``devices`` is slow, how many times longer it computes then).

    Calibrated counts as they were measured. Beyond them devices are taken to be slow independently of each other:
    all n are at full speed for (1 - share of m)^(n / m), m the nearest calibrated count. (0, 1) where none is known.
    """
    known = {speed.devices: speed for speed in machine.speed}
    if not known:
        return 0.0, 1.0
    nearest = known[min(known, key=lambda count: (abs(count - devices), -count))]
    share = 1 - (1 - nearest.slow_share) ** (devices / nearest.devices)
    return share, nearest.compute_factor


@remember
def speeds(machine: Machine, devices: int) -> tuple[tuple[float, Machine], ...]:
    """(part of the time, the machine at that speed), full speed first."""
    share, factor = slow_share(machine, devices)
    if share <= 0:
        return ((1.0, machine),)
    full = msgspec.structs.replace(machine, speed=())
    return (1 - share, full), (share, slowed(full, devices, factor))


def slowed(machine: Machine, devices: int, factor: float) -> Machine:
    """The machine at its slow speed, where ``devices`` compute for ``factor`` times as long."""
    known = machine.compute_slowdown or (ComputeSlowdown(devices=devices, factor=1.0),)
    slowdowns = {1: ComputeSlowdown(devices=1, factor=1.0)} if machine.compute_slowdown else {}
    slowdowns |= {slowdown.devices: slowdown for slowdown in known}
    return msgspec.structs.replace(
        machine,
        allreduce=tuple(
            msgspec.structs.replace(table, time_s=_times(table.time_s, table.slow_factor))
            for table in machine.allreduce
        ),
        halves=tuple(
            msgspec.structs.replace(table, time_s=_times(table.time_s, table.slow_factor)) for table in machine.halves
        ),
        overlap=tuple(
            msgspec.structs.replace(
                table,
                time_s=_times(table.time_s, table.slow_factor),
                poll_s=table.poll_s * factor,
                compute_loss_s=_times(table.compute_loss_s, factor),
            )
            for table in machine.overlap
        ),
        compute_slowdown=tuple(
            ComputeSlowdown(devices=count, factor=each.factor * factor, added_s=each.added_s * factor)
            for count, each in sorted(slowdowns.items())
        ),
    )


def _times(seconds: tuple[float, ...], factor: float) -> tuple[float, ...]:
    return tuple(factor * value for value in seconds)
