"""The colours of pages and figures: readable in both themes, by WCAG AA."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from dpsim.report import palette
from dpsim.report.figures import style
from dpsim.report.palette import AREAS, BACKS, SERIES, WARN, WARN_BACK, WORDS, Colour

THEMES = ("light", "dark")


def luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb`` (WCAG 2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_of_black_and_white_is_21() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("back", ["paper", "page"])
def test_words_and_labels_have_a_contrast_of_4_5_and_lines_and_areas_of_3(theme: str, back: str) -> None:
    behind = getattr(BACKS[back], theme)
    words = [*WORDS.items(), *((f"series{i}", colour) for i, colour in enumerate(SERIES))]
    dim = {name for name, colour in words if contrast(getattr(colour, theme), behind) < 4.5}
    dim |= {name for name, colour in AREAS.items() if contrast(getattr(colour, theme), behind) < 3}
    assert dim == set()


@pytest.mark.parametrize("theme", THEMES)
def test_warnings_can_be_read(theme: str) -> None:
    assert contrast(getattr(WARN, theme), getattr(WARN_BACK, theme)) >= 4.5
    assert contrast(getattr(WORDS["ink"], theme), getattr(WARN_BACK, theme)) >= 4.5


def test_every_colour_is_its_own_so_that_a_figure_can_change_its_theme() -> None:
    colours: list[Colour] = list(palette.variables().values())
    assert len({colour.light for colour in colours}) == len(colours)
    assert {style.INK, style.MUTED, style.FAINT, style.RULE, *style.PARTS.values()} <= {c.light for c in colours}


def test_the_page_has_no_colour_beside_the_palette() -> None:
    template = (resources.files("dpsim.report") / "templates" / "index.html.j2").read_text(encoding="utf-8")
    assert re.findall(r"#[0-9a-fA-F]{3,8}\b(?=[;\s}])", template) == []
