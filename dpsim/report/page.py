"""A report as text: one self-contained HTML page, and the same as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dpsim.report.content import Content
from dpsim.report.palette import variables
from dpsim.report.words import printable


@dataclass(frozen=True, kw_only=True)
class PageFigure:
    """A figure as ``<svg>`` text for wide and for narrow windows; ``NAME.svg`` is its file."""

    name: str
    title: str
    caption: str
    wide: str
    narrow: str


def page(content: Content, figures: Sequence[PageFigure], links: Sequence[tuple[str, str]] = ()) -> str:
    """Return the HTML page: no script, nothing loaded from elsewhere. ``links`` at its end are (name, path)."""
    return (
        _templates(escape_html=True)
        .get_template("index.html.j2")
        .render(
            content=content,
            colours=variables(),
            links=links,
            figures=[(f.title, Markup(f.wide), Markup(f.narrow), f.caption) for f in figures],
        )
    )


def markdown(content: Content, figures: Sequence[PageFigure] = ()) -> str:
    """Return the report as Markdown: the answers, links to the figures, the tables, and how it was measured."""
    return _templates(escape_html=False).get_template("report.md.j2").render(content=content, figures=figures)


def markdown_cell(text: str) -> str:
    """Return the text as one line of Markdown that is shown as it is, in a table too."""
    return printable(text).replace("|", "\\|").replace("\n", " ").replace("*", "\\*").replace("<", "&lt;")


def _templates(*, escape_html: bool) -> Environment:
    templates = Environment(
        loader=PackageLoader("dpsim.report"),
        autoescape=escape_html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    templates.filters["cell"] = markdown_cell
    return templates
