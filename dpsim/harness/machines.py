"""Machines beside each other and together: the points of their tables, and several files as one machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpsim.errors import ConfigError
from dpsim.machine import Machine
from dpsim.predict.link_fit import fitted_link


def points(machine: Machine) -> list[dict[str, Any]]:
    """Every time of a machine's allreduce tables, as ``--json`` lists them."""
    return [
        {"devices": cost.devices, "layout": cost.layout or str(cost.devices), "algorithm": cost.algorithm}
        | {"wire_dtype": cost.wire_dtype, "size_bytes": size, "time_s": time_s}
        for cost in machine.allreduce
        for size, time_s in zip(cost.sizes_bytes, cost.time_s, strict=True)
    ]


def merged(machines: Sequence[Machine]) -> Machine:
    """One machine with the tables of all; its link is fitted to them again.

    What is no table is the first one's. Raises ``ConfigError`` for machines on different networks, or with a table of
    the same allreduce.
    """
    first = machines[0]
    networks = sorted({machine.network for machine in machines})
    if len(networks) > 1:
        raise ConfigError(
            f"machines on the networks {' and '.join(networks)}",
            allowed="machines on one network",
            remedy="predict with each of them by itself",
        )
    tables = tuple(table for machine in machines for table in machine.allreduce)
    overlap = tuple(table for machine in machines for table in machine.overlap)
    covered: dict[str, list[tuple[object, ...]]] = {
        "allreduce": [(t.algorithm, t.layout or t.devices, t.wire_dtype) for t in tables],
        "overlap": [(t.algorithm, t.layout or t.devices, t.wire_dtype, t.overlap) for t in overlap],
    }
    for what, keys in covered.items():
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise ConfigError(
                f"two {what} tables of {', '.join(map(str, twice))}",
                allowed="each table in one of the machines",
                remedy="leave one of the files out",
            )
    slowdown = {one.devices: one for machine in reversed(machines) for one in machine.compute_slowdown}
    selection = {one.devices: one for machine in reversed(machines) for one in machine.selection}
    given = first.link if first.link is not None and not first.link.fitted_to else None
    return Machine(
        name="; ".join(dict.fromkeys(machine.name for machine in machines)),
        network=first.network,
        emulated_network=first.emulated_network,
        allreduce=tables,
        overlap=overlap,
        compute_slowdown=tuple(slowdown[devices] for devices in sorted(slowdown)),
        selection=tuple(selection[devices] for devices in sorted(selection)),
        link=given or fitted_link(tables, emulated=first.emulated_network),
        link_in_node=first.link_in_node,
        memory_bytes=first.memory_bytes,
        cores=first.cores,
        calibrated_on="; ".join(dict.fromkeys(machine.calibrated_on for machine in machines if machine.calibrated_on)),
        source="; ".join(dict.fromkeys(machine.source for machine in machines if machine.source)),
    )
