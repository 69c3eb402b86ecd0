"""The ratios of compared runs: one row for each setting, sorted, with intervals and the noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dpsim.records.run_comparison import RatioPoint, RunComparison
from dpsim.report.compare.tables import furthest, group_name, setting_name, varying_fields
from dpsim.report.figures.style import FAINT, INK, LINE_COLOURS, MARKERS, MUTED, PAPER, RULE, heading, panels, styled

MOST_ROWS = 40
_LINEAR_SPAN, _MOST_TICKS = 2.0, 9


def draw(comparison: RunComparison, *, narrow: bool = False) -> Figure:
    """Return one panel with a row for each setting, and a marker in it for each run beside the first."""

    def make() -> Figure:
        shown = sorted(furthest(comparison, MOST_ROWS)[0], key=lambda row: row[0].ratio)
        labels = [run.label for run in comparison.runs[1:]]
        row_in = (0.42 if narrow else 0.24) + 0.09 * (len(labels) - 1)
        figure, (axis,) = panels(1, narrow=narrow, height_in=1.25 + row_in * len(shown), columns=1)
        axis.set_xscale("log")
        _rows(axis, shown, labels, narrow=narrow)
        _names(axis, comparison, shown, narrow=narrow)
        _ticks(axis, [point for row in shown for point in row])
        axis.axvline(1.0, color=INK, linewidth=1.0, zorder=2)
        first = comparison.runs[0].label
        names = f"{labels[0]} against {first}" if len(labels) == 1 else f"against {first}"
        heading(axis, names, f"time of one {comparison.quantity} / that in {first}")
        if len(labels) > 1:
            _legend(axis, labels)
        return figure

    return styled(make)


def _rows(axis: Axes, shown: Sequence[Sequence[RatioPoint]], labels: Sequence[str], *, narrow: bool) -> None:
    """Draw the noise of each row as a band, and each ratio as a marker with its interval."""
    spread = 0.5 if len(labels) > 1 else 0.0
    lower = 0.22 if narrow else 0.0
    for number, row in enumerate(shown):
        noise = max((point.noise or 0.0 for point in row), default=0.0)
        if noise:
            axis.fill_betweenx([number - 0.4, number + 0.4], 1 / (1 + noise), 1 + noise, color=RULE, linewidth=0)
        for point in row:
            run = labels.index(point.b)
            offset = spread * (run / max(1, len(labels) - 1) - 0.5)
            y = number + lower + offset * (0.5 if narrow else 1.0)
            style = _style(run)
            axis.plot([point.ratio_low, point.ratio_high], [y, y], color=style["color"], linewidth=1.5, zorder=3)
            filled = style["color"] if point.verdict != "not_distinguishable" else PAPER
            axis.plot([point.ratio], [y], **style, markerfacecolor=filled, zorder=4)
    axis.set_ylim(len(shown) - 0.4, -0.6)


def _names(axis: Axes, comparison: RunComparison, shown: Sequence[Sequence[RatioPoint]], *, narrow: bool) -> None:
    """Name the rows: to the left of the panel, or in a narrow figure above the markers."""
    fields = varying_fields(point.setting for point in comparison.points)
    names = [
        setting_name(row[0].setting, [name for name in fields if name != "network"])
        + (f", {group_name(comparison.points, row[0].group)}" if "network" in fields else "")
        for row in shown
    ]
    if not narrow:
        axis.set_yticks(range(len(shown)), names, fontsize=8.5)
        return
    axis.set_yticks([])
    for number, name in enumerate(names):
        axis.text(
            0, number - 0.08, name, transform=axis.get_yaxis_transform(), fontsize=7, color=MUTED, va="bottom", zorder=5
        )


def _ticks(axis: Axes, points: Sequence[RatioPoint]) -> None:
    low = min(1.0, *(point.ratio_low for point in points))
    high = max(1.0, *(point.ratio_high for point in points))
    margin = max(0.03, 0.04 * math.log(high / low))
    low, high = low * math.exp(-margin), high * math.exp(margin)
    axis.set_xlim(low, high)
    axis.set_xticks(_round_values(low, high))
    axis.minorticks_off()
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axis.tick_params(labelsize=8.5)
    axis.grid(axis="x", color=RULE, linewidth=0.6)
    axis.set_axisbelow(True)


def _round_values(low: float, high: float) -> list[float]:
    """Return at most nine round numbers between the ends of a logarithmic axis."""
    if high / low < _LINEAR_SPAN:
        return [float(tick) for tick in MaxNLocator(7).tick_values(low, high) if low <= tick <= high]
    powers = [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    for digits in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1,)):
        values = [digit * power for power in powers for digit in digits if low <= digit * power <= high]
        if len(values) <= _MOST_TICKS:
            return values
    return values[:: 1 + len(values) // _MOST_TICKS]


def _style(run: int) -> dict[str, Any]:
    return {
        "color": LINE_COLOURS[run % len(LINE_COLOURS)],
        "marker": MARKERS[run % len(MARKERS)],
        "markersize": 5,
    }


def _legend(axis: Axes, labels: Sequence[str]) -> None:
    handles = [Line2D([], [], **_style(run), label=label) for run, label in enumerate(labels)]
    axis.legend(handles=handles, frameon=False, fontsize=8.5, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=3)
    axis.spines["bottom"].set_color(FAINT)
