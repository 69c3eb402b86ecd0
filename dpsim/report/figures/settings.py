"""Samples per second at each setting, fastest first: measured and predicted."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from dpsim.records.comparison import ComparedPoint, Comparison, Group
from dpsim.report.figures.style import (
    MEASURED,
    PAPER,
    PREDICTED,
    grid,
    group_subtitle,
    heading,
    one_panel_each,
    setting_label,
)
from dpsim.report.words import network_name

PointName = Callable[[ComparedPoint], str]
_ROW_IN, _HEAD_IN = 0.34, 1.25


def draw(comparison: Comparison, *, narrow: bool = False, name: PointName | None = None) -> Figure:
    """Return a panel for each group, with a row for each setting, called by the values that are compared."""
    groups = comparison.groups
    height_in = _HEAD_IN + _ROW_IN * max(len(comparison.members(group)) for group in groups)
    return one_panel_each(
        groups, lambda axis, group: panel(axis, comparison, group, name), narrow=narrow, height_in=height_in
    )


def _images_per_s(point: ComparedPoint) -> float:
    return point.global_batch / point.measured_step_s


def panel(axis: Axes, comparison: Comparison, group: Group, name: PointName | None = None) -> None:
    """Draw one group on existing axes."""
    points, compared = sorted(comparison.members(group), key=_images_per_s), comparison.compared
    for row, point in enumerate(points):
        batch = point.global_batch
        axis.plot(
            [batch / point.predicted_high_s, batch / point.predicted_low_s],
            [row + 0.16] * 2,
            color=PREDICTED,
            linewidth=5,
            alpha=0.25,
            solid_capstyle="butt",
        )
        axis.plot(
            [batch / point.predicted_step_s],
            [row + 0.16],
            marker="D",
            markersize=5.5,
            markerfacecolor=PAPER,
            markeredgecolor=PREDICTED,
            markeredgewidth=1.5,
            linestyle="",
        )
        axis.plot(
            [batch / point.measured_high_s, batch / point.measured_low_s],
            [row - 0.12] * 2,
            color=MEASURED,
            linewidth=1.6,
        )
        axis.plot(
            [_images_per_s(point)],
            [row - 0.12],
            marker="o",
            markersize=5.5,
            color=MEASURED,
            linestyle="",
        )
    named = name or (lambda point: setting_label(point, compared))
    names = [named(point) for point in points]
    axis.set_yticks(range(len(points)), names, fontsize=8.5)
    axis.set_ylim(-0.6, len(points) - 0.4)
    axis.set_xlim(left=0)
    grid(axis, "x")
    axis.tick_params(labelsize=8.5)
    axis.set_xlabel("samples/s: ● measured, ◇ predicted", fontsize=8.5)
    axis.xaxis.set_major_locator(MaxNLocator(4))
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    heading(axis, network_name(group), group_subtitle(group, compared))
