"""Writes the files of a report: the page, the Markdown, and the figures as SVG and PNG."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dpsim.codec import write_text
from dpsim.errors import ConfigError
from dpsim.report.content import Content, ReportFigure

if TYPE_CHECKING:
    from dpsim.report.charts import Chart
    from dpsim.report.page import DrawnFigure

DRIFT_CAPTION = (
    "Drift from the run on one device against the number of devices. Dots: measured, one per configuration; line: "
    "predicted beforehand. Both axes are logarithmic. Configurations that are promised to be identical have no drift "
    "and are not drawn."
)


PAGES = {"html": "index.html", "md": "report.md"}
"""The files of a report by their format."""
TABLE_FORMATS = ("csv", "parquet")
"""The formats of the tables of a report."""


def figure(name: str, title: str, caption: str, chart: Chart | None) -> ReportFigure | None:
    """Return the figure of a chart, or none where there is no chart."""
    return None if chart is None else ReportFigure(name=name, title=title, caption=caption, chart=chart)


def write_content(
    folder: Path, content: Content, figures: Iterable[ReportFigure | None], pages: Collection[str] = tuple(PAGES)
) -> list[Path]:
    """Write a report and its figures into a folder; returns the paths. Raises ``ConfigError``.

    ``pages`` are the formats of ``PAGES`` to write.
    """
    from dpsim.report.page import markdown, page

    written: list[Path] = []
    shown: list[DrawnFigure] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for drawn in filter(None, figures):
            from dpsim.report.figures import draw, inline_svg, moments, save

            wide, narrow = draw(drawn.chart), draw(drawn.chart, narrow=True)
            written += save(wide, folder, drawn.name)
            label = f"{drawn.title}: {drawn.seen}"
            of_wide = inline_svg(wide, f"{drawn.name}-wide", label)
            of_narrow = inline_svg(narrow, f"{drawn.name}-narrow", label)
            shown.append((drawn, of_wide, of_narrow, moments(drawn.chart)))
    except OSError as error:
        raise ConfigError(
            f"cannot write the report into {folder}: {error.strerror or error}",
            allowed="a folder that you may write to",
            remedy="choose another one with --output",
        ) from error
    if "md" in pages:
        written.append(folder / PAGES["md"])
        write_text(written[-1], markdown(content, [drawn for drawn, *_ in shown]))
    if "html" in pages:
        written.append(folder / PAGES["html"])
        write_text(written[-1], page(content, shown, _links(folder)))
    return written


def table_files(folder: Path, formats: Sequence[str] = TABLE_FORMATS) -> list[Path]:
    """Return the paths of all tables that a report may have in these formats."""
    return [folder / f"{name}.{kind}" for kind in formats for name in ("points", "samples", "timeline")]


def _links(folder: Path) -> list[tuple[str, str]]:
    """Return links to the Markdown, to the records and tables in the folder, and to the pages of the folders in it."""
    records = sorted(path.name for path in folder.glob("*.json"))
    tables = [path.name for path in table_files(folder) if path.is_file()]
    reports = sorted(path.parent.name for path in folder.glob("*/index.html"))
    return [
        *(("as Markdown", name) for name in [PAGES["md"]] if (folder / name).is_file()),
        *((name, name) for name in (*records, *tables)),
        *((f"{name}: report", f"{name}/index.html") for name in reports),
    ]
