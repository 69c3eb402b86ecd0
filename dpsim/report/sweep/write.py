"""Writes the report of a sweep and draws its figures."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from dpsim.records.comparison import Comparison, SweepData
from dpsim.records.reproduce import ReproduceRecord
from dpsim.report.charts import Bars, Chart, Steps
from dpsim.report.content import ReportFigure, environment_facts
from dpsim.report.drift import drift_chart
from dpsim.report.quality import quality_figures
from dpsim.report.sweep.charts import parts_chart, step_chart
from dpsim.report.sweep.content import content
from dpsim.report.sweep.facts import run_facts
from dpsim.report.sweep.question import QUESTIONS
from dpsim.report.sweep.tables import band_name
from dpsim.report.sweep.timelines import Timelines
from dpsim.report.words import field_name
from dpsim.report.write import DRIFT_CAPTION, PAGES, figure, write_content
from dpsim.schedule import LOSS_EVENT, OTHER_EVENT, OVERHEAD_EVENT

_TIMELINE = (
    "One training step of the setting that trains most samples per second on the most devices, measured above and "
    "below as the scored prediction has it, on one time axis. Of the kept steps, the one nearest to the median of the "
    "table is shown, on the rank that was ready last; where that rank's part is shorter than the step, both lengths "
    "are stated."
)
_BUCKETS = (
    " A bucket, as high as it has bytes, fills while backward computes its gradients; the line from it leads to the "
    "collective that sends it."
)
_HATCHED = " Where computation waits for communication by more than 1% of the step, the row is hatched."
_DOTTED = " Dotted: a collective waits for another rank to begin it."
_PARTS = (
    "Where a step's time goes at each setting: measured first, then, hatched, predicted. A step and its "
    "exposed communication are those of the table; the rest is divided as in one step on the rank that was ready last. "
    "Where several fields differ, the settings that train fastest stand first."
)
_OTHER = " Other: the loss and the beginning of the step."
_DRAWN = 0.001
"""A part of this share of a step can be seen."""


def write_report(folder: Path, data: SweepData, pages: Collection[str] = tuple(PAGES)) -> list[Path]:
    """Write ``index.html``, ``report.md`` and the figures into ``folder``; returns the paths.

    Loads matplotlib. Raises ``ConfigError`` when the folder cannot be written to.
    """
    comparison, predictions, results = data.comparison, data.predictions, data.results
    facts = run_facts(comparison, predictions, results), environment_facts(results.environment)
    figures = _figures(comparison, Timelines.of(data.scored, results), data.drift)
    return write_content(folder, content(comparison, *facts), figures, pages)


def _figures(
    comparison: Comparison, timelines: Timelines, record: ReproduceRecord | None
) -> Iterator[ReportFigure | None]:
    if not comparison.groups:
        return
    report = QUESTIONS.find(comparison.experiment.question)
    caption = report.caption.format(
        band=band_name(comparison), threshold=field_name("fusion_threshold_bytes", comparison.points[0].runtime)
    )
    yield figure(report.figure_name, report.figure_title, caption, report.chart(comparison))
    yield from report.more_charts(comparison)
    if record is not None:
        yield figure("drift", "Drift", DRIFT_CAPTION, drift_chart(record))
    if comparison.quality is not None:
        yield from quality_figures(comparison.quality)
    steps, parts = step_chart(comparison, timelines), parts_chart(comparison, timelines)
    if steps is not None:
        yield figure("timeline", "One step, measured and predicted", steps_caption(steps), steps)
    yield figure("where_time_goes", "Where the time goes", parts_caption(parts), parts)


def steps_caption(chart: Chart) -> str:
    """Return how to read measured and predicted steps; it names what one of the panels draws."""
    panels = [panel for panel in chart.panels if isinstance(panel, Steps)]
    kinds = np.concatenate([step.kind for panel in panels for step in (panel.measured, panel.predicted)])
    other = bool(np.isin(kinds, (OVERHEAD_EVENT, LOSS_EVENT, OTHER_EVENT)).any())
    buckets, waits = any(any(panel.buckets) for panel in panels), any(panel.waits_s for panel in panels)
    return _TIMELINE + _BUCKETS * buckets + _HATCHED + _DOTTED * waits + _OTHER * other


def parts_caption(chart: Chart) -> str:
    """Return how to read the bars; it explains the other part where some bar has one that can be seen."""
    stacks = [stack for panel in chart.panels if isinstance(panel, Bars) for _, *pair in panel.bars for stack in pair]
    return _PARTS + _OTHER * any(stack.get("other", 0.0) > _DRAWN * sum(stack.values()) for stack in stacks)
