"""The table of a sweep's screen: a row for each network, and what its question asks in the columns."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpsim.errors import ConfigError
from dpsim.machine import Network
from dpsim.records.comparison import ComparedPoint, Comparison, Group
from dpsim.report.sweep.batch_norm import global_cost
from dpsim.report.sweep.busy import BUSY, busy_from
from dpsim.report.sweep.cells import samples_per_s
from dpsim.report.table import Column, Table, table
from dpsim.report.words import (
    EMULATED_COMPUTE,
    devices_name,
    milliseconds,
    network_name,
    percent,
)
from dpsim.units import format_duration, format_size

MOST_ROWS = 6
"""Groups that have a row on the screen."""


def times_table(comparison: Comparison) -> Table:
    """Return the times of each group in a row; only the slowest, the best and what the model chose of many settings."""
    groups = comparison.groups[:MOST_ROWS]
    question = comparison.experiment.question
    if not groups:
        return table(columns=_point_columns(), sections={"": comparison.scored[:MOST_ROWS]})
    if question == "fusion-threshold":
        columns_of_groups = _threshold_columns(comparison, groups)
    elif question == "devices":
        columns_of_groups = _devices_columns(comparison, groups)
    else:
        columns_of_groups = _setting_columns(comparison)
    return table(columns=columns_of_groups, sections={"": groups})


def _point_columns() -> list[Column[ComparedPoint]]:
    return [
        Column(head="ms a step", cell=lambda point: f"{devices_name(point.devices)}, {point.network}", left=True),
        Column(head="measured", cell=lambda point: milliseconds(point.measured_step_s)),
    ]


def _threshold_columns(comparison: Comparison, groups: Sequence[Group]) -> list[Column[Group]]:
    def of_threshold(group: Group, threshold: float) -> str:
        points = [p for p in comparison.members(group) if p.fusion_threshold_bytes == threshold]
        return milliseconds(points[0].measured_step_s) if points else ""

    def best(group: Group) -> str:
        point = comparison.best_measured(group)
        return f"{milliseconds(point.measured_step_s)} ({format_size(point.fusion_threshold_bytes)})"

    return [
        Column(head="ms a step", cell=where, left=True),
        Column(head="1 device", cell=lambda group: _alone(comparison.best_measured(group)), dispensable=1),
        Column(head="0 (each tensor)", cell=lambda group: of_threshold(group, 0.0), dispensable=3),
        Column(head="best threshold", cell=best),
        Column(head="inf (all)", cell=lambda group: of_threshold(group, math.inf), dispensable=4),
        Column(head="speedup at best", cell=lambda group: _speedup(comparison.best_measured(group)), dispensable=1),
        Column(
            head="model chose",
            cell=lambda group: format_size(comparison.best_predicted(group).fusion_threshold_bytes),
            dispensable=2,
        ),
    ]


def _devices_columns(comparison: Comparison, groups: Sequence[Group]) -> list[Column[Group]]:
    layouts = list(dict.fromkeys(point.layout for group in groups for point in comparison.members(group)))

    def column(layout: str) -> Column[Group]:
        def cell(group: Group) -> str:
            points = [point for point in comparison.members(group) if point.layout == layout]
            return milliseconds(points[0].measured_step_s) if points else ""

        return Column(head=f"{layout} device{'s' * (layout != '1')}", cell=cell, dispensable=2)

    return [
        Column(head="ms a step", cell=where, left=True),
        *map(column, layouts),
        Column(head="speedup at best", cell=lambda group: _speedup(comparison.best_measured(group))),
        Column(
            head="model chose",
            cell=lambda group: f"{comparison.best_predicted(group).layout}",
            dispensable=1,
        ),
    ]


def _setting_columns(comparison: Comparison) -> list[Column[Group]]:
    def slowest(group: Group) -> str:
        return samples_per_s(max(comparison.members(group), key=lambda point: point.measured_s_per_sample))

    return [
        Column(head="samples a second", cell=where, left=True),
        Column(head="slowest", cell=slowest, dispensable=3),
        Column(head="fastest", cell=lambda group: samples_per_s(comparison.best_measured(group))),
        Column(
            head="model's choice", cell=lambda group: samples_per_s(comparison.best_predicted(group)), dispensable=2
        ),
        Column(head="speedup at best", cell=lambda group: _speedup(comparison.best_measured(group)), dispensable=1),
        *_asked_columns(comparison),
    ]


def _asked_columns(comparison: Comparison) -> list[Column[Group]]:
    """Return what a question asks besides which setting is the fastest: measured, and predicted in parentheses."""

    def added(group: Group) -> str:
        costs = global_cost(comparison.members(group))
        return "" if costs is None else f"{percent(costs[0], sign=True)} ({percent(costs[1], sign=True)})"

    def busy(group: Group) -> str:
        batch = busy_from(comparison.members(group))
        measured, predicted = ("none" if each is None else f"{each:g}" for each in (batch.measured, batch.predicted))
        return f"{measured} ({predicted})"

    return {
        "batch-norm": [Column(head="global statistics add (predicted)", cell=added)],
        "local-batch": [Column(head=f"{BUSY:.0%} of fastest from batch (predicted)", cell=busy)],
    }.get(comparison.experiment.question, [])


def _alone(point: ComparedPoint) -> str:
    """Return the milliseconds of a step of the same batch on one device, where that was measured."""
    return "" if point.measured_speedup is None else milliseconds(point.measured_step_s * point.measured_speedup)


def _speedup(point: ComparedPoint) -> str:
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
