"""A machine whose devices were joined by another link: its links, and its tables with the link's share of each time."""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec
import numpy as np

from dpsim.collective import Collective, parse_devices
from dpsim.errors import ConfigError
from dpsim.machine import FASTEST_MEMORY_BYTES_PER_S, AllreduceCost, Link, Machine, OverlapCost
from dpsim.model.curve import fitted_line
from dpsim.model.formulas import message_s
from dpsim.model.link_fit import fitted_links
from dpsim.model.scaling import level, level_of

Field = Literal["bandwidth_bytes_per_s", "latency_s"]
Table = TypeVar("Table", AllreduceCost, OverlapCost)


def joining_link(machine: Machine, devices: int | str) -> tuple[Link, bool]:
    """Return the link that joins devices or a layout, and whether it is the one inside a node.

    Where a machine states none it is fitted to its tables. Raises ``ConfigError`` for a machine without link and
    tables, and for one whose tables do not tell both of its numbers.
    """
    count, layout = parse_devices(devices)
    where = level_of(machine, Collective(algorithm="ring", devices=count, layout=layout))
    inside = machine.link_in_node is not None and where == "inside"
    link = machine.link_in_node if inside else machine.link or fitted_links(machine.allreduce, cores=machine.cores)[0]
    if link is None:
        raise ConfigError(
            f"the link of machine {machine.name!r}, which has none",
            allowed="a machine with a [link], as dpsim calibrate writes it, or a name of dpsim calibrate --list",
            remedy="write latency_s and bandwidth_bytes_per_s into its file",
        )
    has_tables = machine.allreduce or machine.halves or machine.overlap
    if has_tables and not (message_s(link) > 0 and link.bandwidth_bytes_per_s < float("inf")):
        raise ConfigError(
            f"the link of machine {machine.name!r}, whose tables tell no latency or no bandwidth",
            allowed="tables of several sizes, small and large",
            remedy="calibrate it again with small and large sizes, or name a link of dpsim calibrate --list",
        )
    return link, inside


def with_link(machine: Machine, devices: int | str, field: Field, value: float) -> Machine:
    """Return a machine with another bandwidth or latency of the link that joins devices or a layout.

    The tables of that level follow: of each time T(M), alpha (``fitted_line``) changes as the link's cost of a message
    does, and T(M) - alpha as its bandwidth, so that each table keeps what it has beside a line.
    """
    link, inside = joining_link(machine, devices)
    other = msgspec.structs.replace(link, **{field: value})
    of_message = message_s(other) / message_s(link) if message_s(link) > 0 else 1.0
    of_byte = link.bandwidth_bytes_per_s / other.bandwidth_bytes_per_s if field == "bandwidth_bytes_per_s" else 1.0

    def changed(table: Table) -> Table:
        if machine.link_in_node is not None and (level(machine, table.layout) == "inside") != inside:
            return table
        sizes, times = np.array(table.sizes_bytes, np.float64), np.array(table.time_s)
        alpha = np.minimum(fitted_line(sizes, times)[0], times)
        moved = of_message * alpha + of_byte * (times - alpha)
        seconds = np.maximum(moved, np.minimum(times, 2 * sizes / FASTEST_MEMORY_BYTES_PER_S))
        return msgspec.structs.replace(table, time_s=tuple(seconds.tolist()), p10_s=(), p90_s=())

    return msgspec.structs.replace(
        machine,
        allreduce=tuple(map(changed, machine.allreduce)),
        halves=tuple(each if each.kind == "copy" else changed(each) for each in machine.halves),
        overlap=tuple(map(changed, machine.overlap)),
        **{"link_in_node" if inside else "link": other},
    )
