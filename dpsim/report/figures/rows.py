"""Draws a row of dots for each name."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dpsim.report.charts import Dot, Rows
from dpsim.report.figures.lines import LOOKS
from dpsim.report.figures.style import (
    INK,
    LINE_COLOURS,
    MARKERS,
    PAPER,
    RULE,
    grid,
    heading,
    long_names,
    row_names,
    wrapped,
)

_SPREAD = 0.28
_LINEAR_SPAN, _MOST_TICKS = 2.0, 9


def draw(axis: Axes, shown: Rows, *, narrow: bool = False) -> None:
    """Draw a panel, the first row at the top."""
    if shown.log:
        axis.set_xscale("log")
    above = long_names(axis, list(shown.rows))
    for number, dots in enumerate(shown.rows.values()):
        if (band := shown.bands[number] if shown.bands else None) is not None:
            axis.fill_betweenx([number - 0.4, number + 0.4], *band, color=RULE, linewidth=0)
        gaps = max(1, len(dots) - 1)
        for place, dot in enumerate(dots):
            _dot(axis, dot, number + _SPREAD * (place / gaps - 0.5 * (len(dots) > 1)) + 0.22 * above)
    row_names(axis, list(shown.rows))
    axis.set_ylim(len(shown.rows) - 0.4, -0.6)
    if shown.log:
        _ratio_ticks(axis, [dot for dots in shown.rows.values() for dot in dots])
        axis.axvline(1.0, color=INK, linewidth=1.0, zorder=2)
    else:
        axis.set_xlim(left=0)
        axis.xaxis.set_major_locator(MaxNLocator(4))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    grid(axis, "x")
    axis.set_xlabel(wrapped(shown.x_label, axis))
    heading(axis, shown.title, shown.subtitle)
    if len(shown.legend) > 1:
        handles = [Line2D([], [], **_look(run), label=label) for run, label in enumerate(shown.legend)]
        below = (0.5, -0.02)
        axis.legend(handles=handles, loc="upper center", bbox_to_anchor=below, ncols=3)


def _look(number: int) -> dict[str, Any]:
    return {"color": LINE_COLOURS[number % len(LINE_COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


def _dot(axis: Axes, dot: Dot, y: float) -> None:
    look = _look(dot.look) if isinstance(dot.look, int) else {"color": LOOKS[dot.look]["color"], "marker": "o"}
    if dot.look == "predicted":
        axis.plot([dot.low, dot.high], [y, y], color=look["color"], linewidth=5, alpha=0.25, solid_capstyle="butt")
        look["marker"] = "D"
    else:
        axis.plot([dot.low, dot.high], [y, y], color=look["color"], linewidth=1.6, zorder=3)
    face = PAPER if dot.faint or dot.look == "predicted" else look["color"]
    axis.plot([dot.value], [y], **look, markersize=5.5, markerfacecolor=face, markeredgewidth=1.5, zorder=4)


def _ratio_ticks(axis: Axes, dots: list[Dot]) -> None:
    low, high = min(1.0, *(dot.low for dot in dots)), max(1.0, *(dot.high for dot in dots))
    margin = max(0.03, 0.04 * math.log(high / low))
    low, high = low * math.exp(-margin), high * math.exp(margin)
    axis.set_xlim(low, high)
    axis.set_xticks(_round_values(low, high))
    axis.minorticks_off()
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))


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
