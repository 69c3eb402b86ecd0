"""Draws charts. Loading this package loads matplotlib; nothing that ``import dpsim`` loads does so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpsim.report.charts import Bars, Chart, Lines, Map, Panel, Rows, Steps
from dpsim.report.figures import bars, lines, rows, steps
from dpsim.report.figures.style import WIDE_IN, inline_svg, panels, save, save_as, save_dark, styled
from dpsim.report.seen import panel_names

__all__ = ["draw", "inline_svg", "moments", "on_axes", "save", "save_as", "save_dark"]

_DRAW: dict[type[Panel], Callable[..., None]] = {
    Lines: lines.draw,
    Rows: rows.draw,
    Bars: bars.draw,
    Map: bars.draw_map,
    Steps: steps.draw,
}
_LEGEND: dict[type[Panel], Callable[..., list[Any]]] = {Bars: bars.legend, Steps: steps.legend}
"""The kinds of panels with one legend for all of them, at the top of the figure."""


def draw(chart: Chart, *, narrow: bool = False) -> Figure:
    """Return the figure of a chart, for wide or for narrow windows."""

    def make() -> Figure:
        kind = type(chart.panels[0])
        legend = _LEGEND[kind](chart.panels) if kind in _LEGEND else []
        columns = 2 if narrow else 7
        head_in = 0.2 + 0.2 * -(-len(legend) // columns) if legend else 0.0
        figure, axes = panels(
            len(chart.panels), narrow=narrow, height_in=chart.height_in, columns=chart.columns, head_in=head_in
        )
        for axis, panel in zip(axes, chart.panels, strict=True):
            _DRAW[type(panel)](axis, panel, narrow=narrow)
        if legend:
            look: dict[str, Any] = {"handlelength": 1.0, "handleheight": 0.9, "columnspacing": 1.5}
            figure.legend(handles=legend, loc="upper left", ncols=columns, **look)
        return figure

    return styled(make)


def moments(chart: Chart) -> list[dict[str, Any]]:
    """Return what a page says while it plays the panels of a chart of steps; of other charts none."""
    named = zip(panel_names(chart), chart.panels, strict=True)
    return [steps.moments(panel) | {"title": name} for name, panel in named if isinstance(panel, Steps)]


def on_axes(axis: Axes | None, panel: Panel) -> Axes:
    """Draw one panel: on ``axis``, or without it on a new figure of pyplot."""

    def make() -> Axes:
        shown = axis
        if shown is None:
            from matplotlib import pyplot

            shown = pyplot.figure(figsize=(WIDE_IN / 2, 3.7), layout="constrained").add_subplot()
        shown.spines[["top", "right", "left"]].set_visible(False)
        _DRAW[type(panel)](shown, panel)
        return shown

    return styled(make)
