"""Drift from one device against the number of devices, measured and predicted, with a panel for each kind of drift."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from dpsim.records.reproduce import MeasuredDrift, PredictedDrift, ReproduceRecord
from dpsim.report.figures.style import MEASURED, PREDICTED, grid, heading, one_panel_each
from dpsim.report.reproduce.tables import drifts

_Pairs = Sequence[tuple[PredictedDrift, list[MeasuredDrift]]]
_PARAMETERS = "|w_n - w_1| / |w_1| after the last step"
_MEANS = "error of a device's batch-norm means, in standard deviations"


@dataclass(frozen=True, kw_only=True)
class DriftPanel:
    """Predicted and measured drifts by number of devices; ``statistics``: those of batch norm, not the parameters'."""

    title: str
    pairs: _Pairs
    statistics: bool


def draw(record: ReproduceRecord, *, narrow: bool = False) -> Figure:
    """Return panels of the drift of the parameters and of local batch-norm statistics, for each mode that drifts."""
    return one_panel_each(panels_of(record), panel, narrow=narrow, height_in=3.6)


def panels_of(record: ReproduceRecord) -> list[DriftPanel]:
    """Return what the panels show: for each mode the drift of the parameters, then that of its statistics.

    A mode that was measured on one number of devices has no panel: its one dot stands in the table.
    """
    measured = [(point, drift) for point, drift in drifts(record) if drift]
    shown = []
    for mode in dict.fromkeys(point.batch_norm for point, _ in measured):
        of_mode = [pair for pair in measured if pair[0].batch_norm == mode]
        of_statistics = [pair for pair in of_mode if pair[0].statistics is not None]
        for pairs, statistics in ((of_mode, False), (of_statistics, True)):
            if len({point.devices for point, _ in pairs}) > 1:
                shown.append(DriftPanel(title=f"batch norm {mode}", pairs=pairs, statistics=statistics))
    return shown


def panel(axis: Axes, shown: DriftPanel) -> None:
    """Draw one kind of drift of one mode, measured and predicted."""
    pairs, statistics = shown.pairs, shown.statistics
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
    drawn = [value for _, value in (*predicted, *dots)]
    if drawn:
        axis.set_ylim(min(drawn) / 2, max(drawn) * 2)
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=9))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    devices = [point.devices for point, _ in pairs]
    axis.set_xticks(devices, [str(count) for count in devices], minor=False)
    axis.set_xlim(min(devices) / 1.2, max(devices) * 1.2)
    axis.xaxis.minorticks_off()
    axis.set_xlabel("devices")
    heading(axis, shown.title, _MEANS if statistics else _PARAMETERS)
    if predicted or dots:
        axis.legend(frameon=False, fontsize=8.5, loc="best")
