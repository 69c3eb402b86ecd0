"""Machine files beside the first of them: the line of each table, and times at the sizes that two of them cover.

What is compared are plain rows, under the names of ``--json``; each begins with what its table is of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dpsim.collective import Collective
from dpsim.errors import ConfigError
from dpsim.grouping import grouped
from dpsim.machine import AllreduceCost, Machine, OverlapCost
from dpsim.model.curve import fitted_line
from dpsim.report.table import Column, Table, table
from dpsim.report.words import milliseconds
from dpsim.units import format_duration, format_size

Cost = AllreduceCost | OverlapCost
Row = dict[str, Any]


_KEY = ("overlap", *(name for name in Collective.__struct_fields__ if name != "kind"))
"""What a table of a machine is of: an allreduce alone (``overlap`` is empty), or during a backward with that."""
Key = tuple[Any, ...]


def _title(row: Row) -> str:
    """``two-shot on 2 devices, float32, during a backward (thread)``."""
    where = f"{row['algorithm']} on {row['layout']} {'device' if row['devices'] == 1 else 'devices'}"
    return f"{where}, {row['wire_dtype']}" + (f", during a backward ({row['overlap']})" if row["overlap"] else "")


def _key(row: Row) -> Key:
    return tuple(row[name] for name in _KEY)


class MachineComparison(NamedTuple):
    """Machines compared with the first of them: rows of a table each.

    - ``lines``: the line ``alpha_s`` + bytes / ``bandwidth_bytes_per_s`` that is nearest to a machine's table, and the
      sizes that the table covers. The bandwidth is infinite where times do not grow with the size.
    - ``ratios``: one size in the tables of machines ``a`` and ``b``; ``ratio`` = time on ``b`` / time on ``a``.
      ``interpolated``: one of the two does not have this size, and its time lies on the line between its neighbours.
    - ``unmatched``: a table that ``machine`` has and ``other`` has not, or not at a size in common.
    """

    machines: tuple[str, ...]
    lines: list[Row]
    ratios: list[Row]
    unmatched: list[Row]


def compare_machines(machines: Mapping[str, Machine]) -> MachineComparison:
    """Compare machines, by name, with the first of them.

    Raises ``ConfigError`` for fewer than two machines, for an emulated network beside a real one, and where a machine
    has no table of an allreduce in common with the first.
    """
    if len(machines) < 2:
        raise ConfigError(f"{len(machines)} machine file to compare", allowed="two or more machine files")
    first, *others = machines
    tables = {name: _tables(machine) for name, machine in machines.items()}
    ratios, unmatched = list[Row](), list[Row]()
    for name in others:
        if machines[first].emulated_network != machines[name].emulated_network:
            emulated, real = (first, name) if machines[first].emulated_network else (name, first)
            raise ConfigError(
                f"the network of {emulated} is emulated and that of {real} is real",
                allowed="machine files of emulated networks, or of real ones",
                remedy="look at each alone with dpsim calibrate --show",
            )
        joined = [
            dict(zip(_KEY, key, strict=True)) | {"a": first, "b": name} | times
            for key, cost in tables[first].items()
            if key in tables[name]
            for times in _times(cost, tables[name][key])
        ]
        if not joined:
            raise ConfigError(
                f"{first} and {name} have no allreduce of one algorithm, device count and size in common",
                allowed="machine files with a table of the same allreduce",
                remedy="see what each contains with dpsim calibrate --show",
            )
        ratios += joined
        matched = set(map(_key, joined))
        for machine, other in ((first, name), (name, first)):
            left_out = (dict(zip(_KEY, key, strict=True)) for key in tables[machine] if key not in matched)
            unmatched += [table_of | {"machine": machine, "other": other} for table_of in left_out]
    lines = [
        dict(zip(_KEY, key, strict=True)) | _line(name, cost)
        for name, costs in tables.items()
        for key, cost in costs.items()
    ]
    return MachineComparison(tuple(machines), sorted(lines, key=_key), ratios, unmatched)


def _tables(machine: Machine) -> dict[Key, Cost]:
    """Return the tables of a machine by what they are of; of two of the same, the first."""
    tables: dict[Key, Cost] = {}
    both: tuple[Cost, ...] = (*machine.allreduce, *machine.overlap)
    for cost in both:
        fields = {name: getattr(cost, name, "") for name in _KEY}
        tables.setdefault(_key(fields | {"layout": cost.layout or str(cost.devices)}), cost)
    return tables


def _line(machine: str, cost: Cost) -> Row:
    alpha_s, beta = fitted_line(np.array(cost.sizes_bytes, np.float64), np.array(cost.time_s))
    return {
        "machine": machine,
        "alpha_s": alpha_s,
        "bandwidth_bytes_per_s": 1 / beta if beta > 0 else float("inf"),
        "smallest_bytes": cost.sizes_bytes[0],
        "largest_bytes": cost.sizes_bytes[-1],
    }


def _times(a: Cost, b: Cost) -> Iterator[Row]:
    """Yield the times at all sizes of either table that both cover; a time of 0 has no ratio."""
    low, high = max(a.sizes_bytes[0], b.sizes_bytes[0]), min(a.sizes_bytes[-1], b.sizes_bytes[-1])
    for size in sorted({*a.sizes_bytes, *b.sizes_bytes}):
        time_a, time_b = (float(np.interp(size, each.sizes_bytes, each.time_s)) for each in (a, b))
        if low <= size <= high and time_a > 0:
            interpolated = not (size in a.sizes_bytes and size in b.sizes_bytes)
            times = {"a_time_s": time_a, "b_time_s": time_b, "ratio": time_b / time_a}
            yield {"size_bytes": size, **times, "interpolated": interpolated}


def tables(comparison: MachineComparison) -> tuple[Table, ...]:
    """Return the lines of all tables, the times at the sizes in common, and the tables without a counterpart."""
    shown = (_lines_table(comparison), _times_table(comparison))
    if not comparison.unmatched:
        return shown
    unmatched = table(
        title="Without a counterpart",
        columns=(
            Column(head="table", cell=_title, left=True),
            Column(head="machine", cell=lambda each: each["machine"], left=True),
            Column(head="not in", cell=lambda each: each["other"], left=True),
        ),
        sections={"": comparison.unmatched},
        note="A table that only one of two machine files has, or that has no size in common with the other's.",
    )
    return (*shown, unmatched)


def _lines_table(comparison: MachineComparison) -> Table:
    def mean(line: Row) -> str:
        compared = (row["ratio"] for row in comparison.ratios if (_key(row), row["b"]) == (_key(line), line["machine"]))
        positive = [ratio for ratio in compared if ratio > 0]
        return f"{np.exp(np.mean(np.log(positive))):.2f}" if positive else ""

    def bandwidth(row: Row, *, of_bus: bool) -> str:
        bytes_per_s = row["bandwidth_bytes_per_s"] * (2 * (row["devices"] - 1) / row["devices"] if of_bus else 1.0)
        return "inf" if bytes_per_s == float("inf") else f"{bytes_per_s / 1e9:.3g}"

    return table(
        title="Latency and bandwidth",
        columns=(
            Column(head="machine", cell=lambda line: line["machine"], left=True),
            Column(head="alpha", cell=lambda line: format_duration(line["alpha_s"])),
            Column(head="algorithm GB/s", cell=lambda line: bandwidth(line, of_bus=False)),
            Column(head="bus GB/s", cell=lambda line: bandwidth(line, of_bus=True)),
            Column(head="from", cell=lambda line: format_size(line["smallest_bytes"]), dispensable=2),
            Column(head="to", cell=lambda line: format_size(line["largest_bytes"]), dispensable=2),
            Column(head="mean ratio", cell=mean),
        ),
        sections=grouped(comparison.lines, _title),
        note="The line alpha + bytes / bandwidth that is nearest to each table, by relative error: the algorithm's "
        "bandwidth; times 2 (n - 1) / n it is the bus's, which a link's rate bounds. Mean ratio: the "
        f"geometric mean of the times over those of {comparison.machines[0]}, at the sizes that both tables cover.",
    )


def _times_table(comparison: MachineComparison) -> Table:
    first, *others = comparison.machines
    by_size: dict[tuple[Key, int], Row] = {}
    for ratio in comparison.ratios:
        row = by_size.setdefault((_key(ratio), ratio["size_bytes"]), ratio | {"of": {}})
        row["of"][ratio["b"]] = ratio
    return table(
        title="Times",
        columns=(
            Column(head="size", cell=lambda row: format_size(row["size_bytes"])),
            Column(head=f"{first} us", cell=lambda row: milliseconds(row["a_time_s"] * 1e3)),
            *(column for name in others for column in _machine_columns(name)),
        ),
        sections=grouped((row for _, row in sorted(by_size.items(), key=lambda item: item[0])), _title),
        note=f"Ratio = time / time on {first}; ~ marks a ratio of which one time is interpolated between two sizes.",
    )


def _machine_columns(name: str) -> Sequence[Column[Row]]:
    def time(row: Row) -> str:
        return milliseconds(row["of"][name]["b_time_s"] * 1e3) if name in row["of"] else ""

    def ratio(row: Row) -> str:
        of = row["of"].get(name)
        return f"{'~' * of['interpolated']}{of['ratio']:.2f}" if of else ""

    return Column(head=f"{name} us", cell=time), Column(head="ratio", cell=ratio)
