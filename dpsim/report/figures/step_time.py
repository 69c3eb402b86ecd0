"""Step time against the fusion threshold: measured, predicted, and the baselines."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpsim.records.comparison import ComparedPoint, Comparison
from dpsim.report.figures.style import (
    INK,
    MEASURED,
    PAPER,
    PREDICTED,
    Interval,
    baseline,
    grid,
    heading,
    label_lines,
    measured_dots,
    one_panel_each,
    point_name,
    predicted_line,
    size_ticks,
)
from dpsim.report.words import BASELINES, field_name

OWN_RUNTIME = "dpsim (emulated)"
"""The label of dpsim's own runtime, whose computation is emulated, beside PyTorch's DDP."""
_MARGIN = 0.12
"""The height that is free above everything for a label, as a share of that below it."""
_REACH = 0.7
"""Baselines are drawn up to this multiple of the measured and predicted range above it."""


def draw(comparison: Comparison, *, narrow: bool = False) -> Figure:
    """Return a panel for each group of points."""
    return one_panel_each(groups(comparison), panel, narrow=narrow, height_in=3.5)


def groups(comparison: Comparison) -> list[list[ComparedPoint]]:
    """Return the points of each network and device count above 1 (and algorithm, where several were swept)."""
    members: dict[tuple[object, ...], list[ComparedPoint]] = {}
    for point in comparison.scored:
        if point.devices > 1:
            members.setdefault((point.network, point.devices, point.algorithm), []).append(point)
    return list(members.values())


def _ms(values: Sequence[float]) -> list[float]:
    return [value * 1e3 for value in values]


def panel(axis: Axes, points: Sequence[ComparedPoint]) -> None:
    """Draw the points of one group, in the order of their thresholds.

    The vertical axis begins at 0, so that noise does not look like an effect.
    """
    x = list(range(len(points)))
    measured = Interval(
        values=_ms([p.measured_step_s for p in points]),
        low=_ms([p.measured_low_s for p in points]),
        high=_ms([p.measured_high_s for p in points]),
    )
    predicted = Interval(
        values=_ms([p.predicted_step_s for p in points]),
        low=_ms([p.predicted_low_s for p in points]),
        high=_ms([p.predicted_high_s for p in points]),
    )
    baselines = {BASELINES[name]: _ms([p.null_step_s[name] for p in points]) for name in points[0].null_step_s}
    bottom, top = min(*measured.low, *predicted.low), max(*measured.high, *predicted.high)
    own = _ms([point.dpsim_step_s for point in points if point.dpsim_step_s is not None])
    bottom, top = min([bottom, *own]), max([top, *own])
    span = max(top - bottom, 0.02 * top)
    ceiling = top + _REACH * span
    shown = {label: line for label, line in baselines.items() if line[-1] <= ceiling}
    bottom = min([bottom, *(min(line) for line in shown.values())])
    top = max([top, *(min(ceiling, max(line)) for line in shown.values())])
    margin = _MARGIN * top
    axis.set_ylim(0.0, top + margin)
    axis.set_xlim(-0.4, len(points) - 0.6)
    grid(axis)
    for line in shown.values():
        baseline(axis, x, line)
    predicted_line(axis, x, predicted)
    measured_dots(axis, x, measured)
    ends = {label: line[-1] for label, line in shown.items()}
    if len(own) == len(points):
        axis.plot(x, own, marker="s", markersize=4.5, linewidth=1.1, color=INK, alpha=0.7, zorder=3)
        ends[OWN_RUNTIME] = own[-1]
    _mark_best(axis, points, measured.values, predicted.values, (bottom - margin / 2, top + margin / 2))
    label_lines(axis, measured, predicted, ends)
    size_ticks(axis, [point.fusion_threshold_bytes for point in points])
    axis.set_xlabel(field_name("fusion_threshold_bytes", points[0].runtime), fontsize=8.5)
    hidden = [f"{label}, {line[-1]:.3g} ms" for label, line in baselines.items() if label not in shown]
    subtitle = f"ms per step (allreduce: {points[0].algorithm})."
    heading(axis, point_name(points[0]), subtitle + (f" Not drawn: {'; '.join(hidden)}." if hidden else ""))


def _mark_best(
    axis: Axes,
    points: Sequence[ComparedPoint],
    measured: Sequence[float],
    predicted: Sequence[float],
    free: tuple[float, float],
) -> None:
    """Mark the best measured point and the best predicted one.

    ``free`` are heights below and above everything that is drawn. A label stands on the side of its mark on
    which there is no other mark at the same threshold.
    """
    best_measured = next((i for i, point in enumerate(points) if point.is_best_measured), None)
    best_predicted = next((i for i, point in enumerate(points) if point.is_best_predicted), None)
    same = best_measured == best_predicted
    predicted_below = False
    if best_predicted is not None:
        mark = (best_predicted, predicted[best_predicted])
        axis.plot(
            *([value] for value in mark),
            marker="D",
            markersize=10,
            markerfacecolor=PAPER,
            markeredgecolor=PREDICTED,
            markeredgewidth=1.6,
            zorder=4,
        )
        predicted_below = measured[best_predicted] > predicted[best_predicted]
        if not same:
            _note(axis, "best predicted", mark, len(points), PREDICTED, free, below=predicted_below)
    if best_measured is not None:
        mark = (best_measured, measured[best_measured])
        axis.plot(
            *([value] for value in mark),
            marker="*",
            markersize=14,
            markerfacecolor=MEASURED,
            markeredgecolor=PAPER,
            markeredgewidth=0.8,
            zorder=6,
        )
        text, colour = ("best, measured and predicted", INK) if same else ("best measured", MEASURED)
        below = predicted[best_measured] > measured[best_measured]
        if best_predicted is not None and not same:
            below = not predicted_below
        _note(axis, text, mark, len(points), colour, free, below=below)


def _note(
    axis: Axes, text: str, mark: tuple[float, float], count: int, colour: str, free: tuple[float, float], *, below: bool
) -> None:
    """Write a label in the free height below or above, with a line to its mark."""
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
