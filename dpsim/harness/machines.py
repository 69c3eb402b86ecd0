"""Machine files: the points of their tables, and several machines merged into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpsim.errors import ConfigError
from dpsim.machine import Machine, Network
from dpsim.predict.formulas import fitted_links


def points(machine: Machine) -> list[dict[str, Any]]:
    """Return every time in a machine's tables with nothing else running, as ``--json`` lists them."""
    return [
        {"devices": cost.devices, "layout": cost.layout or str(cost.devices), "algorithm": cost.algorithm}
        | {"wire_dtype": cost.wire_dtype, "kind": cost.kind, "size_bytes": size, "time_s": time_s}
        for cost in machine.allreduce + machine.halves
        for size, time_s in zip(cost.sizes_bytes, cost.time_s, strict=True)
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
    slowdown = {each.devices: each for machine in reversed(machines) for each in machine.compute_slowdown}
    selection = {each.devices: each for machine in reversed(machines) for each in machine.selection}
    link, link_in_node = first.link, first.link_in_node
    if link is None or link.fitted_to:
        wire_latency_s = Network.parse(first.network).wire_latency_s
        link, fitted_in_node = fitted_links(
            tables, emulated=first.emulated_network, wire_latency_s=wire_latency_s, cores=first.cores
        )
        link_in_node = link_in_node if link_in_node is not None and not link_in_node.fitted_to else fitted_in_node
    return Machine(
        name="; ".join(dict.fromkeys(machine.name for machine in machines)),
        network=first.network,
        emulated_network=first.emulated_network,
        allreduce=tables,
        halves=halves,
        overlap=overlap,
        compute_slowdown=tuple(slowdown[devices] for devices in sorted(slowdown)),
        selection=tuple(selection[devices] for devices in sorted(selection)),
        link=link,
        link_in_node=link_in_node,
        nodes_per_rack=first.nodes_per_rack,
        link_between_racks=first.link_between_racks,
        memory_bytes=first.memory_bytes,
        cores=first.cores,
        calibrated_on="; ".join(dict.fromkeys(machine.calibrated_on for machine in machines if machine.calibrated_on)),
        source="; ".join(dict.fromkeys(machine.source for machine in machines if machine.source)),
    )
