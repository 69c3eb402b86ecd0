"""Several machine files beside each other: the line of each table, and times at the sizes that two of them cover."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from dpsim.errors import ConfigError
from dpsim.machine import AllreduceCost, Machine, OverlapCost
from dpsim.predict.cost import fitted_line
from dpsim.records.machine_comparison import MachineComparison, TableKey, TableLine, TimeRatio, Unmatched


def compare_machines(machines: Mapping[str, Machine]) -> MachineComparison:
    """Compare machines, by name, with the first of them.

    Raises ``ConfigError`` for fewer than two machines, for an emulated network beside a real one, and where a machine
    has no table of an allreduce in common with the first.
    """
    if len(machines) < 2:
        raise ConfigError(f"{len(machines)} machine file to compare", allowed="two or more machine files")
    (first, base), *others = machines.items()
    ratios: list[TimeRatio] = []
    unmatched: list[Unmatched] = []
    for name, machine in others:
        _check_networks(first, base, name, machine)
        of_pair, left_out = _pair(first, tables(base), name, tables(machine))
        if not of_pair:
            raise ConfigError(
                f"{first} and {name} have no allreduce of one algorithm, device count and size in common",
                allowed="machine files with a table of the same allreduce",
                remedy="see what each contains with dpsim machine show",
            )
        ratios += of_pair
        unmatched += left_out
    return MachineComparison(
        machines=tuple(machines),
        lines=tuple(sorted(_lines(machines), key=lambda line: line.key)),
        ratios=tuple(ratios),
        unmatched=tuple(unmatched),
    )


def tables(machine: Machine) -> dict[TableKey, AllreduceCost | OverlapCost]:
    """Return the tables of a machine by what they are of."""
    of_machine: dict[TableKey, AllreduceCost | OverlapCost] = {}
    both: tuple[AllreduceCost | OverlapCost, ...] = (*machine.allreduce, *machine.overlap)
    for table in both:
        key = TableKey(
            overlap=table.overlap if isinstance(table, OverlapCost) else "",
            algorithm=table.algorithm,
            devices=table.devices,
            layout=table.layout,
            wire_dtype=table.wire_dtype,
        )
        of_machine.setdefault(key, table)
    return of_machine


def _lines(machines: Mapping[str, Machine]) -> Iterator[TableLine]:
    for name, machine in machines.items():
        for key, table in tables(machine).items():
            alpha_s, beta = fitted_line(np.array(table.sizes_bytes, np.float64), np.array(table.time_s))
            yield TableLine(
                machine=name,
                key=key,
                alpha_s=alpha_s,
                bandwidth_bytes_per_s=1 / beta if beta > 0 else float("inf"),
                smallest_bytes=table.sizes_bytes[0],
                largest_bytes=table.sizes_bytes[-1],
            )


def _check_networks(first: str, base: Machine, name: str, machine: Machine) -> None:
    if base.emulated_network != machine.emulated_network:
        emulated, real = (first, name) if base.emulated_network else (name, first)
        raise ConfigError(
            f"the network of {emulated} is emulated and that of {real} is real",
            allowed="machine files of emulated networks, or of real ones",
            remedy="look at each alone with dpsim machine show",
        )


def _pair(
    a: str,
    of_a: Mapping[TableKey, AllreduceCost | OverlapCost],
    b: str,
    of_b: Mapping[TableKey, AllreduceCost | OverlapCost],
) -> tuple[list[TimeRatio], list[Unmatched]]:
    ratios: list[TimeRatio] = []
    matched = set()
    for key in of_a:
        if key in of_b:
            of_table = list(_times(a, of_a[key], b, of_b[key], key))
            ratios += of_table
            matched |= {key} if of_table else set()
    unmatched = [Unmatched(machine=a, other=b, key=key) for key in of_a if key not in matched]
    unmatched += [Unmatched(machine=b, other=a, key=key) for key in of_b if key not in matched]
    return ratios, unmatched


def _times(
    a: str, table_a: AllreduceCost | OverlapCost, b: str, table_b: AllreduceCost | OverlapCost, key: TableKey
) -> Iterator[TimeRatio]:
    """Yield the times at all sizes of either table that both cover; a time of 0 has no ratio."""
    low = max(table_a.sizes_bytes[0], table_b.sizes_bytes[0])
    high = min(table_a.sizes_bytes[-1], table_b.sizes_bytes[-1])
    for size in sorted({*table_a.sizes_bytes, *table_b.sizes_bytes}):
        if low <= size <= high:
            time_a, time_b = (float(np.interp(size, each.sizes_bytes, each.time_s)) for each in (table_a, table_b))
            if time_a > 0:
                yield TimeRatio(
                    a=a,
                    b=b,
                    key=key,
                    size_bytes=size,
                    a_time_s=time_a,
                    b_time_s=time_b,
                    ratio=time_b / time_a,
                    interpolated=not (size in table_a.sizes_bytes and size in table_b.sizes_bytes),
                )
