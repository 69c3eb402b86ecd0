"""Gap against the local batch, divergence predicted against measured, steps against the global batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from dpsim.predict.critical_batch import StepsFit, power_law
from dpsim.predict.norm_gap import FORM, GapFit
from dpsim.records.quality_results import DivergenceResult, GapResult, StepsResult
from dpsim.report.figures.style import FAINT, MEASURED, PAPER, PREDICTED, grid, heading, panels, styled

_CURVE = 60


def draw(shown: Sequence[Any], panel: Callable[[Axes, Any], None], *, narrow: bool = False) -> Figure:
    """Return a figure with a panel for each result."""

    def make() -> Figure:
        figure, axes = panels(len(shown), narrow=narrow, height_in=3.6)
        for axis, result in zip(axes, shown, strict=True):
            panel(axis, result)
        return figure

    return styled(make)


def gap_panel(axis: Axes, result: GapResult) -> None:
    """Draw measured gaps with their intervals, and the fitted curve."""
    study, parameters = result.study, result.predicted.parameters
    batches = [point.local_batch for point in result.points]
    _batch_axis(axis, [*batches, study.global_batch], "local batch")
    if parameters:
        fit = GapFit(form=FORM, global_batch=study.global_batch, **parameters)
        x = np.geomspace(min(batches), study.global_batch, _CURVE)
        axis.plot(x, [fit.gap(b) for b in x], color=PREDICTED, linewidth=1.8, label="predicted", zorder=3)
    for point in result.points:
        gap = point.gap
        _dot(axis, point.local_batch, gap.mean, gap.low, gap.high, held_out=point.held_out)
    heading(axis, f"{study.model}, global batch {study.global_batch}", f"gap in log(training loss), {study.dataset}")


def divergence_panel(axis: Axes, result: DivergenceResult) -> None:
    """Draw predicted against measured divergences, and those of independent rows."""
    study, measured = result.study, [value for value in result.measured if value > 0]
    pairs = [(p, value) for p, value in zip(result.points, result.measured, strict=True) if value > 0]
    _log(axis, "x")
    _log(axis, "y")
    grid(axis)
    ends = (min(measured) / 1.5, max(measured) * 1.5)
    axis.plot(ends, ends, color=FAINT, linewidth=1.0, zorder=1)
    axis.plot(
        [value for _, value in pairs],
        [point.independent_rows for point, _ in pairs],
        linestyle="none",
        marker=".",
        color=FAINT,
        label="independent rows",
    )
    for statistic, marker in (("mean", "o"), ("variance", "s")):
        chosen = [(value, point.predicted) for point, value in pairs if point.statistic == statistic]
        x, y = zip(*chosen, strict=True)
        axis.plot(x, y, linestyle="none", marker=marker, markersize=4, color=PREDICTED, label=f"{statistic}s")
    axis.set_xlabel("measured")
    axis.legend(frameon=False, fontsize=8.5, loc="best")
    heading(axis, f"{study.model}, after {study.steps} steps", f"predicted divergence (RMS), {study.dataset}")


def steps_panel(axis: Axes, result: StepsResult) -> None:
    """Draw measured steps, the fit and the power law."""
    study, reached = result.study, [point for point in result.points if point.median is not None]
    batches = [point.global_batch for point in result.points]
    _batch_axis(axis, batches, "global batch")
    _log(axis, "y")
    x = np.geomspace(min(batches), max(batches), _CURVE)
    if result.predicted.parameters:
        fit = StepsFit(**result.predicted.parameters)
        medians = {p.global_batch: p.median for p in reached if not p.held_out and p.median is not None}
        axis.plot(x, [fit.steps(b) for b in x], color=PREDICTED, linewidth=1.8, label="predicted", zorder=3)
        axis.plot(x, [power_law(medians, b) for b in x], color=FAINT, dashes=(4, 2.5), linewidth=1.0, zorder=1)
    for point in reached:
        assert point.median is not None
        _dot(axis, point.global_batch, point.median, min(point.steps), max(point.steps), held_out=point.held_out)
    heading(axis, study.model, f"steps to a training loss of {study.target_loss:g}, {study.dataset}")


def _log(axis: Axes, name: Literal["x", "y"]) -> None:
    """Make an axis logarithmic, with plain numbers at 1, 2 and 5."""
    (axis.set_xscale if name == "x" else axis.set_yscale)("log")
    ticks = axis.xaxis if name == "x" else axis.yaxis
    ticks.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=9))
    ticks.set_minor_locator(NullLocator())
    ticks.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _batch_axis(axis: Axes, batches: Sequence[int], name: str) -> None:
    axis.set_xscale("log", base=2)
    grid(axis)
    axis.set_xticks(batches, [str(batch) for batch in batches], minor=False)
    axis.xaxis.minorticks_off()
    axis.set_xlabel(name)


def _dot(axis: Axes, x: float, value: float, low: float, high: float, *, held_out: bool) -> None:
    axis.errorbar(
        [x],
        [value],
        yerr=[[value - low], [high - value]],
        fmt="o",
        color=MEASURED,
        markerfacecolor=PAPER if held_out else MEASURED,
        markersize=5.5,
        elinewidth=1.4,
        capsize=0,
        zorder=5,
    )
