"""Predicted against measured step time of many sweeps: on a diagonal, and as their ratio."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from dpsim.records.comparison import ComparedPoint
from dpsim.report.figures.style import INK, LINE_COLOURS, MARKERS, grid, heading, panels, styled

_RATIOS = (0.5, 0.7, 1.0, 1.4, 2.0)


def draw(places: Mapping[str, Sequence[ComparedPoint]], *, narrow: bool = False) -> Figure:
    """Return one panel with predicted against measured times, and one with their ratios; a colour for each place."""

    def make() -> Figure:
        figure, axes = panels(2, narrow=narrow, height_in=4.4 if not narrow else 3.6, head_in=0.3 + 0.5 * narrow)
        times, ratios = axes
        _scatter(times, places, lambda point: 1e3)
        _scatter(ratios, places, lambda point: 1 / point.measured_step_s)
        every = [point for points in places.values() for point in points]
        ends_s = [f(p.measured_step_s, p.predicted_step_s) for p in every for f in (min, max)]
        ends = [min(ends_s) * 1e3 / 1.3, max(ends_s) * 1e3 * 1.3]
        times.plot(ends, ends, color=INK, linewidth=1, zorder=1)
        times.set_ylim(*ends)
        ratios.axhline(1, color=INK, linewidth=1, zorder=1)
        ratios.set_yscale("log")
        ratios.set_ylim(_RATIOS[0], _RATIOS[-1])
        ratios.set_yticks(_RATIOS, [f"{ratio - 1:+.0%}" if ratio != 1 else "0%" for ratio in _RATIOS])
        times.set_yscale("log")
        for axis in axes:
            axis.set_xscale("log")
            axis.set_xlim(*ends)
            axis.set_xlabel("measured, ms per step", fontsize=8.5)
            grid(axis)
        for scale in (times.xaxis, times.yaxis, ratios.xaxis):
            scale.set_major_locator(LogLocator(subs=(1, 3), numticks=9))
            scale.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            scale.set_minor_locator(NullLocator())
        ratios.yaxis.set_minor_locator(NullLocator())
        heading(times, "Predicted step time", "ms per step; on the line: as measured")
        heading(ratios, "Error of the prediction", "over measured; it holds where its line crosses 0%")
        figure.legend(
            *times.get_legend_handles_labels(),
            loc="upper left",
            frameon=False,
            ncols=1 if narrow else len(places),
            handletextpad=0.4,
            columnspacing=1.6,
            markerscale=2,
            fontsize=9,
        )
        return figure

    return styled(make)


def _scatter(axis: Axes, places: Mapping[str, Sequence[ComparedPoint]], unit: Callable[[ComparedPoint], float]) -> None:
    """Draw predicted times with their intervals, in ``unit``, against measured milliseconds."""
    for (place, points), colour, marker in zip(places.items(), LINE_COLOURS, MARKERS, strict=False):
        units = np.array([unit(point) for point in points])
        value, low, high = (
            np.array([getattr(point, f"predicted_{name}_s") for point in points]) * units
            for name in ("step", "low", "high")
        )
        axis.errorbar(
            [point.measured_step_s * 1e3 for point in points],
            value,
            yerr=[np.maximum(0, value - low), np.maximum(0, high - value)],
            fmt=marker,
            color=colour,
            markersize=3.5,
            markeredgewidth=0,
            elinewidth=0.8,
            alpha=0.55,
            capsize=0,
            label=place,
            zorder=3,
        )
