"""A report as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from dpsim.report.content import Content
from dpsim.report.palette import variables
from dpsim.report.words import printable


@dataclass(frozen=True, kw_only=True)
class PageFigure:
    """A figure drawn for wide and for narrow windows, as ``<svg>`` text, and its caption."""

    title: str
    wide: str
    narrow: str
    caption: str


def page(content: Content, figures: Sequence[PageFigure], links: Sequence[tuple[str, str]] = ()) -> str:
    """The page's HTML: no script, no resource from elsewhere. ``links`` are (name, path) at its end."""
    loader = Environment(
        loader=PackageLoader("dpsim.report"),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    return loader.get_template("index.html.j2").render(
        content=content,
        colours=variables(),
        links=links,
        figures=[(f.title, Markup(f.wide), Markup(f.narrow), f.caption) for f in figures],
    )
