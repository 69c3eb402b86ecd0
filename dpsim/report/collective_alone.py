"""The table, the records and the chart of collectives that are priced alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpsim.grouping import grouped
from dpsim.model.alone import Alone
from dpsim.report.charts import Chart, Lines, Series
from dpsim.report.table import Column
from dpsim.units import format_duration, format_size


def columns() -> tuple[Column[Alone], ...]:
    """Return the columns of the table."""
    return (
        Column(head="collective", cell=lambda row: row.collective.kind, left=True),
        Column(head="devices", cell=_devices),
        Column(head="algorithm", cell=lambda row: row.collective.algorithm, left=True),
        Column(head="size", cell=lambda row: format_size(row.size_bytes)),
        Column(head="time", cell=lambda row: format_duration(row.seconds)),
        Column(
            head="assumed interval", cell=lambda row: f"{format_duration(row.low_s)} to {format_duration(row.high_s)}"
        ),
        Column(head="algbw", cell=lambda row: f"{row.algbw_bytes_per_s / 1e9:.3g} GB/s"),
        Column(head="busbw", cell=lambda row: f"{row.busbw_bytes_per_s / 1e9:.3g} GB/s"),
        Column(head="rests on", cell=lambda row: row.rests_on, left=True),
        Column(head="", cell=lambda row: "extrapolated" if row.extrapolated else "", left=True),
    )


def record(row: Alone) -> dict[str, Any]:
    """Return what ``--json`` says of a collective."""
    return {
        "collective": row.collective.kind,
        "devices": row.collective.devices,
        "layout": str(row.collective.layout or row.collective.devices),
        "algorithm": row.collective.algorithm,
        "size_bytes": row.size_bytes,
        "predicted_s": row.seconds,
        "predicted_low_s": row.low_s,
        "predicted_high_s": row.high_s,
        "algbw_bytes_per_s": row.algbw_bytes_per_s,
        "busbw_bytes_per_s": row.busbw_bytes_per_s,
        "rests_on": row.rests_on,
        "extrapolated": row.extrapolated,
    }


def collectives_chart(rows: Sequence[Alone]) -> Chart:
    """Return the time against the size, a line for each collective, number of devices and algorithm."""
    lines = grouped(rows, lambda row: f"{row.collective.kind}, {_devices(row)}, {row.collective.algorithm}")
    panel = Lines(
        title="A collective alone",
        subtitle="predicted, with its interval",
        x_label="bytes of the whole array",
        series=[
            Series(
                name=name,
                x=[row.size_bytes for row in of_line],
                y=[row.seconds for row in of_line],
                low=[row.low_s for row in of_line],
                high=[row.high_s for row in of_line],
                look=number,
            )
            for number, (name, of_line) in enumerate(lines.items())
        ],
        x_text=lambda size: format_size(round(size)),
        y_text=format_duration,
        log_x=True,
        log_y=True,
    )
    return Chart(panels=[panel], height_in=4.4, columns=1)


def _devices(row: Alone) -> str:
    return str(row.collective.layout or row.collective.devices)
