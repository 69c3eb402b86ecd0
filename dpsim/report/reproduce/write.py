"""Writes the report of a reproduction."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from dpsim.records.reproduce import ReproduceRecord
from dpsim.report.reproduce.content import content
from dpsim.report.write import DRIFT_CAPTION, PAGES, ReportFigure, write_content


def write_reproduce_report(folder: Path, record: ReproduceRecord, pages: Collection[str] = tuple(PAGES)) -> list[Path]:
    """Write the page, the Markdown and, where drift was measured, its figure. Raises ``ConfigError``."""
    from dpsim.report.figures import drift

    figures = []
    if drift.panels_of(record):
        wide, narrow = drift.draw(record), drift.draw(record, narrow=True)
        figures.append(ReportFigure(name="drift", title="Drift", caption=DRIFT_CAPTION, wide=wide, narrow=narrow))
    return write_content(folder, content(record), figures, pages)
