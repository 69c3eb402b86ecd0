"""Step time against the fusion threshold: measured with intervals, predicted with its band, the nulls behind."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpsim.report.comparison import ComparedPoint, Comparison
from dpsim.report.figures.style import (
    FAINT,
    INK,
    MEASURED,
    MUTED,
    PAPER,
    PREDICTED,
    RULE,
    labels_at_right,
    panels,
    styled,
)
from dpsim.report.tables import where
from dpsim.units import format_size

_NULL_LABELS = {
    "constant": "constant (hindsight)",
    "perfect_scaling": "perfect scaling",
    "alpha_beta_no_overlap": "no overlap",
    "largest_bucket": "largest bucket",
}
_REACH = 0.7


def draw(comparison: Comparison, *, narrow: bool = False) -> Figure:
    """One panel a network and device count (and algorithm, where several were swept)."""
    found: dict[tuple[object, ...], list[ComparedPoint]] = {}
    for point in comparison.scored:
        if point.devices > 1:
            found.setdefault((point.network, point.devices, point.algorithm), []).append(point)
    series = list(found.values())

    def make() -> Figure:
        figure, axes = panels(len(series), narrow=narrow, height_in=3.5)
        for axis, points in zip(axes, series, strict=True):
            _panel(axis, points)
        return figure

    return styled(make)


def _ms(values: Sequence[float]) -> list[float]:
    return [v * 1e3 for v in values]


def _panel(axis: Axes, points: Sequence[ComparedPoint]) -> None:
    x = list(range(len(points)))
    measured, predicted = _ms([p.measured_step_s for p in points]), _ms([p.predicted_step_s for p in points])
    low, high = _ms([p.measured_low_s for p in points]), _ms([p.measured_high_s for p in points])
    band = _ms([p.predicted_low_s for p in points]), _ms([p.predicted_high_s for p in points])
    bottom, top = min(*low, *band[0]), max(*high, *band[1])
    nulls = {name: _ms([p.null_step_s[name] for p in points]) for name in points[0].null_step_s}
    span = max(top - bottom, 0.02 * top)
    floor, ceiling = bottom - _REACH * span, top + _REACH * span
    shown = {name: line for name, line in nulls.items() if floor <= line[-1] <= ceiling}
    bottom = min([bottom, *(max(floor, min(line)) for line in shown.values())])
    top = max([top, *(min(ceiling, max(line)) for line in shown.values())])
    margin = 0.09 * (top - bottom)
    axis.set_ylim(bottom - 2 * margin, top + 1.8 * margin)
    axis.set_xlim(-0.4, len(points) - 0.6)
    axis.grid(axis="y", color=RULE, linewidth=0.6)
    axis.set_axisbelow(True)
    for line in shown.values():
        axis.plot(x, line, color=FAINT, linewidth=0.9, dashes=(4, 2.5), zorder=1)
    axis.fill_between(x, *band, color=PREDICTED, alpha=0.16, linewidth=0, zorder=2)
    axis.plot(x, predicted, color=PREDICTED, linewidth=1.8, zorder=3)
    around = [[m - a for m, a in zip(measured, low, strict=True)], [b - m for m, b in zip(measured, high, strict=True)]]
    axis.errorbar(x, measured, yerr=around, fmt="o", color=MEASURED, markersize=5, elinewidth=1.6, capsize=0, zorder=5)
    _mark_best(axis, points, measured, predicted, low)
    labels = [(line[-1], _NULL_LABELS.get(name, name), MUTED) for name, line in shown.items()]
    labels += [(measured[-1], "measured", MEASURED), (predicted[-1], "predicted", PREDICTED)]
    labels_at_right(axis, labels, gap=0.062)
    _frame(axis, points)
    off = [f"{_NULL_LABELS.get(n, n)} {v[-1]:.3g} ms" for n, v in nulls.items() if n not in shown]
    text = f"milliseconds a step, {points[0].algorithm}" + (f"; off the scale: {', '.join(off)}" if off else "")
    axis.text(0, 1.02, text, transform=axis.transAxes, color=MUTED, fontsize=8.5, va="bottom")


def _mark_best(
    axis: Axes, points: Sequence[ComparedPoint], measured: Sequence[float], predicted: Sequence[float],
    low: Sequence[float],
) -> None:  # fmt: skip
    for i, point in enumerate(points):
        if point.is_best_predicted:
            axis.plot(
                [i], [predicted[i]], marker="D", markersize=10, markerfacecolor=PAPER, markeredgecolor=PREDICTED,
                markeredgewidth=1.6, zorder=4,
            )  # fmt: skip
        if point.is_best_measured:
            axis.plot(
                [i], [measured[i]], marker="*", markersize=14, markerfacecolor=MEASURED, markeredgecolor=PAPER,
                markeredgewidth=0.8, zorder=6,
            )  # fmt: skip
    best = next((i for i, p in enumerate(points) if p.is_best_measured), None)
    guess = next((i for i, p in enumerate(points) if p.is_best_predicted), None)
    if best is not None:
        text = "best, measured and predicted" if best == guess else "best measured"
        lowest = min(low[best], predicted[best]) if best == guess else low[best]
        _note(axis, text, best, lowest, len(points), INK if best == guess else MEASURED, below=True)
    if guess is not None and guess != best:
        _note(axis, "best predicted", guess, predicted[guess], len(points), PREDICTED, below=False)


def _note(axis: Axes, text: str, x: int, y: float, count: int, colour: str, *, below: bool) -> None:
    side = "left" if x < count * 0.34 else "right" if x > count * 0.66 else "center"
    shift = {"left": -6, "right": 6, "center": 0}[side]
    axis.annotate(
        text, (x, y), xytext=(shift, -10 if below else 10), textcoords="offset points", color=colour, fontsize=8.5,
        ha=side, va="top" if below else "bottom", zorder=7,
    )  # fmt: skip


def _frame(axis: Axes, points: Sequence[ComparedPoint]) -> None:
    axis.set_xticks(range(len(points)), [format_size(p.fusion_threshold_bytes).replace(" ", "\n") for p in points])
    axis.tick_params(labelsize=8.5)
    axis.set_xlabel("fusion threshold", fontsize=8.5)
    axis.set_title(where(points[0]), loc="left", fontsize=10.5, fontweight="bold", pad=18)
