"""The colours of pages and figures: readable in both themes, by WCAG AA."""

from __future__ import annotations

import itertools
import re
from importlib import resources

import numpy as np
import pytest
from numpy.typing import NDArray

from dpsim.report import palette
from dpsim.report.charts import Series
from dpsim.report.figures import style
from dpsim.report.figures.bars import DARKEST
from dpsim.report.figures.lines import LOOKS, look_of
from dpsim.report.palette import AREAS, BACKS, SERIES, WARN, WARN_BACK, WORDS, Colour

THEMES = ("light", "dark")
SIGHT = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
    "all cones": [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
}
"""What is seen, in linear RGB: Machado, Oliveira and Fernandes, IEEE TVCG 15(6), 2009, severity 1."""
XYZ = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
"""XYZ (D65) of linear sRGB: IEC 61966-2-1."""
PARTS = ("forward", "backward", "update", "gradients", "exposed", "other")


def luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb`` (WCAG 2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def linear(colour: str) -> NDArray[np.float64]:
    """Linear RGB of ``#rrggbb`` (IEC 61966-2-1)."""
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb: NDArray[np.float64]) -> NDArray[np.float64]:
    """CIE L*a*b* (D65) of linear RGB."""
    share = XYZ @ np.clip(rgb, 0, 1) / np.sum(XYZ, axis=1)
    x, y, z = np.where(share > (6 / 29) ** 3, np.cbrt(share), share / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def apart(colours: list[str], sight: str) -> float:
    """The least distance (CIE 1976) of two of the colours, as seen."""
    seen = [lab(np.array(SIGHT[sight]) @ linear(colour)) for colour in colours]
    return min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2))


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


def test_black_and_white_are_100_apart_and_red_and_green_are_confused_without_a_cone() -> None:
    assert apart(["#000000", "#ffffff"], "all cones") == pytest.approx(100, abs=1e-2)
    assert apart(["#b44e00", "#855c00"], "protanopia") < 1 < 25 < apart(["#b44e00", "#855c00"], "all cones")


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("theme", THEMES)
def test_colours_of_one_figure_can_be_told_apart_without_one_kind_of_cone(theme: str, sight: str) -> None:
    assert apart([getattr(AREAS[name], theme) for name in PARTS], sight) > 15
    assert apart([getattr(WORDS[name], theme) for name in ("measured", "predicted")], sight) > 80
    assert apart([getattr(colour, theme) for colour in SERIES], sight) > 12


def test_lines_of_one_panel_differ_by_more_than_their_colour() -> None:
    looks = [look_of(Series(name="", x=(), y=(), look=number)) for number in range(3 * len(SERIES))]
    assert len({(look["marker"], str(look["linestyle"])) for look in looks}) == len(looks)
    named = {name: look_of(Series(name="", x=(), y=(), look=name)) for name in LOOKS}
    drawn = [
        tuple(str(look.get(key)) for key in ("marker", "markerfacecolor", "linestyle", "dashes", "linewidth"))
        for look in named.values()
    ]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("theme", THEMES)
def test_the_numbers_in_the_darkest_cell_of_a_map_can_be_read(theme: str) -> None:
    paper, over = (getattr(colour, theme) for colour in (BACKS["paper"], WORDS["measured"]))
    mixed = (1 - DARKEST) * np.array(bytearray.fromhex(paper[1:])) + DARKEST * np.array(bytearray.fromhex(over[1:]))
    assert contrast(f"#{bytes(mixed.astype(np.uint8)).hex()}", getattr(WORDS["ink"], theme)) >= 4.5


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
