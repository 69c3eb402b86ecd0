"""Machine files beside the first of them: the line of each table, and times at the sizes that two of them cover.

What is compared are plain rows, under the names of ``--json``; each begins with the fields of its ``TableKey``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dpsim.errors import ConfigError
from dpsim.machine import AllreduceCost, Machine, OverlapCost
from dpsim.predict.cost import fitted_line
from dpsim.report.table import Column, Table, table
from dpsim.report.words import milliseconds
from dpsim.units import format_duration, format_size

Cost = AllreduceCost | OverlapCost
Row = dict[str, Any]


class TableKey(NamedTuple):
    """What a table of a machine is of: an allreduce alone (``overlap`` is empty), or during a backward with that."""

    overlap: str
    algorithm: str
    devices: int
    layout: str
    wire_dtype: str

    @property
    def title(self) -> str:
        """``two-shot on 2 devices, float32, during a backward (thread)``."""
        where = f"{self.algorithm} on {self.layout or self.devices} {'device' if self.devices == 1 else 'devices'}"
        return f"{where}, {self.wire_dtype}" + (f", during a backward ({self.overlap})" if self.overlap else "")

    @property
    def fields(self) -> Row:
        """The fields of a row; ``layout`` is never empty."""
        return self._asdict() | {"layout": self.layout or str(self.devices)}


class MachineComparison(NamedTuple):
    """Machines compared with the first of them: rows of a table each, with the key of the table.

    - ``lines``: the line ``alpha_s`` + bytes / ``bandwidth_bytes_per_s`` that is nearest to a machine's table, and the
      sizes that the table covers. The bandwidth is infinite where times do not grow with the size.
    - ``ratios``: one size in the tables of machines ``a`` and ``b``; ``ratio`` = time on ``b`` / time on ``a``.
      ``interpolated``: one of the two does not have this size, and its time lies on the line between its neighbours.
    - ``unmatched``: a table that ``machine`` has and ``other`` has not, or not at a size in common.
    """

    machines: tuple[str, ...]
    lines: list[tuple[TableKey, Row]]
    ratios: list[tuple[TableKey, Row]]
    unmatched: list[tuple[TableKey, Row]]


def compare_machines(machines: Mapping[str, Machine]) -> MachineComparison:
    """Compare machines, by name, with the first of them.

    Raises ``ConfigError`` for fewer than two machines, for an emulated network beside a real one, and where a machine
    has no table of an allreduce in common with the first.
    """
    if len(machines) < 2:
        raise ConfigError(f"{len(machines)} machine file to compare", allowed="two or more machine files")
    first, *others = machines
    tables = {name: _tables(machine) for name, machine in machines.items()}
    ratios, unmatched = list[tuple[TableKey, Row]](), list[tuple[TableKey, Row]]()
    for name in others:
        if machines[first].emulated_network != machines[name].emulated_network:
            emulated, real = (first, name) if machines[first].emulated_network else (name, first)
            raise ConfigError(
                f"the network of {emulated} is emulated and that of {real} is real",
                allowed="machine files of emulated networks, or of real ones",
                remedy="look at each alone with dpsim machine show",
            )
        joined = [
            (key, {"a": first, "b": name} | times)
            for key, cost in tables[first].items()
            if key in tables[name]
            for times in _times(cost, tables[name][key])
        ]
        if not joined:
            raise ConfigError(
                f"{first} and {name} have no allreduce of one algorithm, device count and size in common",
                allowed="machine files with a table of the same allreduce",
                remedy="see what each contains with dpsim machine show",
            )
        ratios += joined
        matched = {key for key, _ in joined}
        for machine, other in ((first, name), (name, first)):
            left_out = (key for key in tables[machine] if key not in matched)
            unmatched += [(key, {"machine": machine, "other": other}) for key in left_out]
    lines = [(key, _line(name, cost)) for name, costs in tables.items() for key, cost in costs.items()]
    return MachineComparison(tuple(machines), sorted(lines, key=lambda line: line[0]), ratios, unmatched)


def _tables(machine: Machine) -> dict[TableKey, Cost]:
    """Return the tables of a machine by what they are of; of two of the same, the first."""
    tables: dict[TableKey, Cost] = {}
    both: tuple[Cost, ...] = (*machine.allreduce, *machine.overlap)
    for cost in both:
        tables.setdefault(TableKey._make(getattr(cost, name, "") for name in TableKey._fields), cost)
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
            Column(head="table", cell=lambda each: each[0].title, left=True),
            Column(head="machine", cell=lambda each: each[1]["machine"], left=True),
            Column(head="not in", cell=lambda each: each[1]["other"], left=True),
        ),
        sections={"": comparison.unmatched},
        note="A table that only one of two machine files has, or that has no size in common with the other's.",
    )
    return (*shown, unmatched)


def _lines_table(comparison: MachineComparison) -> Table:
    def mean(line: tuple[TableKey, Row]) -> str:
        compared = (row["ratio"] for key, row in comparison.ratios if (key, row["b"]) == (line[0], line[1]["machine"]))
        positive = [ratio for ratio in compared if ratio > 0]
        return f"{np.exp(np.mean(np.log(positive))):.2f}" if positive else ""

    def bandwidth(line: tuple[TableKey, Row], *, of_bus: bool) -> str:
        key, row = line
        bytes_per_s = row["bandwidth_bytes_per_s"] * (2 * (key.devices - 1) / key.devices if of_bus else 1.0)
        return "inf" if bytes_per_s == float("inf") else f"{bytes_per_s / 1e9:.3g}"

    return table(
        title="Latency and bandwidth",
        columns=(
            Column(head="machine", cell=lambda line: line[1]["machine"], left=True),
            Column(head="alpha", cell=lambda line: format_duration(line[1]["alpha_s"])),
            Column(head="algorithm GB/s", cell=lambda line: bandwidth(line, of_bus=False)),
            Column(head="bus GB/s", cell=lambda line: bandwidth(line, of_bus=True)),
            Column(head="from", cell=lambda line: format_size(line[1]["smallest_bytes"]), dispensable=2),
            Column(head="to", cell=lambda line: format_size(line[1]["largest_bytes"]), dispensable=2),
            Column(head="mean ratio", cell=mean),
        ),
        sections={
            key.title: [line for line in comparison.lines if line[0] == key]
            for key in dict.fromkeys(key for key, _ in comparison.lines)
        },
        note="The line alpha + bytes / bandwidth that is nearest to each table, by relative error: the algorithm's "
        "bandwidth; times 2 (n - 1) / n it is the bus's, which a link's rate bounds. Mean ratio: the "
        f"geometric mean of the times over those of {comparison.machines[0]}, at the sizes that both tables cover.",
    )


def _times_table(comparison: MachineComparison) -> Table:
    first, *others = comparison.machines
    by_size: dict[tuple[TableKey, int], list[Row]] = {}
    for key, ratio in comparison.ratios:
        by_size.setdefault((key, ratio["size_bytes"]), []).append(ratio)
    rows = sorted(by_size.items(), key=lambda item: item[0])
    return table(
        title="Times",
        columns=(
            Column(head="size", cell=lambda row: format_size(row[0][1])),
            Column(head=f"{first} us", cell=lambda row: milliseconds(row[1][0]["a_time_s"] * 1e3)),
            *(column for name in others for column in _machine_columns(name)),
        ),
        sections={
            key.title: [row for row in rows if row[0][0] == key] for key in dict.fromkeys(row[0][0] for row in rows)
        },
        note=f"Ratio = time / time on {first}; ~ marks a ratio of which one time is interpolated between two sizes.",
    )


def _machine_columns(name: str) -> Sequence[Column[tuple[tuple[TableKey, int], list[Row]]]]:
    def of_machine(rows: list[Row], text: str) -> str:
        for row in rows:
            if row["b"] == name:
                ratio = f"{'~' * row['interpolated']}{row['ratio']:.2f}"
                return ratio if text == "ratio" else milliseconds(row["b_time_s"] * 1e3)
        return ""

    return (
        Column(head=f"{name} us", cell=lambda row: of_machine(row[1], "time")),
        Column(head="ratio", cell=lambda row: of_machine(row[1], "ratio")),
    )
