"""Gap against the local batch, divergence predicted against measured, steps against the global batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
    heading(axis, study.name, "log(training loss / that with global statistics)")


def divergence_panel(axis: Axes, result: DivergenceResult) -> None:
    """Draw predicted against measured divergences, and those of independent rows."""
    measured = [value for value in result.measured if value > 0]
    pairs = [(p, value) for p, value in zip(result.points, result.measured, strict=True) if value > 0]
    axis.set_xscale("log")
    axis.set_yscale("log")
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
    heading(axis, result.study.name, "predicted divergence of local statistics (RMS)")


def steps_panel(axis: Axes, result: StepsResult) -> None:
    """Draw measured steps, the fit and the power law."""
    reached = [point for point in result.points if point.median is not None]
    batches = [point.global_batch for point in result.points]
    _batch_axis(axis, batches, "global batch")
    axis.set_yscale("log")
    x = np.geomspace(min(batches), max(batches), _CURVE)
    if result.predicted.parameters:
        fit = StepsFit(**result.predicted.parameters)
        medians = {p.global_batch: p.median for p in reached if not p.held_out and p.median is not None}
        axis.plot(x, [fit.steps(b) for b in x], color=PREDICTED, linewidth=1.8, label="predicted", zorder=3)
        axis.plot(x, [power_law(medians, b) for b in x], color=FAINT, dashes=(4, 2.5), linewidth=1.0, zorder=1)
    for point in reached:
        assert point.median is not None
        _dot(axis, point.global_batch, point.median, min(point.steps), max(point.steps), held_out=point.held_out)
    heading(axis, result.study.name, "steps to the target loss")


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
