"""What figures show, as numbers and labels: curves and clouds of points, rows of dots, stacked bars, maps and steps.

Nothing here loads matplotlib; ``dpsim.report.figures`` draws each kind of panel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dpsim.timeline import Timeline

Look = Literal["measured", "held out", "predicted", "baseline", "ideal", "own"]
Span = tuple[float, float]
_SHORT, _FEW = 6, 12
"""The letters of names, and how many of them, that stand below upright bars."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """Values over x, with the ends of their intervals where they have some.

    ``look`` says what they are, or is the number of one of several series, which has a colour and a marker of its own.
    ``dots``: no line connects the values.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    look: Look | int
    dots: bool = False


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A point that stands out, with a label above or below everything that is drawn."""

    text: str
    x: float
    y: float
    look: Look
    label: bool = True
    below: bool = False


@dataclass(frozen=True, kw_only=True)
class Lines:
    """A panel of series over one horizontal axis; also a cloud of points, predicted over measured.

    ``x_ticks`` and ``y_ticks`` label positions; without them round numbers are written by ``x_text`` and ``y_text``.
    ``names`` says where the names of the series stand. ``verticals`` are thin lines at x.
    """

    title: str
    subtitle: str
    x_label: str
    series: Sequence[Series]
    x_ticks: Mapping[float, str] | None = None
    y_ticks: Mapping[float, str] | None = None
    x_text: Callable[[float], str] = "{:g}".format
    y_text: Callable[[float], str] = "{:g}".format
    log_x: bool = False
    log_y: bool = False
    x_span: Span | None = None
    y_span: Span | None = None
    names: Literal["right", "legend", "none"] = "right"
    marks: Sequence[Mark] = ()
    verticals: Sequence[tuple[float, Look]] = ()

    def within(self, reach: float) -> Lines:
        """Return the panel from 0 up to ``reach`` times what is no baseline; baselines above that are only named."""
        top = max(max(each.high or each.y) for each in self.series if each.look not in ("baseline", "ideal"))
        above = [each for each in self.series if each.look in ("baseline", "ideal") and each.y[-1] > reach * top]
        shown = [each for each in self.series if each not in above]
        highest = max(min(reach * top, max([*each.high, *each.y])) for each in shown)
        hidden = "; ".join(f"{each.name}, {self.y_text(each.y[-1])}" for each in above if math.isfinite(each.y[-1]))
        return replace(
            self,
            series=shown,
            y_span=(0.0, highest * 1.12),
            subtitle=self.subtitle + (f". Not drawn: {hidden}." if hidden else ""),
        )


@dataclass(frozen=True, kw_only=True)
class Dot:
    """A value with its interval in a row; ``look`` as that of a series, ``faint`` where it tells nothing."""

    value: float
    low: float
    high: float
    look: Look | int
    faint: bool = False


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A panel with a row of dots for each name; ``bands`` are ranges of noise behind the rows.

    ``log``: ratios, around a line at 1. ``legend`` names the series of the dots.
    """

    title: str
    subtitle: str
    x_label: str
    rows: Mapping[str, Sequence[Dot]]
    bands: Sequence[Span | None] = ()
    log: bool = False
    legend: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Bars:
    """A panel with a pair of bars for each name, measured and predicted, each stacked from part -> value.

    ``x_label`` says what the names are. Bars with longer names lie.
    """

    title: str
    subtitle: str
    x_label: str
    bars: Sequence[tuple[str, Mapping[str, float], Mapping[str, float]]]

    @property
    def lying(self) -> bool:
        """Whether the names are too long, or too many, to stand below upright bars."""
        lines = [line for name, *_ in self.bars for line in name.split("\n")]
        return max(map(len, lines)) > _SHORT or len(self.bars) > _FEW


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell of a map, the darker the larger its ``share`` of the best; ``strong`` where it is one of the best."""

    share: float
    text: str
    below: str
    strong: bool = False


@dataclass(frozen=True, kw_only=True)
class Map:
    """A panel of cells by their values across and down."""

    title: str
    subtitle: str
    x_label: str
    y_label: str
    cells: Mapping[tuple[str, str], Cell]
    across: Sequence[str]
    down: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A bucket of gradients in a step, in seconds: when backward begins and ends to fill it, and when it is sent."""

    begin_s: float
    full_s: float
    sent_s: float
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Steps:
    """A panel of one step on one rank, measured above predicted, each with a label; ``waits_s`` of that rank.

    ``buckets``, measured and predicted, are empty where it is not known which gradients a collective sums.
    ``exposed`` are the shares of exposed communication in the measured and in the predicted step of the table.
    """

    title: str
    measured: Timeline
    predicted: Timeline
    labels: tuple[str, str]
    exposed: tuple[float, float]
    waits_s: Sequence[Span] = ()
    buckets: tuple[Sequence[Bucket], Sequence[Bucket]] = ((), ())


Panel = Lines | Rows | Bars | Map | Steps


@dataclass(frozen=True, kw_only=True)
class Chart:
    """The panels of a figure, each ``height_in`` inches high, side by side in so many columns where there is room."""

    panels: Sequence[Panel]
    height_in: float
    columns: int = 2
