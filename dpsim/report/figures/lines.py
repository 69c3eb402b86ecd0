"""Draws series over one horizontal axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from dpsim.report.charts import Lines, Look, Mark, Series
from dpsim.report.figures.style import (
    FAINT,
    INK,
    LINE_COLOURS,
    MARKERS,
    MEASURED,
    MUTED,
    PAPER,
    PREDICTED,
    grid,
    heading,
    labels_at_right,
    wrapped,
)

_DASHED = (4, 2.5)
_PER_DECADE = ((1.5, (1, 2, 5)), (3.0, (1, 3)), (np.inf, (1,)))
"""The ticks of a decade, on an axis that has fewer decades than the number before them."""
_STEPS = (1, 2, 2.5, 5, 10)
_DASHES = ("solid", "dashed", "dotted", "dashdot")
LOOKS: dict[Look, dict[str, Any]] = {
    "measured": {"color": MEASURED, "linestyle": "none", "marker": "o", "markersize": 5, "zorder": 5},
    "held out": {
        "color": MEASURED,
        "linestyle": "none",
        "marker": "o",
        "markersize": 5.5,
        "markerfacecolor": PAPER,
        "zorder": 5,
    },
    "predicted": {"color": PREDICTED, "linewidth": 1.8, "zorder": 3},
    "baseline": {"color": FAINT, "linewidth": 0.9, "dashes": _DASHED, "zorder": 1},
    "ideal": {"color": INK, "linewidth": 1.0, "dashes": _DASHED, "zorder": 1},
    "own": {"color": INK, "linewidth": 1.1, "marker": "s", "markersize": 4.5, "alpha": 0.7, "zorder": 3},
}
_BEST: dict[Look, dict[str, Any]] = {
    "measured": {
        "marker": "*",
        "markersize": 14,
        "markerfacecolor": MEASURED,
        "markeredgecolor": PAPER,
        "markeredgewidth": 0.8,
        "zorder": 6,
    },
    "predicted": {
        "marker": "D",
        "markersize": 10,
        "markerfacecolor": PAPER,
        "markeredgecolor": PREDICTED,
        "markeredgewidth": 1.6,
        "zorder": 4,
    },
}


def look_of(series: Series) -> dict[str, Any]:
    """Return how matplotlib draws a series."""
    if isinstance(series.look, str):
        look = LOOKS[series.look]
        dots = {name: value for name, value in look.items() if name != "dashes"}
        return {**dots, "linestyle": "none", "marker": "o", "markersize": 4} if series.dots else look
    look = {
        "color": LINE_COLOURS[series.look % len(LINE_COLOURS)],
        "marker": MARKERS[series.look % len(MARKERS)],
        "markersize": 4,
        "zorder": 3,
    }
    if series.dots:
        return look | {"linestyle": "none", "markeredgewidth": 0, "alpha": 0.55}
    return look | {"linewidth": 1.4, "linestyle": _DASHES[series.look // len(LINE_COLOURS) % len(_DASHES)]}


def draw(axis: Axes, lines: Lines, *, narrow: bool = False) -> None:
    """Draw a panel."""
    if lines.log_x:
        axis.set_xscale("log")
    if lines.log_y:
        axis.set_yscale("log")
    grid(axis)
    for series in lines.series:
        _series(axis, series)
    for x, look in lines.verticals:
        axis.axvline(
            x, color=LOOKS[look]["color"], linewidth=0.9, alpha=0.6, linestyle=":" if look == "predicted" else "-"
        )
    if lines.x_span:
        axis.set_xlim(*lines.x_span)
    if lines.y_span:
        axis.set_ylim(*lines.y_span)
    _ticks(axis, "x", lines.x_ticks, lines.x_text, log=lines.log_x)
    _ticks(axis, "y", lines.y_ticks, lines.y_text, log=lines.log_y)
    axis.set_xlabel(wrapped(lines.x_label, axis))
    heading(axis, lines.title, lines.subtitle)
    for mark in lines.marks:
        _mark(axis, mark, [value for each in lines.series for value in (*each.y, *each.low)])
    named = [series for series in lines.series if series.name and len(series.y)]
    if lines.names == "right":
        labels_at_right(axis, [(series.y[-1], series.name, _label_colour(series)) for series in named])
    elif lines.names == "legend" and named:
        axis.legend(loc="best")


def _label_colour(series: Series) -> str:
    return MUTED if series.look == "baseline" else str(look_of(series)["color"])


def _series(axis: Axes, series: Series) -> None:
    look = look_of(series)
    if len(series.low):
        low, high = np.minimum(series.low, series.y), np.maximum(series.high, series.y)
        if look.get("linestyle", "") == "none" or isinstance(series.look, int):
            errors = [np.asarray(series.y) - low, high - np.asarray(series.y)]
            width = 0.8 if series.dots else 1.6
            alpha, order = look.get("alpha"), look["zorder"]
            axis.errorbar(
                series.x,
                series.y,
                yerr=errors,
                fmt="none",
                ecolor=look["color"],
                elinewidth=width,
                alpha=alpha,
                zorder=order,
            )
        else:
            axis.fill_between(series.x, low, high, color=look["color"], alpha=0.16, linewidth=0, zorder=2)
    axis.plot(series.x, series.y, label=series.name or None, **look)


def _ticks(
    axis: Axes,
    name: Literal["x", "y"],
    ticks: Mapping[float, str] | None,
    text: Callable[[float], str],
    *,
    log: bool,
) -> None:
    """Label the given positions, or round numbers."""
    scale = axis.xaxis if name == "x" else axis.yaxis
    if ticks is not None:
        (axis.set_xticks if name == "x" else axis.set_yticks)(list(ticks), list(ticks.values()), minor=False)
    else:
        decades = float(np.log10(np.divide(*scale.get_view_interval()[::-1]))) if log else 0.0
        subs = next(values for most, values in _PER_DECADE if decades < most)
        scale.set_major_locator(LogLocator(subs=subs, numticks=9) if log else MaxNLocator(5, steps=_STEPS))
        scale.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    scale.set_minor_locator(NullLocator())


def _mark(axis: Axes, mark: Mark, drawn: list[float]) -> None:
    """Draw a point that stands out, and write its label in the free height below or above, with a line to it."""
    axis.plot([mark.x], [mark.y], **_BEST[mark.look])
    if not mark.label:
        return
    top, (first, last) = axis.get_ylim()[1], axis.get_xlim()
    below = min(drawn) - 0.05 * top
    height = below if mark.below and below > 0 else 0.95 * top
    across = (mark.x - first) / (last - first)
    side, foot = next((side, foot) for side, foot, most in _SIDES if across < most)
    colour = LOOKS[mark.look]["color"] if " and " not in mark.text else INK
    arrow = {
        "arrowstyle": "-",
        "color": colour,
        "linewidth": 0.9,
        "shrinkA": 1.0,
        "shrinkB": 6.0,
        "relpos": (foot, 0.5),
    }
    axis.annotate(
        mark.text,
        (mark.x, mark.y),
        xytext=(mark.x, height),
        color=colour,
        ha=side,
        va="center",
        zorder=7,
        arrowprops=arrow,
    )


_SIDES: tuple[tuple[Literal["left", "center", "right"], float, float], ...] = (
    ("left", 0.1, 0.34),
    ("center", 0.5, 0.66),
    ("right", 0.9, float("inf")),
)
"""How a label lies over its mark, where its line begins, and up to which share of the panel's width."""
