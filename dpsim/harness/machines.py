"""Machines: those that come with dpsim, the points of their tables, and several merged into one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import msgspec

from dpsim import machine
from dpsim.errors import ConfigError
from dpsim.machine import AllreduceCost, Machine, Network, OverlapCost
from dpsim.machine_library import library
from dpsim.model.link_fit import fitted_links

_DEVIATIONS_90 = NormalDist().inv_cdf(0.95)


def points(machine: Machine) -> list[dict[str, Any]]:
    """Return every time in a machine's tables with nothing else running, as ``--json`` lists them."""
    return [
        {"devices": cost.devices, "layout": cost.layout or str(cost.devices), "algorithm": cost.algorithm}
        | {"wire_dtype": cost.wire_dtype, "kind": cost.kind, "size_bytes": size, "time_s": time_s}
        for cost in machine.allreduce + machine.halves
        for size, time_s in zip(cost.sizes_bytes, cost.time_s, strict=True)
    ]


def listed() -> list[dict[str, Any]]:
    """Return the links that come with dpsim, as ``dpsim calibrate --list --json`` prints them.

    ``bandwidth_low`` and ``bandwidth_high`` are the ends of the 90 % interval that ``relative_uncertainty`` gives.
    """
    read = {name: machine.read(path) for name, path in library().items()}
    return [
        {"name": name, "what": each.name, "latency_s": link.latency_s, "bucket_overhead_s": link.bucket_overhead_s}
        | {"bandwidth_bytes_per_s": link.bandwidth_bytes_per_s, "relative_uncertainty": link.relative_uncertainty}
        | {
            f"bandwidth_{end}": link.bandwidth_bytes_per_s
            * math.exp(sign * _DEVIATIONS_90 * (link.relative_uncertainty or 0.0))
            for end, sign in (("low", -1), ("high", 1))
        }
        | {"date": each.date, "calibrated_on": each.calibrated_on, "source": each.source}
        for name, each in read.items()
        if (link := each.link) is not None
    ]


def merged(machines: Sequence[Machine]) -> Machine:
    """Merge machines into one with the tables of all, and fit its links to them again.

    Everything that is not a table comes from the first machine. Raises ``ConfigError`` for machines on different
    networks, or with a table of the same allreduce.
    """
    first = machines[0]
    networks = sorted({machine.network for machine in machines})
    if len(networks) > 1:
        raise ConfigError(
            f"machines on the networks {' and '.join(networks)}",
            allowed="machines on one network",
            remedy="predict with each machine separately",
        )
    tables = tuple(table for machine in machines for table in machine.allreduce)
    halves = tuple(table for machine in machines for table in machine.halves)
    overlap = tuple(table for machine in machines for table in machine.overlap)
    _check_each_once(tables, halves, overlap)
    slowdown = {each.devices: each for machine in reversed(machines) for each in machine.compute_slowdown}
    selection = {each.devices: each for machine in reversed(machines) for each in machine.selection}
    link, link_in_node = first.link, first.link_in_node
    if link is None or link.fitted_to:
        wire_latency_s = Network.parse(first.network).wire_latency_s
        link, fitted_in_node = fitted_links(
            tables, emulated=first.emulated_network, wire_latency_s=wire_latency_s, cores=first.cores
        )
        link_in_node = link_in_node if link_in_node is not None and not link_in_node.fitted_to else fitted_in_node
    return msgspec.structs.replace(
        first,
        name="; ".join(dict.fromkeys(machine.name for machine in machines)),
        allreduce=tables,
        halves=halves,
        overlap=overlap,
        compute_slowdown=tuple(slowdown[devices] for devices in sorted(slowdown)),
        selection=tuple(selection[devices] for devices in sorted(selection)),
        link=link,
        link_in_node=link_in_node,
        calibrated_on="; ".join(dict.fromkeys(machine.calibrated_on for machine in machines if machine.calibrated_on)),
        source="; ".join(dict.fromkeys(machine.source for machine in machines if machine.source)),
    )


def _check_each_once(
    tables: Sequence[AllreduceCost], halves: Sequence[AllreduceCost], overlap: Sequence[OverlapCost]
) -> None:
    """Raise ``ConfigError`` for two tables of the same collective."""
    keys: dict[str, list[tuple[object, ...]]] = {
        "allreduce": [(t.algorithm, t.layout or t.devices, t.wire_dtype) for t in tables],
        "other": [(t.kind, t.algorithm, t.layout or t.devices, t.wire_dtype) for t in halves],
        "overlap": [(t.algorithm, t.layout or t.devices, t.wire_dtype, t.overlap, t.kind) for t in overlap],
    }
    for kind, of_kind in keys.items():
        twice = next((key for key in of_kind if of_kind.count(key) > 1), None)
        if twice is not None:
            raise ConfigError(
                f"two {kind} tables of {', '.join(map(str, twice))}",
                allowed="each table in one of the machines",
                remedy="leave one of the files out",
            )
