"""Step time against the fusion threshold: measured with intervals, predicted with its band, the nulls behind."""

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
    PAPER,
    PREDICTED,
    RULE,
    labels_at_right,
    panels,
    styled,
)
from dpsim.report.sweep.tables import where
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
    margin = 0.16 * (top - bottom)
    axis.set_ylim(max(0.0, bottom - margin), top + margin)
    axis.set_xlim(-0.4, len(points) - 0.6)
    axis.grid(axis="y", color=RULE, linewidth=0.6)
    axis.set_axisbelow(True)
    for line in shown.values():
        axis.plot(x, line, color=FAINT, linewidth=0.9, dashes=(4, 2.5), zorder=1)
    axis.fill_between(x, *band, color=PREDICTED, alpha=0.16, linewidth=0, zorder=2)
    axis.plot(x, predicted, color=PREDICTED, linewidth=1.8, zorder=3)
    around = [[m - a for m, a in zip(measured, low, strict=True)], [b - m for m, b in zip(measured, high, strict=True)]]
    axis.errorbar(x, measured, yerr=around, fmt="o", color=MEASURED, markersize=5, elinewidth=1.6, capsize=0, zorder=5)
    _mark_best(axis, points, measured, predicted, (bottom - margin / 2, top + margin / 2))
    labels = [(line[-1], _NULL_LABELS.get(name, name), MUTED) for name, line in shown.items()]
    labels += [(measured[-1], "measured", MEASURED), (predicted[-1], "predicted", PREDICTED)]
    labels_at_right(axis, labels, gap=0.062)
    _frame(axis, points)
    off = [f"{_NULL_LABELS.get(n, n)}, {v[-1]:.3g} ms" for n, v in nulls.items() if n not in shown]
    text = f"ms per step (allreduce: {points[0].algorithm})." + (f" Not drawn: {'; '.join(off)}." if off else "")
    axis.text(0, 1.02, text, transform=axis.transAxes, color=MUTED, fontsize=8.5, va="bottom")


def _mark_best(
    axis: Axes,
    points: Sequence[ComparedPoint],
    measured: Sequence[float],
    predicted: Sequence[float],
    free: tuple[float, float],
) -> None:
    """Mark the best measured point and the best predicted one; ``free`` are heights below and above all that is drawn.

    A label stands on the side of its mark on which the other mark of the same threshold is not.
    """
    for i, point in enumerate(points):
        both = point.is_best_measured and point.is_best_predicted
        if point.is_best_predicted:
            axis.plot(
                [i],
                [predicted[i]],
                marker="D",
                markersize=10,
                markerfacecolor=PAPER,
                markeredgecolor=PREDICTED,
                markeredgewidth=1.6,
                zorder=4,
            )
            if not both:
                below = measured[i] > predicted[i]
                _note(axis, "best predicted", (i, predicted[i]), len(points), PREDICTED, free, below=below)
        if point.is_best_measured:
            axis.plot(
                [i],
                [measured[i]],
                marker="*",
                markersize=14,
                markerfacecolor=MEASURED,
                markeredgecolor=PAPER,
                markeredgewidth=0.8,
                zorder=6,
            )
            text, colour = ("best, measured and predicted", INK) if both else ("best measured", MEASURED)
            below = predicted[i] > measured[i]
            _note(axis, text, (i, measured[i]), len(points), colour, free, below=below)


def _note(
    axis: Axes, text: str, mark: tuple[float, float], count: int, colour: str, free: tuple[float, float], *, below: bool
) -> None:
    """A label in the free height below or above, and a line from it to its mark."""
    height = free[0] if below and free[0] > axis.get_ylim()[0] else free[1]
    side, foot = next(
        (side, foot)
        for side, foot, most in (("left", 0.1, 0.34), ("center", 0.5, 0.66), ("right", 0.9, 1.0))
        if mark[0] < count * most
    )
    axis.annotate(
        text,
        mark,
        xytext=(mark[0], height),
        color=colour,
        fontsize=8.5,
        ha=side,
        va="center",
        zorder=7,
        arrowprops={
            "arrowstyle": "-",
            "color": colour,
            "linewidth": 0.9,
            "shrinkA": 1.0,
            "shrinkB": 6.0,
            "relpos": (foot, 0.5),
        },
    )


def _frame(axis: Axes, points: Sequence[ComparedPoint]) -> None:
    axis.set_xticks(range(len(points)), [format_size(p.fusion_threshold_bytes).replace(" ", "\n") for p in points])
    axis.tick_params(labelsize=8.5)
    axis.set_xlabel("fusion threshold", fontsize=8.5)
    axis.set_title(where(points[0]), loc="left", fontsize=10.5, fontweight="bold", pad=18)
