"""The charts of a study of quality: the gap, the divergence, and the steps to a target loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dpsim.model.critical_batch import StepsFit, power_law
from dpsim.model.norm_gap import FORM, GapFit
from dpsim.records.quality import DivergenceResult, GapResult, StepsResult
from dpsim.report.charts import Lines, Look, Series

HEIGHT_IN = 3.6
_CURVE = 60


def gap_panel(result: GapResult) -> Lines:
    """Return measured gaps with their intervals, and the fitted curve."""
    study, parameters = result.study, result.predicted.parameters
    dots = [(p.local_batch, p.gap.mean, p.gap.low, p.gap.high, p.held_out) for p in result.points]
    series = _dots(dots)
    if parameters:
        fit = GapFit(form=FORM, global_batch=study.global_batch, **parameters)
        x = np.geomspace(min(p.local_batch for p in result.points), study.global_batch, _CURVE)
        series.append(Series(name="predicted", x=list(x), y=[fit.gap(b) for b in x], look="predicted"))
    batches = sorted({*(p.local_batch for p in result.points), study.global_batch})
    return Lines(
        title=f"{study.model}, global batch {study.global_batch}",
        subtitle=f"gap in log(training loss), {study.dataset}",
        x_label="local batch",
        series=series,
        x_ticks={float(batch): str(batch) for batch in batches},
        log_x=True,
        names="none",
    )


def divergence_panel(result: DivergenceResult) -> Lines:
    """Return predicted against measured divergences, and those of independent rows."""
    study = result.study
    pairs = [(value, point) for point, value in zip(result.points, result.measured, strict=True) if value > 0]
    ends = [min(value for value, _ in pairs) / 1.5, max(value for value, _ in pairs) * 1.5]
    series = [
        Series(name="", x=ends, y=ends, look="baseline"),
        Series(
            name="independent rows",
            x=[value for value, _ in pairs],
            y=[point.independent_rows for _, point in pairs],
            look="baseline",
            dots=True,
        ),
    ]
    for number, statistic in enumerate(("mean", "variance")):
        chosen = [(value, point.predicted) for value, point in pairs if point.statistic == statistic]
        x, y = [value for value, _ in chosen], [value for _, value in chosen]
        series.append(Series(name=f"{statistic}s", x=x, y=y, look=number, dots=True))
    return Lines(
        title=f"{study.model}, after {study.steps} steps",
        subtitle=f"predicted divergence (RMS), {study.dataset}",
        x_label="measured",
        series=series,
        log_x=True,
        log_y=True,
        names="legend",
    )


def steps_panel(result: StepsResult) -> Lines:
    """Return measured steps, the fit and the power law."""
    study = result.study
    reached = [(point, point.median) for point in result.points if point.median is not None]
    batches = sorted({point.global_batch for point in result.points})
    series = _dots([(p.global_batch, median, min(p.steps), max(p.steps), p.held_out) for p, median in reached])
    if result.predicted.parameters:
        x = list(np.geomspace(batches[0], batches[-1], _CURVE))
        fit = StepsFit(**result.predicted.parameters)
        medians = {point.global_batch: median for point, median in reached if not point.held_out}
        series.append(Series(name="predicted", x=x, y=[fit.steps(b) for b in x], look="predicted"))
        series.append(Series(name="", x=x, y=[power_law(medians, b) for b in x], look="baseline"))
    return Lines(
        title=study.model,
        subtitle=f"steps to a training loss of {study.target_loss:g}, {study.dataset}",
        x_label="global batch",
        series=series,
        x_ticks={float(batch): str(batch) for batch in batches},
        log_x=True,
        log_y=True,
        names="none",
    )


def _dots(dots: Sequence[tuple[float, float, float, float, bool]]) -> list[Series]:
    """Return the dots (x, value, low, high, held out): those that were fitted, and those that were held out."""
    looks: dict[bool, Look] = {False: "measured", True: "held out"}
    series = []
    for held_out, look in looks.items():
        x, y, low, high = ([dot[i] for dot in dots if dot[4] == held_out] for i in range(4))
        series.append(Series(name="", x=x, y=y, low=low, high=high, look=look))
    return series


PANELS: dict[str, Callable[[Any], Lines]] = {
    "gap": gap_panel,
    "divergence": divergence_panel,
    "steps_to_target": steps_panel,
}
"""The panel of a result of each part of a study."""
