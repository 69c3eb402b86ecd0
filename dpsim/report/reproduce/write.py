"""Writes a reproduction's report: the page, the Markdown, and the drift as a figure where there is any."""

from __future__ import annotations

from pathlib import Path

from dpsim.records.reproduce import ReproduceRecord
from dpsim.report.reproduce.content import content
from dpsim.report.write import DRIFT, write_content


def write_reproduce_report(folder: Path, record: ReproduceRecord) -> list[Path]:
    """Write ``index.html``, ``report.md`` and the figure; returns the paths. Raises ``ConfigError``."""
    figures = []
    if record.drift:
        from dpsim.report.figures import drift

        figures.append(("drift", "Drift", DRIFT, drift.draw(record), drift.draw(record, narrow=True)))
    return write_content(folder, content(record), figures)
