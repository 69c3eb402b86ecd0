"""A report as text: one self-contained HTML page, and the same as Markdown. Also the page that lists reports."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dpsim.errors import printable
from dpsim.report.content import Content, ReportFigure
from dpsim.report.glossary import occurring
from dpsim.report.palette import variables
from dpsim.report.table import narrowed

_WIDTH = 100
"""The characters of a table's row for which a page has room; the Markdown has all columns."""
_ANSWERS, _ROWS = 3, 24
"""The sentences of a verdict (one less where cards say the same), and the rows of the main table, shown unfolded."""
DrawnFigure = tuple[ReportFigure, str, str, Sequence[Mapping[str, Any]]]
"""A figure, its ``<svg>`` for wide and for narrow windows, and what the page says while it plays each panel's step."""


@dataclass(frozen=True, kw_only=True)
class ListedReport:
    """A report in a list of reports: its folder and its main figure, both relative to the list, and its verdict."""

    folder: str
    heading: str
    question: str
    verdict: str
    figure: str | None


def page(content: Content, figures: Sequence[DrawnFigure], links: Sequence[tuple[str, str]] = ()) -> str:
    """Return the HTML page. It loads nothing, and is complete without its script, which plays steps on demand.

    ``links`` at its end are (name, path).

    The verdict, the first figure and the first table, unless that is long, can be seen; the rest is folded.
    """
    tables = [narrowed(table, _WIDTH) for table in content.tables]
    shown = _ANSWERS - bool(content.cards)
    short = bool(tables) and sum(len(section.rows) for section in tables[0].sections) <= _ROWS
    return (
        templates(escape_html=True)
        .get_template("index.html.j2")
        .render(
            content=content,
            answers=content.answers[:shown],
            more_answers=content.answers[shown:],
            main_tables=tables[:short],
            folded_tables=tables[short:],
            colours=variables(),
            links=links,
            terms=occurring(_texts(content, figures)),
            figures=[
                (each, Markup(wide), Markup(narrow), _script_data(moments)) for each, wide, narrow, moments in figures
            ],
        )
    )


def _script_data(value: Sequence[Any]) -> Markup:
    """Return JSON for a script element, which no text in it can end; nothing for nothing."""
    return Markup(json.dumps(value, separators=(",", ":")).replace("<", "\\u003c") if value else "")


def _texts(content: Content, figures: Sequence[DrawnFigure]) -> Iterator[str]:
    """Yield the texts whose terms a reader may look up: verdicts, labels, and the heads of tables and figures."""
    yield from (content.question, *content.answers)
    yield from (tile.label for card in content.cards for tile in card.tiles)
    for table in content.tables:
        yield from (table.title, *(column.head for column in table.columns))
    yield from (figure.title for figure, *_ in figures)


def markdown(content: Content, figures: Sequence[ReportFigure] = ()) -> str:
    """Return the report as Markdown: the answers, links to the figures, the tables, and how it was measured."""
    return templates(escape_html=False).get_template("report.md.j2").render(content=content, figures=figures)


def list_page(sections: Mapping[str, Sequence[ListedReport]]) -> str:
    """Return an HTML page that lists reports in sections. It loads nothing but their figures, as thumbnails."""
    template = templates(escape_html=True).get_template("list.html.j2")
    return template.render(colours=variables(), sections=sections)


def markdown_cell(text: str) -> str:
    """Return the text as one line of Markdown that is shown as it is, as a sentence and in a table."""
    shown = printable(text).replace("|", "\\|").replace("\n", " ").replace("*", "\\*").replace("<", "&lt;")
    return shown.replace("](", "]\\(")  # otherwise a name could be a link


def templates(*others: PackageLoader, escape_html: bool) -> Environment:
    """Return the templates of reports, behind those of other packages, with what all of them have in common."""
    environment = Environment(
        loader=ChoiceLoader([*others, PackageLoader("dpsim.report")]),
        autoescape=escape_html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.filters["cell"] = markdown_cell
    return environment
