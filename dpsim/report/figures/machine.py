"""The allreduce times in the tables of one or several machines, against the size."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from dpsim.machine import AllreduceCost, Machine
from dpsim.report.figures.style import LINE_COLOURS, MARKERS, MUTED, RULE, panels, styled
from dpsim.units import format_duration, format_size

_DASHES = ("solid", "dashed", "dotted", "dashdot")


def draw(machines: Mapping[str, Machine]) -> Figure:
    """Return one panel with a line for each table, named by algorithm and devices (and machine, if several).

    Tables of the same allreduce have one marker; several machines differ in their dashes.
    """

    def make() -> Figure:
        figure, (axis,) = panels(1, narrow=False, height_in=4.6, columns=1)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.grid(axis="y", color=RULE, linewidth=0.6)
        lines = [(name, table) for name, machine in machines.items() for table in machine.allreduce]
        texts = list(dict.fromkeys(_text(table) for _, table in lines))
        names = list(machines)
        for line, (name, table) in enumerate(lines):
            number = texts.index(_text(table))
            dashes = names.index(name) if len(names) > 1 else line // len(LINE_COLOURS)
            axis.plot(
                table.sizes_bytes,
                table.time_s,
                label=f"{name}: {_text(table)}" if len(names) > 1 else _text(table),
                color=LINE_COLOURS[line % len(LINE_COLOURS)],
                marker=MARKERS[number % len(MARKERS)],
                markersize=4,
                linewidth=1.4,
                linestyle=_DASHES[dashes % len(_DASHES)],
            )
        axis.minorticks_off()
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_size(value)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_duration(value)))
        axis.set_xlabel("size", fontsize=8.5)
        axis.text(0, 1.02, "time of one allreduce", transform=axis.transAxes, color=MUTED, fontsize=8.5, va="bottom")
        axis.legend(frameon=False, fontsize=8.5, loc="upper left")
        return figure

    return styled(make)


def _text(table: AllreduceCost) -> str:
    """Return the name of a table, such as ``ring on 2x4`` or ``direct on 2, float16``."""
    dtype = "" if table.wire_dtype == "float32" else f", {table.wire_dtype}"
    return f"{table.algorithm} on {table.layout or table.devices}{dtype}"
