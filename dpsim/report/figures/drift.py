"""Drift from one device against the number of devices, measured and predicted, with a panel for each kind of drift."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from dpsim.records.reproduce import MeasuredDrift, PredictedDrift, ReproduceRecord
from dpsim.report.figures.style import MEASURED, PREDICTED, grid, heading, panels, styled
from dpsim.report.reproduce.tables import drifts

_Pairs = Sequence[tuple[PredictedDrift, list[MeasuredDrift]]]
_PARAMETERS = "|w_n - w_1| / |w_1| after the last step"
_MEANS = "error of a device's batch-norm means, in standard deviations"


def draw(record: ReproduceRecord, *, narrow: bool = False) -> Figure:
    """Return panels of the drift of the parameters and of local batch-norm statistics, for each mode that drifts."""
    measured = [(point, drift) for point, drift in drifts(record) if drift]
    shown = []
    for mode in dict.fromkeys(point.batch_norm for point, _ in measured):
        of_mode = [pair for pair in measured if pair[0].batch_norm == mode]
        of_statistics = [pair for pair in of_mode if pair[0].statistics is not None]
        shown += [(mode, pairs, statistics) for pairs, statistics in ((of_mode, False), (of_statistics, True)) if pairs]

    def make() -> Figure:
        figure, axes = panels(len(shown), narrow=narrow, height_in=3.6)
        for axis, (mode, pairs, statistics) in zip(axes, shown, strict=True):
            _panel(axis, f"batch norm {mode}", pairs, statistics=statistics)
        return figure

    return styled(make)


def _panel(axis: Axes, title: str, pairs: _Pairs, *, statistics: bool) -> None:
    predicted = [(p.devices, value) for p, _ in pairs if (value := p.statistics if statistics else p.parameters)]
    dots = [
        (drift.configuration.devices, value)
        for _, measured in pairs
        for drift in measured
        if (value := drift.statistics if statistics else drift.parameters)
    ]
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    grid(axis)
    if predicted:
        counts, values = zip(*predicted, strict=True)
        axis.plot(counts, values, color=PREDICTED, linewidth=1.6, marker="d", markersize=4, label="predicted")
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
    heading(axis, title, _MEANS if statistics else _PARAMETERS)
    if predicted or dots:
        axis.legend(frameon=False, fontsize=8.5, loc="best")
