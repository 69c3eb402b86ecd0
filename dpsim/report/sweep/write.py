"""Writes the report of a sweep and draws its figures."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from dpsim.records.comparison import Comparison
from dpsim.records.reproduce import ReproduceRecord
from dpsim.records.sweep import Predictions, Results
from dpsim.report.content import environment_facts
from dpsim.report.quality.write import quality_figures
from dpsim.report.sweep.content import REPORTS, content
from dpsim.report.sweep.facts import run_facts
from dpsim.report.sweep.tables import band_name
from dpsim.report.sweep.timelines import Timelines
from dpsim.report.words import field_name
from dpsim.report.write import DRIFT_CAPTION, PAGES, ReportFigure, write_content

_TIMELINE = (
    "One training step of the setting that trains most samples per second on the most devices, measured above and "
    "predicted below on one time axis. Of the kept steps, the one nearest to the median of the table is shown, "
    "on the rank that was ready last. The predicted one has the length of the table. "
    "Hatched: computation waits for communication. Dotted: a collective waits for another rank to begin it. "
    "Other: the loss and the beginning of the step."
)
_MAP = (
    "Samples per second at each setting, measured above and predicted below: the darker, the faster. ★ best measured, "
    "◆ best predicted of the group."
)
_PARTS = (
    "Where a step's time goes at each setting: measured on the left, predicted (hatched) on the right. A step and its "
    "exposed communication are those of the table; the rest is divided as in one step on the rank that was ready last. "
    "Other: the loss and the beginning of the step. Where several fields differ, the settings that train fastest stand "
    "first."
)


def write_report(
    folder: Path,
    predictions: Predictions,
    results: Results,
    comparison: Comparison,
    drift: ReproduceRecord | None = None,
    pages: Collection[str] = tuple(PAGES),
) -> list[Path]:
    """Write ``index.html``, ``report.md`` and the figures into ``folder``; returns the paths.

    ``comparison`` is ``dpsim.harness.sweep.compare.compare(predictions, results, drift)``. Loads matplotlib. Raises
    ``ConfigError`` when the folder cannot be written to.
    """
    facts = run_facts(comparison, predictions, results), environment_facts(results.environment)
    figures = list(_figures(comparison, Timelines.of(predictions, results), drift))
    return write_content(folder, content(comparison, *facts), figures, pages)


def _figures(comparison: Comparison, timelines: Timelines, record: ReproduceRecord | None) -> Iterator[ReportFigure]:
    if not comparison.groups:
        return
    from dpsim.report.figures import drift, setting_map, timeline, where_time_goes

    report = REPORTS[comparison.experiment.question]
    yield ReportFigure(
        name=report.figure_name,
        title=report.figure_title,
        caption=report.caption.format(
            band=band_name(comparison), threshold=field_name("fusion_threshold_bytes", comparison.points[0].runtime)
        ),
        wide=report.figure(comparison, False),
        narrow=report.figure(comparison, True),
    )
    if comparison.experiment.question == "settings" and setting_map.fields(comparison) is not None:
        yield ReportFigure(
            name="map",
            title="The map of the settings",
            caption=_MAP,
            wide=setting_map.draw(comparison),
            narrow=setting_map.draw(comparison, narrow=True),
        )
    if record is not None and drift.panels_of(record):
        yield ReportFigure(
            name="drift",
            title="Drift",
            caption=DRIFT_CAPTION,
            wide=drift.draw(record),
            narrow=drift.draw(record, narrow=True),
        )
    if comparison.quality is not None:
        yield from quality_figures(comparison.quality)
    wide, narrow = timeline.draw(comparison, timelines), timeline.draw(comparison, timelines, narrow=True)
    if wide is not None and narrow is not None:
        yield ReportFigure(
            name="timeline",
            title="One step, measured and predicted",
            caption=_TIMELINE,
            wide=wide,
            narrow=narrow,
        )
    yield ReportFigure(
        name="where_time_goes",
        title="Where the time goes",
        caption=_PARTS,
        wide=where_time_goes.draw(comparison, timelines),
        narrow=where_time_goes.draw(comparison, timelines, narrow=True),
    )
