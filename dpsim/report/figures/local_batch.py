"""Samples per second against the local batch: measured, predicted, and the baselines."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, NullLocator, StrMethodFormatter

from dpsim.records.comparison import ComparedPoint, Comparison, Group
from dpsim.report.figures.style import (
    MEASURED,
    PREDICTED,
    Interval,
    baseline,
    grid,
    heading,
    label_lines,
    measured_dots,
    one_panel_each,
    predicted_line,
)
from dpsim.report.sweep.busy import busy_from
from dpsim.report.sweep.tables import group_title
from dpsim.report.words import BASELINES

_REACH = 1.3
"""Baselines are drawn up to this multiple of what was measured and predicted."""


def draw(comparison: Comparison, *, narrow: bool = False) -> Figure:
    """Return a panel for each network and number of devices."""
    return one_panel_each(
        comparison.groups, lambda axis, group: panel(axis, comparison, group), narrow=narrow, height_in=3.6
    )


def panel(axis: Axes, comparison: Comparison, group: Group) -> None:
    """Draw the curve of one group."""
    points = sorted(comparison.members(group), key=lambda point: point.local_batch)
    batches = [point.local_batch for point in points]
    measured = _rates(points, [(p.measured_step_s, p.measured_low_s, p.measured_high_s) for p in points])
    predicted = _rates(points, [(p.predicted_step_s, p.predicted_low_s, p.predicted_high_s) for p in points])
    top = _REACH * max(*measured.high, *predicted.high)
    axis.set_xscale("log", base=2)
    axis.set_ylim(0, top)
    grid(axis)
    labels = {}
    for name in (name for name in BASELINES if all(name in point.null_step_s for point in points)):
        rates = [min(point.global_batch / max(point.null_step_s[name], 1e-12), top) for point in points]
        baseline(axis, batches, rates, ideal=name == "perfect_scaling")
        if rates[-1] < top:
            labels[BASELINES[name]] = rates[-1]
    busy = busy_from(points)
    for batch, colour in ((busy.measured, MEASURED), (busy.predicted, PREDICTED)):
        if batch is not None:
            axis.axvline(batch, color=colour, linewidth=0.9, alpha=0.6, linestyle=":" if colour == PREDICTED else "-")
    predicted_line(axis, batches, predicted)
    measured_dots(axis, batches, measured)
    label_lines(axis, measured, predicted, labels)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xticks(batches, [f"{batch:g}" for batch in batches])
    axis.yaxis.set_major_locator(MaxNLocator(5))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axis.tick_params(labelsize=8.5)
    axis.set_xlabel("local batch", fontsize=8.5)
    heading(axis, group_title(group), "samples per second")


def _rates(points: Sequence[ComparedPoint], steps_s: Sequence[tuple[float, float, float]]) -> Interval:
    """Return samples/s with the intervals that follow from those of the step: (step, low, high) in seconds."""
    pairs = list(zip(points, steps_s, strict=True))
    return Interval(
        values=[point.global_batch / step_s for point, (step_s, _, _) in pairs],
        low=[point.global_batch / high_s for point, (_, _, high_s) in pairs],
        high=[point.global_batch / low_s for point, (_, low_s, _) in pairs],
    )
