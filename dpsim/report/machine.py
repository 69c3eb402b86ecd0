"""The chart of machines: the allreduce times in the tables of one or several, against the size."""

from __future__ import annotations

from collections.abc import Mapping

from dpsim.machine import AllreduceCost, Machine
from dpsim.report.charts import Chart, Lines, Series
from dpsim.units import format_duration, format_size

_MOST_TICKS = 7


def machines_chart(machines: Mapping[str, Machine]) -> Chart:
    """Return one panel with a line for each table, named by algorithm and devices (and machine, if several)."""
    tables = [(name, table) for name, machine in machines.items() for table in machine.allreduce]
    sizes = sorted({size for _, table in tables for size in table.sizes_bytes})
    panel = Lines(
        title="",
        subtitle="time of one allreduce",
        x_label="size",
        series=[
            Series(
                name=f"{name}: {_text(table)}" if len(machines) > 1 else _text(table),
                x=table.sizes_bytes,
                y=table.time_s,
                look=number,
            )
            for number, (name, table) in enumerate(tables)
        ],
        x_ticks={float(size): format_size(size) for size in sizes[:: max(1, len(sizes) // _MOST_TICKS)]},
        y_text=format_duration,
        log_x=True,
        log_y=True,
        names="legend",
    )
    return Chart(panels=[panel], height_in=4.6, columns=1)


def _text(table: AllreduceCost) -> str:
    """Return the name of a table, such as ``ring on 2x4`` or ``direct on 2, float16``."""
    dtype = "" if table.wire_dtype == "float32" else f", {table.wire_dtype}"
    return f"{table.algorithm} on {table.layout or table.devices}{dtype}"
