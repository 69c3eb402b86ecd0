"""Speedup against the number of devices: measured with intervals, predicted with its band, the ideal and the nulls."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpsim.records.comparison import ComparedPoint, Comparison
from dpsim.report.figures.style import (
    FAINT,
    INK,
    MEASURED,
    MUTED,
    PREDICTED,
    RULE,
    labels_at_right,
    panels,
    styled,
)
from dpsim.report.words import EMULATED_COMPUTE, network_name

_NULL_LABELS = {
    "constant": "constant (hindsight)",
    "perfect_scaling": "perfect scaling",
    "alpha_beta_no_overlap": "no overlap",
}


def draw(comparison: Comparison, *, narrow: bool = False) -> Figure:
    """One panel a network."""
    shown = [(comparison.members(group), group) for group in comparison.groups]

    def make() -> Figure:
        figure, axes = panels(len(shown), narrow=narrow, height_in=3.7)
        for axis, (points, group) in zip(axes, shown, strict=True):
            _panel(axis, points[0], [p for p in points if p.devices > 1])
            title = network_name(group.network, group.emulated_network)
            title += EMULATED_COMPUTE if any(p.emulated_compute for p in points) else ""
            axis.set_title(title, loc="left", fontsize=10.5, fontweight="bold", pad=18)
        return figure

    return styled(make)


def _panel(axis: Axes, one: ComparedPoint, points: Sequence[ComparedPoint]) -> None:
    """Lines begin at ``one`` device."""
    counts = [1, *(p.devices for p in points)]
    measured = [p.measured_speedup or 0.0 for p in points]
    predicted = [1.0, *(p.predicted_speedup or 0.0 for p in points)]
    low = [m * p.measured_step_s / p.measured_high_s for m, p in zip(measured, points, strict=True)]
    high = [m * p.measured_step_s / p.measured_low_s for m, p in zip(measured, points, strict=True)]
    band = (
        [s * p.predicted_step_s / p.predicted_high_s for s, p in zip(predicted[1:], points, strict=True)],
        [s * p.predicted_step_s / p.predicted_low_s for s, p in zip(predicted[1:], points, strict=True)],
    )
    nulls = {name: [1.0, *(_of_null(p, name) for p in points)] for name in _NULL_LABELS}
    nulls["constant"][0] = one.measured_step_s / points[0].null_step_s["constant"]
    axis.set_ylim(0, 1.06 * max(*high, *band[1], *(value for line in nulls.values() for value in line)))
    axis.set_xlim(1 - 0.04 * (max(counts) - 1), max(counts) + 0.06 * (max(counts) - 1))
    axis.grid(axis="y", color=RULE, linewidth=0.6)
    axis.set_axisbelow(True)
    for name, line in nulls.items():
        colour, width = (INK, 1.0) if name == "perfect_scaling" else (FAINT, 0.9)
        axis.plot(counts, line, dashes=(4, 2.5), zorder=1, color=colour, linewidth=width)
    axis.fill_between(counts, [1.0, *band[0]], [1.0, *band[1]], color=PREDICTED, alpha=0.16, linewidth=0, zorder=2)
    axis.plot(counts, predicted, color=PREDICTED, linewidth=1.8, zorder=3)
    around = [[m - a for m, a in zip(measured, low, strict=True)], [b - m for m, b in zip(measured, high, strict=True)]]
    axis.errorbar(
        counts[1:], measured, yerr=around, fmt="o", color=MEASURED, markersize=5, elinewidth=1.6, capsize=0, zorder=5
    )
    labels = [(line[-1], _NULL_LABELS[name], MUTED) for name, line in nulls.items()]
    labels += [(measured[-1], "measured", MEASURED), (predicted[-1], "predicted", PREDICTED)]
    labels_at_right(axis, labels, gap=0.062)
    axis.set_xticks(counts, ["1", *(p.layout for p in points)])
    axis.tick_params(labelsize=8.5)
    axis.set_xlabel("devices", fontsize=8.5)
    text = f"samples/s over one device's, {points[0].algorithm}"
    axis.text(0, 1.02, text, transform=axis.transAxes, color=MUTED, fontsize=8.5, va="bottom")


def _of_null(point: ComparedPoint, name: str) -> float:
    """The speedup that a null says, over the predicted step of one device; that of hindsight over the measured one."""
    speedup, step_s = (
        (point.measured_speedup, point.measured_step_s)
        if name == "constant"
        else (point.predicted_speedup, point.predicted_step_s)
    )
    return (speedup or 0.0) * step_s / point.null_step_s[name]
