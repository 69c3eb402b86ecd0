"""What all figures share: colours, sizes, titles, files."""

from __future__ import annotations

import io
import itertools
import re
import textwrap
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any, Literal, TypeVar

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.transforms import offset_copy

from dpsim.report import palette
from dpsim.report.palette import AREAS, BACKS, WORDS

Drawn = TypeVar("Drawn")
INK, MUTED, MEASURED, PREDICTED = (WORDS[name].light for name in ("ink", "muted", "measured", "predicted"))
FAINT, PAPER = AREAS["faint"].light, BACKS["paper"].light
PARTS = {
    "forward": AREAS["forward"].light,
    "backward": AREAS["backward"].light,
    "update": AREAS["update"].light,
    "exposed communication": AREAS["exposed"].light,
    "other": AREAS["other"].light,
}
ALLREDUCE = PARTS["exposed communication"]
RULE = palette.RULE.light
LINE_COLOURS = tuple(colour.light for colour in palette.SERIES)
MARKERS = "osD^vPX<>h"
"""The colours and the markers of the lines of one panel, in this order and again from the first."""
WIDE_IN, NARROW_IN = 10.4, 4.0
TITLE, LABEL, SMALL = 10.5, 9.0, 8.5
"""The sizes of titles, of labels, and of what has no room for a label, in points."""
_GAP = 0.075
"""The distance of labels beside a panel, as a share of its height."""
_TITLE_LETTERS = {True: 34, False: 92}
"""The letters of a line of a title in a narrow figure, and in the width of a wide one."""
_FAMILY = "'Helvetica Neue', Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
_RC: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dpsim",
    "font.size": LABEL,
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.linewidth": 0.8,
    "xtick.labelsize": LABEL,
    "ytick.labelsize": LABEL,
    "axes.labelsize": LABEL,
    "axes.titlesize": TITLE,
    "axes.titleweight": "bold",
    "legend.fontsize": LABEL,
    "legend.frameon": False,
    "xtick.major.pad": 8,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "hatch.linewidth": 0.9,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    "savefig.facecolor": PAPER,
    "text.parse_math": False,
}


def panels(
    count: int, *, narrow: bool, height_in: float, columns: int = 2, head_in: float = 0.0
) -> tuple[Figure, list[Axes]]:
    """Return a figure of ``count`` panels in ``columns`` columns, or in one if ``narrow``.

    ``head_in`` inches at the top are kept free for a legend.
    """
    across = 1 if narrow else min(columns, max(1, count))
    down = -(-count // across)
    size = (NARROW_IN if narrow else WIDE_IN, down * height_in + head_in)
    room = (0.0, 0.0, 1.0, 1 - head_in / size[1])
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(rect=room, hspace=0.06, wspace=0.05))
    axes = [figure.add_subplot(down, across, i + 1) for i in range(count)]
    for axis in axes:
        axis.spines[["top", "right", "left"]].set_visible(False)
    return figure, axes


def styled(draw: Callable[[], Drawn]) -> Drawn:
    """Return what ``draw`` makes in the style of all figures."""
    with matplotlib.rc_context(_RC):
        return draw()


def heading(axis: Axes, title: str, subtitle: str) -> None:
    """Write a panel's title, and below it what its vertical axis shows."""
    figure = axis.get_figure(root=True)
    subtitle = wrapped(subtitle, axis)
    axis.set_title(wrapped(title, axis), loc="left", pad=18 + 11 * subtitle.count("\n"))
    above = offset_copy(axis.transAxes, fig=figure, y=5, units="points")
    axis.text(0, 1, subtitle, transform=above, color=MUTED, va="bottom")


def wrapped(title: str, axis: Axes, indented: bool = False) -> str:
    """Return a title or label in lines that fit into its panel, of which names at the left may take a part."""
    return textwrap.fill(title, _letters(axis) - 4 * indented)


def _letters(axis: Axes) -> int:
    """Return how many letters of a title fit into the width of a panel."""
    figure, spec = axis.get_figure(root=True), axis.get_subplotspec()
    letters = _TITLE_LETTERS[figure is not None and figure.get_figwidth() <= NARROW_IN]
    return letters // (spec.get_gridspec().ncols if spec is not None else 1)


def grid(axis: Axes, direction: Literal["x", "y"] = "y") -> None:
    """Draw faint lines behind everything else."""
    axis.grid(axis=direction, color=RULE, linewidth=0.6)
    axis.set_axisbelow(True)


def long_names(axis: Axes, names: Sequence[str]) -> bool:
    """Whether the names of rows are too long to stand beside them, and stand above them instead."""
    return max(map(len, names), default=0) > _letters(axis) // 2 - 5


def row_names(axis: Axes, names: Sequence[str]) -> None:
    """Name the rows at 0, 1, ... of a panel: at its left, or above each row where there is no room."""
    above = long_names(axis, names)
    for number, name in enumerate(names if above else ()):
        of_axis = axis.get_yaxis_transform()
        axis.text(0, number - 0.12, name, transform=of_axis, fontsize=SMALL, color=MUTED, va="bottom", zorder=5)
    axis.set_yticks(range(0 if above else len(names)), () if above else names)


def _svg(figure: Figure) -> str:
    """Return the figure as SVG, without what no reader sees: metadata, digits, unused ids, empty groups.

    An artist whose ``gid`` is ``class:NAME`` has that class.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context(_RC):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", buffer.getvalue(), flags=re.DOTALL)
    text = re.sub(r'\bid="class:(\w+)"', r'class="\1"', text)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda named: named[0] if named[1] in used else "", text)
    text = re.sub(r' transform="rotate\(-0 [^"]*"', "", text)
    text = re.sub(r"<[^<>]*>", lambda tag: re.sub(r'(?<=[ "(-])(\d+\.\d\d)\d+', r"\1", tag[0]), text)
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"\s*([LMCQz])\s*", r"\1", path[0]).replace('" ', '"'), text)
    text = re.sub(r'style="[^"]*"', lambda style: re.sub(r"(?<=[:;]) ", "", style[0]), text)
    text = re.sub(r"font-family:[^;\"]*;?", "", text).replace("</style>", f" text{{font-family:{_FAMILY}}}</style>", 1)
    for _ in range(3):
        text = re.sub(r"<g(?: id=\"[^\"]*\")?(?:/>|>\s*</g>)", "", text)
    return re.sub(r"\n\s*", "\n", text)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write ``name.svg`` and ``name.png`` into a folder; returns their paths."""
    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    for path in paths:
        save_as(figure, path)
    return paths


def save_as(figure: Figure, path: Path, software: str | None = None) -> None:
    """Write the figure into a file, SVG or PNG by its name, in which ``software`` is named as what drew it."""
    if path.suffix.lower() == ".svg":
        path.write_text(_svg(figure) + (f"<!-- {software} -->\n" if software else ""), encoding="utf-8")
        return
    with matplotlib.rc_context(_RC):
        figure.savefig(path, dpi=160, metadata={"Software": software})


def save_dark(figure: Figure, path: Path) -> None:
    """Write the figure as SVG in the colours of dark pages."""
    text = _svg(figure)
    for colour in palette.variables().values():
        text = text.replace(colour.light, colour.dark)
    path.write_text(text, encoding="utf-8")


def inline_svg(figure: Figure, prefix: str, description: str) -> str:
    """Return the figure as an ``<svg>`` element for a page: with unique ids, and colours from the page's CSS variables.

    Screen readers read ``description`` instead.
    """
    text = _svg(figure)
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}-", text)
    for variable, colour in palette.variables().items():
        text = text.replace(colour.light, f"var(--{variable})")
    text = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', "", text, count=1)
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(description)}" ', 1)


def spread(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return positions near ``values``, at least ``gap`` apart and within ``low`` to ``high`` where there is room."""
    order = np.argsort(values, kind="stable")
    placed = np.array(values, float)
    for _ in range(200):
        moved = False
        for a, b in itertools.pairwise(order):
            short = gap - (placed[b] - placed[a])
            if short > 1e-12:
                placed[a] -= short / 2
                placed[b] += short / 2
                moved = True
        placed = np.clip(placed, low, high)
        if not moved:
            break
    return [float(v) for v in placed]


def labels_at_right(axis: Axes, labels: Sequence[tuple[float, str, str]]) -> None:
    """Draw labels (value, text, colour) to the right of the panel, moved apart where they would overlap."""
    right = axis.get_xlim()[1]
    axis.get_ylim()  # settles the limits, on which the places depend
    to_axes = axis.transData + axis.transAxes.inverted()
    heights = [float(to_axes.transform((right, value))[1]) for value, _, _ in labels]
    for height, y, (_, text, colour) in zip(heights, spread(heights, _GAP, 0.0, 1.0), labels, strict=True):
        look: Any = {"color": colour, "transform": axis.transAxes}
        axis.plot([1.0, 1.035], [height, y], linewidth=0.7, alpha=0.7, clip_on=False, **look)
        axis.text(1.045, y, text, va="center", ha="left", **look)
