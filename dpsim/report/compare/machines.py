"""The tables of compared machine files, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpsim.records.run_comparison import MachineComparison, TableKey, TableLine, TimeRatio
from dpsim.report.table import Column, Table, table
from dpsim.report.words import milliseconds
from dpsim.units import format_duration, format_size

Times = tuple[TableKey, int, Sequence[TimeRatio]]


def tables(comparison: MachineComparison) -> tuple[Table, ...]:
    """Return the lines of all tables, the times at the sizes in common, and the tables without a counterpart."""
    shown = (_lines_table(comparison), _times_table(comparison))
    if not comparison.unmatched:
        return shown
    unmatched = table(
        title="Without a counterpart",
        columns=(
            Column(head="table", cell=lambda each: _title(each.key), left=True),
            Column(head="machine", cell=lambda each: each.machine, left=True),
            Column(head="not in", cell=lambda each: each.other, left=True),
        ),
        sections={"": comparison.unmatched},
        note="A table that only one of two machine files has, or that has no size in common with the other's.",
    )
    return (*shown, unmatched)


def _title(key: TableKey) -> str:
    """Return ``two-shot on 2 devices, float32, during a backward (thread)``."""
    where = f"{key.algorithm} on {key.layout or key.devices} {'device' if key.devices == 1 else 'devices'}"
    return f"{where}, {key.wire_dtype}" + (f", during a backward ({key.overlap})" if key.overlap else "")


def _lines_table(comparison: MachineComparison) -> Table:
    def mean(line: TableLine) -> str:
        ratios = [each.ratio for each in comparison.ratios if (each.b, each.key) == (line.machine, line.key)]
        positive = [ratio for ratio in ratios if ratio > 0]
        return f"{np.exp(np.mean(np.log(positive))):.2f}" if positive else ""

    def bandwidth(line: TableLine, moved: float) -> str:
        bytes_per_s = moved * line.bandwidth_bytes_per_s
        return "inf" if bytes_per_s == float("inf") else f"{bytes_per_s / 1e9:.3g}"

    keys = sorted({line.key for line in comparison.lines})
    return table(
        title="Latency and bandwidth",
        columns=(
            Column(head="machine", cell=lambda line: line.machine, left=True),
            Column(head="alpha", cell=lambda line: format_duration(line.alpha_s)),
            Column(head="algorithm GB/s", cell=lambda line: bandwidth(line, 1.0)),
            Column(head="bus GB/s", cell=lambda line: bandwidth(line, 2 * (line.devices - 1) / line.devices)),
            Column(head="from", cell=lambda line: format_size(line.smallest_bytes), dispensable=2),
            Column(head="to", cell=lambda line: format_size(line.largest_bytes), dispensable=2),
            Column(head="mean ratio", cell=mean),
        ),
        sections={_title(key): [line for line in comparison.lines if line.key == key] for key in keys},
        note="The line alpha + bytes / bandwidth that is nearest to each table, by relative error: the algorithm's "
        "bandwidth; times 2 (n - 1) / n it is the bus's, which a link's rate bounds. Mean ratio: the "
        f"geometric mean of the times over those of {comparison.machines[0]}, at the sizes that both tables cover.",
    )


def _times_table(comparison: MachineComparison) -> Table:
    first, *others = comparison.machines
    by_size: dict[tuple[TableKey, int], list[TimeRatio]] = {}
    for ratio in comparison.ratios:
        by_size.setdefault((ratio.key, ratio.size_bytes), []).append(ratio)
    rows: list[Times] = [(key, size, ratios) for (key, size), ratios in sorted(by_size.items())]
    return table(
        title="Times",
        columns=(
            Column(head="size", cell=lambda row: format_size(row[1])),
            Column(head=f"{first} us", cell=lambda row: _microseconds(row[2][0].a_time_s)),
            *(column for name in others for column in _machine_columns(name)),
        ),
        sections={_title(key): [row for row in rows if row[0] == key] for key in dict.fromkeys(row[0] for row in rows)},
        note=f"Ratio = time / time on {first}; ~ marks a ratio of which one time is interpolated between two sizes.",
    )


def _machine_columns(name: str) -> tuple[Column[Times], Column[Times]]:
    def time(row: Times) -> str:
        return next((_microseconds(each.b_time_s) for each in row[2] if each.b == name), "")

    def ratio(row: Times) -> str:
        return next((f"{'~' * each.interpolated}{each.ratio:.2f}" for each in row[2] if each.b == name), "")

    return Column(head=f"{name} us", cell=time), Column(head="ratio", cell=ratio)


def _microseconds(seconds: float) -> str:
    return milliseconds(seconds * 1e3)
