"""Compares machine files: the line of each table, and times at the sizes that two of them cover."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dpsim.errors import ConfigError
from dpsim.machine import AllreduceCost, Machine, OverlapCost
from dpsim.predict.cost import fitted_line
from dpsim.records.run_comparison import MachineComparison, TableKey, TableLine, TimeRatio, Unmatched

Tables = dict[TableKey, AllreduceCost | OverlapCost]


def compare_machines(machines: Mapping[str, Machine]) -> MachineComparison:
    """Compare machines, by name, with the first of them.

    Raises ``ConfigError`` for fewer than two machines, for an emulated network beside a real one, and where a machine
    has no table of an allreduce in common with the first.
    """
    if len(machines) < 2:
        raise ConfigError(f"{len(machines)} machine file to compare", allowed="two or more machine files")
    first = next(iter(machines))
    tables = {name: _tables(machine) for name, machine in machines.items()}
    ratios, unmatched = list[TimeRatio](), list[Unmatched]()
    for name in list(machines)[1:]:
        if machines[first].emulated_network != machines[name].emulated_network:
            emulated, real = (first, name) if machines[first].emulated_network else (name, first)
            raise ConfigError(
                f"the network of {emulated} is emulated and that of {real} is real",
                allowed="machine files of emulated networks, or of real ones",
                remedy="look at each alone with dpsim machine show",
            )
        common = tables[first].keys() & tables[name].keys()
        of_pair = [
            TimeRatio(**_fields(key), a=first, b=name, **times)
            for key, table in tables[first].items()
            if key in common
            for times in _times(table, tables[name][key])
        ]
        if not of_pair:
            raise ConfigError(
                f"{first} and {name} have no allreduce of one algorithm, device count and size in common",
                allowed="machine files with a table of the same allreduce",
                remedy="see what each contains with dpsim machine show",
            )
        ratios += of_pair
        matched = {ratio.key for ratio in of_pair}
        for machine, other in ((first, name), (name, first)):
            left_out = (key for key in tables[machine] if key not in matched)
            unmatched += [Unmatched(**_fields(key), machine=machine, other=other) for key in left_out]
    lines = [_line(name, key, table) for name, of_machine in tables.items() for key, table in of_machine.items()]
    return MachineComparison(
        machines=tuple(machines),
        lines=tuple(sorted(lines, key=lambda line: line.key)),
        ratios=tuple(ratios),
        unmatched=tuple(unmatched),
    )


def _fields(key: TableKey) -> dict[str, Any]:
    return {name: getattr(key, name) for name in TableKey.__struct_fields__}


def _tables(machine: Machine) -> Tables:
    """Return the tables of a machine by what they are of; of two of the same, the first."""
    tables: Tables = {}
    both: tuple[AllreduceCost | OverlapCost, ...] = (*machine.allreduce, *machine.overlap)
    for table in both:
        values: dict[str, Any] = {name: getattr(table, name, "") for name in TableKey.__struct_fields__}
        tables.setdefault(TableKey(**values), table)
    return tables


def _line(machine: str, key: TableKey, table: AllreduceCost | OverlapCost) -> TableLine:
    alpha_s, beta = fitted_line(np.array(table.sizes_bytes, np.float64), np.array(table.time_s))
    return TableLine(
        **_fields(key),
        machine=machine,
        alpha_s=alpha_s,
        bandwidth_bytes_per_s=1 / beta if beta > 0 else float("inf"),
        smallest_bytes=table.sizes_bytes[0],
        largest_bytes=table.sizes_bytes[-1],
    )


def _times(a: AllreduceCost | OverlapCost, b: AllreduceCost | OverlapCost) -> Iterator[dict[str, Any]]:
    """Yield the times at all sizes of either table that both cover; a time of 0 has no ratio."""
    low, high = max(a.sizes_bytes[0], b.sizes_bytes[0]), min(a.sizes_bytes[-1], b.sizes_bytes[-1])
    for size in sorted({*a.sizes_bytes, *b.sizes_bytes}):
        time_a, time_b = (float(np.interp(size, each.sizes_bytes, each.time_s)) for each in (a, b))
        if low <= size <= high and time_a > 0:
            interpolated = not (size in a.sizes_bytes and size in b.sizes_bytes)
            times = {"a_time_s": time_a, "b_time_s": time_b, "ratio": time_b / time_a}
            yield {"size_bytes": size, **times, "interpolated": interpolated}
