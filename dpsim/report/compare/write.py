"""Writes the report of compared runs."""

from __future__ import annotations

from pathlib import Path

from dpsim.codec import write_text
from dpsim.records.run_comparison import RunComparison
from dpsim.report.compare.content import content
from dpsim.report.compare.result import points_csv
from dpsim.report.write import ReportFigure, write_content

_CAPTION = (
    "Ratio of each setting's time to that of {first}, with its 95% interval, sorted: left of the line at 1 it is "
    "faster. Filled: called faster or slower; hollow: not distinguishable. Band: A/A noise, by how much two "
    "runs of the same setting differ. The axis is logarithmic."
)


def write_comparison(folder: Path, comparison: RunComparison) -> list[Path]:
    """Write ``index.html``, ``report.md``, the figure and ``points.csv``; returns the paths. Raises ``ConfigError``."""
    from dpsim.report.figures import ratio

    shown, left_out = ratio.shown_rows(comparison)
    caption = _CAPTION.format(first=comparison.runs[0].label)
    if left_out:
        caption += f" Shown are the {len(shown)} settings that differ the most; {left_out} more are in the table."
    figure = ReportFigure(
        name="ratio",
        title="Ratio by setting",
        caption=caption,
        wide=ratio.draw(comparison),
        narrow=ratio.draw(comparison, narrow=True),
    )
    path = folder / "points.csv"
    write_text(path, points_csv(comparison))
    return [*write_content(folder, content(comparison), [figure]), path]
