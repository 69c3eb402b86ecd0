"""The colours of figures and pages, each for light and for dark pages. Loads nothing.

Figures are drawn in the light colours; a page has both as CSS variables. Text needs a contrast of 4.5 to its
background, lines and areas need 3 (WCAG AA). Areas of one figure, and the lines of a panel, also stay apart for readers
who lack one kind of cone. A test computes both. Faint guide lines need neither.
"""

from __future__ import annotations

from typing import NamedTuple


class Colour(NamedTuple):
    """A colour on a light page and on a dark one."""

    light: str
    dark: str


WORDS = {
    "ink": Colour("#1c1c22", "#ececf1"),
    "muted": Colour("#5f5f6a", "#a2a2ae"),
    "accent": Colour("#0072b2", "#5ab4ea"),
    "measured": Colour("#0071b1", "#56b4e9"),
    "predicted": Colour("#b34f00", "#ff8c3a"),
}
"""Colours of text, also used for lines."""
AREAS = {
    "faint": Colour("#82828e", "#7f7f8c"),
    "forward": Colour("#3391c8", "#90cffc"),
    "backward": Colour("#00365a", "#3f87b4"),
    "update": Colour("#007551", "#2fbf95"),
    "gradients": Colour("#7a2a8c", "#c690fc"),
    "exposed": Colour("#b87700", "#f0b429"),
    "other": Colour("#85858f", "#9090a2"),
}
"""Colours of lines and areas."""
SERIES = (
    Colour("#0070b0", "#57b5ea"),
    Colour("#b44e00", "#ff8d3b"),
    Colour("#487551", "#1bab7e"),
    Colour("#a13f77", "#e39cc4"),
    Colour("#5a3f00", "#fcbd2d"),
    Colour("#005187", "#99cff3"),
    Colour("#332288", "#9099fc"),
    Colour("#6c632d", "#cfcf63"),
    Colour("#751b5a", "#c66c99"),
    Colour("#2d3636", "#c6cfc6"),
)
"""Colours of the lines of one panel, and of their labels."""
BACKS = {
    "paper": Colour("#fefefe", "#1d1d23"),
    "page": Colour("#f5f5f7", "#141418"),
}
"""Backgrounds."""
RULE = Colour("#d9d9e0", "#3a3a44")
WARN, WARN_BACK = Colour("#805300", "#f0c36a"), Colour("#fff6e0", "#2c2413")


def variables() -> dict[str, Colour]:
    """Return name of the CSS variable (without its dashes) -> colour."""
    series = {f"series{number}": colour for number, colour in enumerate(SERIES)}
    return {**WORDS, **AREAS, **series, **BACKS, "rule": RULE, "warn": WARN, "warn-back": WARN_BACK}
