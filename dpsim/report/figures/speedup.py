"""Speedup against the number of devices: measured, predicted, and the baselines."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpsim.records.comparison import ComparedPoint, Comparison, Group
from dpsim.report.figures.style import (
    Interval,
    baseline,
    grid,
    heading,
    label_lines,
    measured_dots,
    one_panel_each,
    predicted_line,
)
from dpsim.report.words import BASELINES, network_name


def draw(comparison: Comparison, *, narrow: bool = False) -> Figure:
    """Return a panel for each network."""
    return one_panel_each(
        comparison.groups, lambda axis, group: panel(axis, comparison, group), narrow=narrow, height_in=3.7
    )


def panel(axis: Axes, comparison: Comparison, group: Group) -> None:
    """Draw the points of one network."""
    points = comparison.members(group)
    several = [point for point in points if point.devices > 1]
    _lines(axis, points[0], several)
    title = network_name(group)
    heading(axis, title, f"samples/s over one device's, {several[0].algorithm}")


def _lines(axis: Axes, single: ComparedPoint, points: Sequence[ComparedPoint]) -> None:
    """Draw the lines, which begin at the point of a ``single`` device."""
    counts = [1, *(point.devices for point in points)]
    measured = _interval(
        [point.measured_speedup or 0.0 for point in points],
        [(point.measured_step_s, point.measured_low_s, point.measured_high_s) for point in points],
    )
    predicted = _interval(
        [1.0, *(point.predicted_speedup or 0.0 for point in points)],
        [
            (1.0, 1.0, 1.0),
            *((point.predicted_step_s, point.predicted_low_s, point.predicted_high_s) for point in points),
        ],
    )
    baselines = {
        name: [1.0, *(_of_baseline(point, name) for point in points)]
        for name in BASELINES
        if name in points[0].null_step_s
    }
    baselines["constant"][0] = single.measured_step_s / points[0].null_step_s["constant"]
    top = max(*measured.high, *predicted.high, *(value for line in baselines.values() for value in line))
    axis.set_ylim(0, 1.06 * top)
    axis.set_xlim(1 - 0.04 * (max(counts) - 1), max(counts) + 0.06 * (max(counts) - 1))
    grid(axis)
    for name, line in baselines.items():
        baseline(axis, counts, line, ideal=name == "perfect_scaling")
    predicted_line(axis, counts, predicted)
    measured_dots(axis, counts[1:], measured)
    label_lines(axis, measured, predicted, {BASELINES[name]: line[-1] for name, line in baselines.items()})
    axis.set_xticks(counts, ["1", *(point.layout for point in points)])
    axis.tick_params(labelsize=8.5)
    axis.set_xlabel("devices", fontsize=8.5)


def _interval(speedups: Sequence[float], steps_s: Sequence[tuple[float, float, float]]) -> Interval:
    """Return speedups with the intervals that follow from those of the step: (step, low, high) in seconds."""
    pairs = list(zip(speedups, steps_s, strict=True))
    return Interval(
        values=speedups,
        low=[speedup * step_s / high_s for speedup, (step_s, _, high_s) in pairs],
        high=[speedup * step_s / low_s for speedup, (step_s, low_s, _) in pairs],
    )


def _of_baseline(point: ComparedPoint, name: str) -> float:
    """Return a baseline's speedup, over the predicted step of one device; for the constant, over the measured step."""
    speedup, step_s = (
        (point.measured_speedup, point.measured_step_s)
        if name == "constant"
        else (point.predicted_speedup, point.predicted_step_s)
    )
    return (speedup or 0.0) * step_s / point.null_step_s[name]
