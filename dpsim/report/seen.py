"""What there is to see in a figure: one sentence, made from the numbers that it draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from dpsim.report.charts import Bars, Chart, Dot, Lines, Map, Panel, Rows, Series, Steps
from dpsim.report.words import counted, percent

_MOST = 4
"""The panels that a sentence speaks of."""
_NOTHING = "nothing was measured here"
_WAIT = "exposed communication"
_TOUCHES = 0.02


def seen(chart: Chart) -> str:
    """Return a sentence on the panels, the first ones where there are many."""
    named = len(chart.panels) > 1
    parts = [
        f"{name}: {_SEEN[type(panel)](panel)}" if named else _SEEN[type(panel)](panel)
        for name, panel in zip(panel_names(chart), chart.panels[:_MOST], strict=False)
    ]
    left_out = len(chart.panels) - len(parts)
    rest = [counted(left_out, "more panel")] if left_out else []
    sentence = "; ".join([*parts, *rest]) + "."
    return sentence if named else sentence[:1].upper() + sentence[1:]


def panel_names(chart: Chart) -> list[str]:
    """Return the titles of the panels without what all have in common; with their subtitles where they are the same."""
    texts = [panel.title for panel in chart.panels]
    if len(set(texts)) < len(texts):
        texts = [", ".join(filter(None, (panel.title, getattr(panel, "subtitle", "")))) for panel in chart.panels]
    parts = [text.split(", ") for text in texts]
    shared = set.intersection(*map(set, parts))
    return [", ".join(part for part in of_one if part not in shared) or of_one[0] for of_one in parts]


def _lines(panel: Lines) -> str:
    """Return where measured and predicted values are highest or, where marked, best; else how they lie."""
    named: dict[Any, Series] = {series.look: series for series in panel.series if len(series.y)}
    if panel.marks:
        best = {mark.look: _at(panel, mark.x) for mark in panel.marks}
        return _both({look: f"best at {panel.x_label} {at}" for look, at in best.items()})
    if "measured" in named or "predicted" in named:
        dots = {look: list(zip(named[look].y, named[look].x, strict=True)) for look in named}
        dots["measured"] = dots.get("measured", []) + dots.get("held out", [])
        return _both({look: _highest(panel, dots[look]) for look in _SIDES if dots.get(look)})
    drawn = [series for series in panel.series if isinstance(series.look, int) and len(series.y)]
    if not drawn:
        return _NOTHING
    if all(series.dots for series in drawn):
        return _cloud(panel, drawn)
    last = max(series.x[-1] for series in drawn)
    ends = {series.name or "the line": series.y[-1] for series in drawn if series.x[-1] == last}
    highest = max(ends, key=lambda name: ends[name])
    return f"at {panel.x_label} {_at(panel, last)}, the highest is {highest} ({_value(panel, ends[highest])})"


def _highest(panel: Lines, dots: Sequence[tuple[float, float]]) -> str:
    """Return where values (y, x) are highest and, where that is at the first x, where they are lowest."""

    def at(dot: tuple[float, float]) -> str:
        return f"at {panel.x_label} {_at(panel, dot[1])} ({_value(panel, dot[0])})"

    high, low = max(dots), min(dots)
    if len(dots) > 1 and _value(panel, high[0]) == _value(panel, low[0]):
        return f"{_value(panel, high[0])} everywhere"
    falls = low[1] > high[1] == min(x for _, x in dots)
    return f"highest {at(high)}" + (f" and lowest {at(low)}" if falls else "")


def _cloud(panel: Lines, drawn: Sequence[Series]) -> str:
    """Return how far dots lie from the line through the panel, as a share of it."""
    dots = [(x, y) for series in drawn for x, y in zip(series.x, series.y, strict=True)]
    level = any(series.look == "ideal" and len(set(series.y)) == 1 for series in panel.series)
    apart = median(abs(y / (1.0 if level else x) - 1) for x, y in dots)
    return f"half of the {counted(len(dots), 'dot')} lie within {percent(apart)} of the line"


def _rows(panel: Rows) -> str:
    """Return the row that is highest measured and predicted or, of ratios, the one furthest from 1."""
    every = [(name, dot) for name, dots in panel.rows.items() for dot in dots]
    if not every:
        return _NOTHING
    if not panel.log:
        values = {look: [(dot.value, name) for name, dot in every if dot.look == look] for look in _SIDES}
        best = {look: max(of_look) for look, of_look in values.items() if of_look}
        return _both({look: f'highest in row "{name}" ({value:,.0f})' for look, (value, name) in best.items()})
    said = [pair for pair in every if isinstance(pair[1].look, int) or pair[1].look == "measured"] or every
    sides = {side: [dot for _, dot in said if _side(dot.value, dot.value) == side] for side in ("left", "right")}
    parts = [
        f"{len(dots)} of {counted(len(said), 'dot')} {'lies' if len(dots) == 1 else 'lie'} {side} of 1, "
        f"{len([dot for dot in dots if _side(dot.low, dot.high) == side and not dot.faint])} with the whole bar"
        for side, dots in sides.items()
        if dots
    ]
    name, dot = max(said, key=lambda pair: _distance(pair[1]))
    furthest = f"the furthest is {name} ({dot.value:.2f})"
    return "; ".join([*parts, furthest] if parts else ["every dot lies at 1"])


def _side(low: float, high: float) -> str:
    """Return on which side of 1 a range lies, or nothing where it touches 1."""
    return "left" if high < 1 else "right" if low > 1 else ""


def _distance(dot: Dot) -> float:
    return max(dot.value, 1 / dot.value) if dot.value > 0 else float("inf")


def _bars(panel: Bars) -> str:
    """Return between which shares of a measured step communication is exposed."""
    if not panel.bars:
        return _NOTHING
    shares = {name.replace("\n", " "): _share(measured) for name, measured, _ in panel.bars}
    low, high = min(shares, key=lambda name: shares[name]), max(shares, key=lambda name: shares[name])
    if shares[high] < _TOUCHES / 2:
        return "no setting leaves more than 1% of its step to exposed communication"
    of = "" if "," in panel.x_label else f"{panel.x_label} "
    least = f" and {percent(shares[low])} at {of}{low}" if low != high else ""
    return f"{_WAIT} takes {percent(shares[high])} of the measured step at {of}{high}{least}"


def _share(parts: Mapping[str, float]) -> float:
    return parts.get(_WAIT, 0.0) / (sum(parts.values()) or 1.0)


def _map(panel: Map) -> str:
    """Return the best cell."""
    (across, down), cell = max(panel.cells.items(), key=lambda item: item[1].share)
    return f"the best cell is {panel.x_label} {across}, {panel.y_label} {down} ({cell.text.split()[0]})"


def _steps(panel: Steps) -> str:
    """Return how much communication is exposed, and how many buckets wait for the link after they are full."""
    measured, predicted = map(percent, panel.exposed)
    text = f"{_WAIT} takes {measured} of the measured step (the median of all) and {predicted} of the predicted step"
    if filled := panel.buckets[0]:
        length_s = float(panel.measured.end_s.max() - panel.measured.start_s.min())
        late = sum(bucket.sent_s - bucket.full_s > _TOUCHES * length_s for bucket in filled)
        text += f"; full buckets that wait for the link: {late} of {len(filled)}"
    return text


def _at(panel: Lines, x: float) -> str:
    """Return a position as the axis names it."""
    ticks: Iterator[str] = (text for at, text in (panel.x_ticks or {}).items() if at == x)
    return next(ticks, panel.x_text(x)).replace("\n", " ")


def _value(panel: Lines, y: float) -> str:
    """Return a value to three digits."""
    return panel.y_text(float(f"{y:.3g}"))


_SIDES = ("measured", "predicted")


def _both(found: Mapping[Any, str]) -> str:
    """Return what is found of what was measured, and of what was predicted."""
    if len(found) == len(_SIDES) and len(set(found.values())) == 1:
        return f"measured and predicted are {found['measured']}"
    return ", ".join(f"{side} is {found[side]}" for side in _SIDES if side in found)


_SEEN: dict[type[Panel], Callable[[Any], str]] = {Lines: _lines, Rows: _rows, Bars: _bars, Map: _map, Steps: _steps}
