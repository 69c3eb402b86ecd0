"""Bus bandwidth of every allreduce against the size, with the bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from dpsim.records.bench import OWN
from dpsim.records.bench_result import BenchPoint, BenchResult
from dpsim.report.figures.style import INK, LINE_COLOURS, MARKERS, grid, heading, labels_at_right, one_panel_each
from dpsim.units import format_size

_DASHES = ("solid", (0, (5, 2)), (0, (1.5, 1.5)))
_SIMULATED = " (simulator)"
_TITLES = {True: "dpsim's algorithms", False: "compared with the peers"}


def draw(result: BenchResult, *, narrow: bool = False) -> Figure:
    """Return two panels: dpsim's algorithms in place, and its default with the peers. Buffers are rewritten."""

    return one_panel_each(tuple(_TITLES), lambda axis, own: panel(axis, result, own=own), narrow=narrow, height_in=4.2)


def _lines(result: BenchResult, own: bool) -> dict[str, dict[int, BenchPoint]]:
    """Return points by name and size: of dpsim's ``own`` algorithms, or of its default and each peer at its best."""
    lines: dict[str, dict[int, BenchPoint]] = {}
    for point in result.points:
        of_panel = (own or point.default) and point.in_place if point.system == OWN else not own
        if of_panel and not point.cached and point.busbw_bytes_per_s is not None:
            line = lines.setdefault(point.algorithm if own else point.peer, {})
            line[point.size_bytes] = max(line.get(point.size_bytes, point), point, key=_gigabytes_per_s)
    return lines


def _gigabytes_per_s(point: BenchPoint) -> float:
    return (point.busbw_bytes_per_s or 0.0) / 1e9


def panel(axis: Axes, result: BenchResult, *, own: bool) -> None:
    """Draw dpsim's ``own`` algorithms, or its default and the peers, below the bound."""
    n = result.points[0].devices
    bound = [
        (size.size_bytes, (n - 1) / n * size.bound_bytes_per_s / n / 1e9)
        for size in result.sizes
        if size.bound_bytes_per_s is not None
    ]
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    grid(axis)
    if bound:
        axis.plot(*zip(*bound, strict=True), color=INK, linewidth=1.1, dashes=(4, 2.5), zorder=4)
    labels: list[tuple[float, str, str]] = [(bound[-1][1], "the bound", INK)] if bound else []
    for number, (name, line) in enumerate(_lines(result, own).items()):
        values, colour = list(map(_gigabytes_per_s, line.values())), LINE_COLOURS[number % len(LINE_COLOURS)]
        marks: dict[str, Any] = {"marker": MARKERS[number % len(MARKERS)], "markersize": 4}
        axis.plot(list(line), values, color=colour, linewidth=1.4, linestyle=_DASHES[number % len(_DASHES)], **marks)
        labels.append((values[-1], name, colour))
    _label(axis, labels)
    sizes = [size.size_bytes for size in result.sizes]
    shown = sizes[:: max(1, len(sizes) // 6)]
    axis.set_xticks(shown, [format_size(size).replace(" ", "\n") for size in shown], minor=False)
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.tick_params(labelsize=8.5)
    heading(axis, _TITLES[own] + _SIMULATED * result.simulated, "bus bandwidth, GB/s")


def _label(axis: Axes, labels: Sequence[tuple[float, str, str]]) -> None:
    """Label the lines of a logarithmic axis, with positions on a linear axis that is laid over it."""
    twin = axis.twinx()
    twin.set_axis_off()
    twin.set_ylim(0, 1)
    to_axes = axis.transData + axis.transAxes.inverted()
    right = axis.get_xlim()[1]
    places = [(float(to_axes.transform((right, value))[1]), text, colour) for value, text, colour in labels]
    labels_at_right(twin, places, gap=0.055)
