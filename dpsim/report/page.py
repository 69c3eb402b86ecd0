"""A report as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from dpsim.report.content import Content


@dataclass(frozen=True, kw_only=True)
class PageFigure:
    """A figure drawn for wide and for narrow windows, as ``<svg>`` text, and its caption."""

    title: str
    wide: str
    narrow: str
    caption: str


def page(content: Content, figures: Sequence[PageFigure]) -> str:
    """The page's HTML: no script, no resource from elsewhere."""
    loader = Environment(
        loader=PackageLoader("dpsim.report"), autoescape=select_autoescape(default=True), undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return loader.get_template("index.html.j2").render(
        content=content, figures=[(f.title, Markup(f.wide), Markup(f.narrow), f.caption) for f in figures]
    )
