"""Draws pairs of stacked bars, and maps of cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from dpsim.report.charts import Bars, Map
from dpsim.report.figures.style import (
    INK,
    MEASURED,
    MUTED,
    PAPER,
    PARTS,
    SMALL,
    grid,
    heading,
    long_names,
    row_names,
    wrapped,
)

_WIDTH, _HATCH = 0.36, "////"
FAINTEST, DARKEST = 0.06, 0.45


def _colour(part: str) -> str:
    return PARTS.get(part, PARTS["backward"])


def draw(axis: Axes, shown: Bars, *, narrow: bool = False) -> None:
    """Draw a panel of bars: measured on the left, predicted, hatched, on the right; or lying, measured above."""
    names, lying = [name for name, *_ in shown.bars], shown.lying
    above = lying and long_names(axis, names)
    width = 0.25 if above else _WIDTH
    for number, (_, *pair) in enumerate(shown.bars):
        for side, stack in zip((-1, 1), pair, strict=True):
            begin, at = 0.0, number + side * (width / 2 + 0.02) + 0.2 * above
            for part, value in stack.items():
                look: dict[str, Any] = {"facecolor": _colour(part), "edgecolor": PAPER, "linewidth": 0.5}
                if side > 0:
                    look = {"facecolor": PAPER, "edgecolor": _colour(part), "linewidth": 0.8, "hatch": _HATCH}
                if lying:
                    axis.barh(at, value, width, left=begin, **look)
                else:
                    axis.bar(at, value, width, bottom=begin, **look)
                begin += value
    if lying:
        row_names(axis, names)
        axis.set_ylim(len(names) - 0.4, -0.6)
        axis.set_ylabel(shown.x_label)
        grid(axis, "x")
    else:
        axis.set_xlim(-0.6, len(names) - 0.4)
        axis.set_xticks(range(len(names)), names)
        axis.set_xlabel(wrapped(shown.x_label, axis))
        grid(axis)
    heading(axis, shown.title, shown.subtitle)


def legend(panels: Sequence[Bars]) -> list[Patch]:
    """Return the keys of the parts that some bar has."""
    parts = dict.fromkeys(part for panel in panels for _, measured, _ in panel.bars for part in measured)
    predicted = Patch(facecolor=PAPER, edgecolor=MUTED, hatch=_HATCH, label="hatched: predicted")
    return [*(Patch(color=_colour(part), label=part) for part in parts), predicted]


def draw_map(axis: Axes, shown: Map, *, narrow: bool = False) -> None:
    """Draw a panel of cells."""
    across, down = shown.across, shown.down
    for (column, row), cell in shown.cells.items():
        corner = across.index(column), down.index(row)
        x, y = corner[0] + 0.5, corner[1] + 0.5
        alpha = FAINTEST + (DARKEST - FAINTEST) * cell.share**2
        axis.add_patch(Rectangle(corner, 1, 1, facecolor=MEASURED, alpha=alpha, edgecolor="none"))
        edge = {"edgecolor": INK, "linewidth": 1.6} if cell.strong else {"edgecolor": PAPER, "linewidth": 1.0}
        axis.add_patch(Rectangle(corner, 1, 1, fill=False, **edge))  # type: ignore[arg-type]
        axis.text(x, y - 0.15, cell.text, ha="center", va="center", color=INK)
        axis.text(x, y + 0.22, cell.below, ha="center", va="center", fontsize=SMALL, color=INK)
    axis.set_xlim(0, len(across))
    axis.set_ylim(len(down), 0)
    axis.set_xticks([column + 0.5 for column in range(len(across))], list(across))
    axis.set_yticks([row + 0.5 for row in range(len(down))], list(down))
    axis.set_xlabel(wrapped(shown.x_label, axis))
    axis.set_ylabel(shown.y_label)
    axis.spines[["bottom"]].set_visible(False)
    heading(axis, shown.title, shown.subtitle)
