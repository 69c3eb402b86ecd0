"""Drift from one device against the number of devices, measured and predicted: a panel for each kind of drift."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from dpsim.records.reproduce import MeasuredDrift, PredictedDrift, ReproduceRecord
from dpsim.report.figures.style import MEASURED, MUTED, PREDICTED, RULE, panels, styled
from dpsim.report.reproduce.content import drifts

_Pairs = Sequence[tuple[PredictedDrift, list[MeasuredDrift]]]
_PARAMETERS = "|w_n - w_1| / |w_1| after the last step"
_MEANS = "error of a device's batch-norm means, in standard deviations"


def draw(record: ReproduceRecord, *, narrow: bool = False) -> Figure:
    """For each mode that is not invariant the drift of the parameters, and that of local batch-norm statistics."""
    found = drifts(record)
    modes = list(dict.fromkeys(point.batch_norm for point, _ in found))
    kinds = [(mode, what) for mode in modes for what in (False, True)]
    shown = [(mode, what, pairs) for mode, what in kinds if (pairs := _of(found, mode, statistics=what))]

    def make() -> Figure:
        figure, axes = panels(len(shown), narrow=narrow, height_in=3.6)
        for axis, (mode, statistics, pairs) in zip(axes, shown, strict=True):
            _panel(axis, f"batch norm {mode}", pairs, statistics=statistics)
        return figure

    return styled(make)


def _of(found: _Pairs, mode: str, *, statistics: bool) -> _Pairs:
    """The points of a mode that have something to show."""
    some = [(point, measured) for point, measured in found if point.batch_norm == mode and measured]
    return [pair for pair in some if not statistics or pair[0].statistics is not None]


def _panel(axis: Axes, title: str, pairs: _Pairs, *, statistics: bool) -> None:
    line = [(p.devices, p.statistics if statistics else p.parameters) for p, _ in pairs]
    predicted = [(devices, value) for devices, value in line if value]
    dots = [
        (one.configuration.devices, (one.statistics or 0.0) if statistics else one.parameters)
        for _, measured in pairs
        for one in measured
    ]
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.grid(axis="y", color=RULE, linewidth=0.6)
    axis.set_axisbelow(True)
    if predicted:
        counts, values = zip(*predicted, strict=True)
        axis.plot(counts, values, color=PREDICTED, linewidth=1.6, marker="d", markersize=4, label="predicted")
    dots = [(devices, value) for devices, value in dots if value]
    if dots:
        axis.plot(
            *zip(*dots, strict=True), color=MEASURED, linestyle="none", marker="o", markersize=5, label="measured"
        )
    shown = [value for _, value in (*predicted, *dots)]
    if shown:
        axis.set_ylim(min(shown) / 2, max(shown) * 2)
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=9))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    devices = [point.devices for point, _ in pairs]
    axis.set_xticks(devices, [str(count) for count in devices], minor=False)
    axis.set_xlim(min(devices) / 1.2, max(devices) * 1.2)
    axis.xaxis.minorticks_off()
    axis.set_xlabel("devices")
    axis.set_title(title, loc="left", fontsize=10.5, fontweight="bold", pad=18)
    what = _MEANS if statistics else _PARAMETERS
    axis.text(0, 1.02, what, transform=axis.transAxes, color=MUTED, fontsize=8.5, va="bottom")
    if predicted or dots:
        axis.legend(frameon=False, fontsize=8.5, loc="best")
