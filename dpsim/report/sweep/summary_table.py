"""The table of a sweep's screen: a row for each network, and what its question asks in the columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dpsim.errors import ConfigError
from dpsim.machine import Network
from dpsim.records.compared_point import ComparedPoint
from dpsim.records.comparison import Comparison, Group, Overall
from dpsim.report.sweep.cells import samples_per_s
from dpsim.report.sweep.verdict import verdict
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
        of = verdict(comparison, group)
        return samples_per_s(of.slowest) if of.said == "best" else ""

    return [
        Column(head="samples a second", cell=where, left=True),
        Column(head="slowest", cell=slowest, dispensable=3),
        Column(head="fastest", cell=lambda group: _of_best(comparison, group)),
        model_chose(comparison, samples_per_s),
        Column(head="speedup", cell=lambda group: speedup(comparison, group), dispensable=1),
        *asked,
    ]


def alone(point: ComparedPoint) -> str:
    """Return the milliseconds of a step of the same batch on one device, where that was measured."""
    return "" if point.measured_speedup is None else milliseconds(point.measured_step_s * point.measured_speedup)


def _of_best(comparison: Comparison, group: Group) -> str:
    """Return the samples per second of the best setting; where none is, those of all settings unless disturbed."""
    of = verdict(comparison, group)
    if of.best is not None or of.said == "one setting":
        return samples_per_s(of.fastest)
    return "" if of.said == "nothing" else f"{samples_per_s(of.slowest)} to {samples_per_s(of.fastest)}"


def model_chose(comparison: Comparison, cell: Callable[[ComparedPoint], str]) -> Column[Group]:
    """Return the column of what the model chose, empty where there was no choice of which something can be said."""

    def chosen(group: Group) -> str:
        of = verdict(comparison, group)
        return ", ".join(dict.fromkeys(cell(point) for point in of.chosen)) if of.choice else ""

    return Column(head="model chose", cell=chosen, dispensable=2)


def speedup(comparison: Comparison, group: Group) -> str:
    """Return the speedup of the best setting, or where none is surely the best those from least to most."""
    of = verdict(comparison, group)
    points = comparison.members(group) if of.best is None else (of.best,)
    values = [point.measured_speedup for point in points if point.measured_speedup is not None and point.devices > 1]
    if of.said == "nothing" or not values:
        return ""
    ends = dict.fromkeys(f"{value:.2f}x" for value in (min(values), max(values)))
    return " to ".join(ends)


def network_text(group: Group | Overall) -> str:
    """Return ``this machine``, or ``50 us, 1 Gbit/s, emulated``, and who trained if it was not dpsim.

    Of a shaped network ``4 hosts, 200 Mbit/s, slow-host 50%, emulated``.
    """
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
    links = [f"{link.hosts} hosts" if link.shaped else format_duration(link.latency_s), rate]
    links += [change.replace("=", " ") for change in group.network.split("+")[1:]]
    return ", ".join([*links, both, *([runtime] if runtime else [])])


def where(group: Group) -> str:
    """Return the network of a group, with what sets it apart from others on the same one."""
    return ", ".join([network_text(group), *group.apart])
