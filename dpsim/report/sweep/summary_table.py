"""The table of a sweep's screen: a row for each network, and what its question asks in the columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dpsim.errors import ConfigError
from dpsim.machine import Network
from dpsim.records.comparison import ComparedPoint, Comparison, Group
from dpsim.report.sweep.cells import samples_per_s
from dpsim.report.table import Column, Table, table
from dpsim.report.words import (
    EMULATED_COMPUTE,
    devices_name,
    milliseconds,
    network_name,
)
from dpsim.units import format_duration

MOST_ROWS = 6
"""Groups that have a row on the screen."""


def times_table(comparison: Comparison, screen: Callable[[Comparison, Sequence[Group]], list[Column[Group]]]) -> Table:
    """Return the times of each group in a row, in the columns that the question has for a ``screen``."""
    groups = comparison.groups[:MOST_ROWS]
    if not groups:
        return table(columns=_point_columns(), sections={"": comparison.scored[:MOST_ROWS]})
    return table(columns=screen(comparison, groups), sections={"": groups})


def _point_columns() -> list[Column[ComparedPoint]]:
    return [
        Column(head="ms a step", cell=lambda point: f"{devices_name(point.devices)}, {point.network}", left=True),
        Column(head="measured", cell=lambda point: milliseconds(point.measured_step_s)),
    ]


def setting_columns(comparison: Comparison, *asked: Column[Group]) -> list[Column[Group]]:
    """Return the slowest and the fastest setting of many and what the model chose, and what else is ``asked``."""

    def slowest(group: Group) -> str:
        return samples_per_s(max(comparison.members(group), key=lambda point: point.measured_s_per_sample))

    return [
        Column(head="samples a second", cell=where, left=True),
        Column(head="slowest", cell=slowest, dispensable=3),
        Column(head="fastest", cell=lambda group: samples_per_s(comparison.best_measured(group))),
        Column(
            head="model's choice", cell=lambda group: samples_per_s(comparison.best_predicted(group)), dispensable=2
        ),
        Column(head="speedup at best", cell=lambda group: speedup(comparison.best_measured(group)), dispensable=1),
        *asked,
    ]


def alone(point: ComparedPoint) -> str:
    """Return the milliseconds of a step of the same batch on one device, where that was measured."""
    return "" if point.measured_speedup is None else milliseconds(point.measured_step_s * point.measured_speedup)


def speedup(point: ComparedPoint) -> str:
    return "" if point.measured_speedup is None else f"{point.measured_speedup:.2f}x"


def network_text(group: Group) -> str:
    """Return ``this machine``, or ``50 us, 1 Gbit/s, emulated``, and who trained if it was not dpsim."""
    name = network_name(group)
    if not group.emulated_network:
        return name.replace("node", "this machine", 1).replace(EMULATED_COMPUTE, ", computation emulated")
    try:
        link = Network.parse(group.network)
    except ConfigError:
        return name
    rate = f"{link.bandwidth_bytes_per_s * 8 / 1e9:g} Gbit/s"
    if link.bandwidth_bytes_per_s < 1e9 / 8:
        rate = f"{link.bandwidth_bytes_per_s * 8 / 1e6:g} Mbit/s"
    both = "all emulated" if group.emulated_compute else "emulated"
    _, _, runtime = name.partition(" (emulated), ")
    return f"{format_duration(link.latency_s)}, {rate}, {both}" + (f", {runtime}" if runtime else "")


def where(group: Group) -> str:
    """Return the network of a group, with what sets it apart from others on the same one."""
    return ", ".join([network_text(group), *group.apart])
