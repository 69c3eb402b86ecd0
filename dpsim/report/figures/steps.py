"""Draws one step as it was measured and as it was predicted, on one time axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import blended_transform_factory

from dpsim.report.charts import Bucket, Steps
from dpsim.report.figures.style import (
    ALLREDUCE,
    FAINT,
    INK,
    MUTED,
    PAPER,
    PARTS,
    grid,
    wrapped,
)
from dpsim.report.palette import AREAS
from dpsim.schedule import COMMUNICATION_LANE, COMPUTE_LANE, KINDS, WAIT_EVENT
from dpsim.timeline import Timeline

_COMMUNICATION = ("allreduce", "reduce-scatter", "all-gather", "synchronise", "receive")
_COLOURS = {**PARTS, **dict.fromkeys(_COMMUNICATION, ALLREDUCE), "recompute": PARTS["forward"]}
_GRADIENTS = AREAS["gradients"].light
_LEGEND = {
    **{part: PARTS[part] for part in ("forward", "backward", "update")},
    "communication": ALLREDUCE,
    "other": PARTS["other"],
}
_BUCKET_LANE = -1
_LANES = {
    ("measured", COMPUTE_LANE): 4.85,
    ("measured", _BUCKET_LANE): 4.2,
    ("measured", COMMUNICATION_LANE): 3.3,
    ("predicted", COMPUTE_LANE): 1.75,
    ("predicted", _BUCKET_LANE): 1.1,
    ("predicted", COMMUNICATION_LANE): 0.2,
}
_NAMES = {COMPUTE_LANE: "compute", _BUCKET_LANE: "buckets", COMMUNICATION_LANE: "communication"}
_TALL = 0.62
_REACH = 1.1
"""The time of the axis over that of the longer step."""
_DOTS = "...."
_VISIBLE = 0.01
"""A gap of this share of a step is hatched."""
_MOVING, _SENT, _PANEL = "class:moving", "class:sent", "class:panel"
"""Classes of what the animation of a page shows little by little, of the lines that buckets move along, of the axes."""


def draw(axis: Axes, shown: Steps, *, narrow: bool = False) -> None:
    """Draw a panel."""
    steps = (shown.measured, shown.predicted)
    axis.patch.set_gid(_PANEL)
    ends_ms = [_rows(axis, step) for step in steps]
    for step, filled in zip(steps, shown.buckets, strict=True):
        _buckets(axis, filled, step)
    origin_s = float(shown.measured.start_s.min())
    _spans(axis, shown.waits_s, origin_s, ("measured", COMMUNICATION_LANE), FAINT, _DOTS, 4)
    reach = max(ends_ms)
    axis.set_xlim(0, reach * _REACH)
    axis.set_ylim(0.0, 6.4)
    for step, end, label in zip(steps, ends_ms, shown.labels, strict=True):
        y = _LANES[(step.source, COMPUTE_LANE)]
        name = axis.text(0, y + 1.26, f"{step.source}: ", fontweight="bold", color=INK, va="center")
        if narrow:  # there is no name at the left of this row
            name.set(
                x=0.02, transform=blended_transform_factory(axis.figure.transFigure, axis.transData), in_layout=False
            )
        axis.annotate(label, (1, 0.5), xycoords=name, color=MUTED, va="center", in_layout=False)
        axis.plot([end] * 2, [_LANES[(step.source, COMMUNICATION_LANE)], y + _TALL + 0.1], color=INK, linewidth=1)
        axis.text(end + reach * 0.01, y - 0.39, f"{end:.2f} ms", color=INK, va="center")
    lanes = {lane: y for lane, y in _LANES.items() if lane[1] != _BUCKET_LANE or any(shown.buckets)}
    axis.set_yticks([y + _TALL / 2 for y in lanes.values()], [_NAMES[lane] for _, lane in lanes])
    grid(axis, "x")
    axis.set_xlabel("milliseconds since the step began")
    axis.xaxis.set_major_locator(MaxNLocator(5 if narrow else 9, steps=(1, 2, 2.5, 5, 10)))
    axis.set_title(wrapped(shown.title, axis, indented=True), loc="left")


def moments(shown: Steps) -> dict[str, Any]:
    """Return what a page says while it plays the step: milliseconds of the axis, and of the events of both steps.

    Events of one kind that follow each other are one; all collectives are named ``communication``.
    """
    said: dict[str, Any] = {}
    for step in (shown.measured, shown.predicted):
        origin_s, events = float(step.start_s.min()), list[list[Any]]()
        for i in np.flatnonzero(step.kind != WAIT_EVENT):
            computes = step.lane[i] == COMPUTE_LANE
            name = KINDS[step.kind[i]] if computes else "communication"
            begin, end = (round(float(at[i] - origin_s) * 1e3, 2) for at in (step.start_s, step.end_s))
            before = next((each for each in reversed(events) if (each[0] == "communication") != computes), None)
            if computes and before is not None and before[0] == name and begin - before[2] <= 0.01:
                before[2] = max(end, before[2])
            else:
                events.append([name, begin, end])
        said[step.source] = events
    return said | {"until": max(event[2] for source in ("measured", "predicted") for event in said[source]) * _REACH}


def legend(panels: Sequence[Steps]) -> list[Patch]:
    """Return the keys of the colours, and of waiting for another rank where that can be seen."""
    handles = [Patch(color=colour, label=label) for label, colour in _LEGEND.items()]
    if any(panel.waits_s for panel in panels):
        handles.append(Patch(facecolor=PAPER, edgecolor=FAINT, hatch=_DOTS, label="waiting for another rank"))
    if any(any(panel.buckets) for panel in panels):
        handles.append(Patch(color=_GRADIENTS, label="gradients filling a bucket"))
    return handles


def _rows(axis: Axes, step: Timeline) -> float:
    """Draw one rank's step, beginning at 0, and hatch where it computes nothing; return its end in milliseconds."""
    origin_s = float(step.start_s.min())
    for lane in (COMPUTE_LANE, COMMUNICATION_LANE):
        events = np.flatnonzero((step.lane == lane) & (step.kind != WAIT_EVENT))
        spans = [((step.start_s[i] - origin_s) * 1e3, (step.end_s[i] - step.start_s[i]) * 1e3) for i in events]
        colours = [_COLOURS.get(KINDS[step.kind[i]], _COLOURS["other"]) for i in events]
        bottom = _LANES[(step.source, lane)]
        look: dict[str, Any] = {"edgecolors": PAPER, "linewidth": 0.7, "zorder": 3, "gid": _MOVING, "clip_on": False}
        axis.broken_barh(spans, (bottom, _TALL), facecolors=colours, **look)
    end_s = float(step.end_s.max())
    begin_s, until_s = _longest_gap_s(step)
    if until_s - begin_s > _VISIBLE * (end_s - origin_s):
        lane_of = (step.source, COMPUTE_LANE)
        _spans(axis, [(begin_s, until_s)], origin_s, lane_of, MUTED, "////", 2)
        middle, text = ((begin_s + until_s) / 2 - origin_s) * 1e3, f"waits {(until_s - begin_s) * 1e3:.2f} ms"
        axis.text(middle, _LANES[lane_of] + _TALL + 0.06, text, color=MUTED, ha="center", va="bottom")
    return (end_s - origin_s) * 1e3


def _buckets(axis: Axes, filled: Sequence[Bucket], step: Timeline) -> None:
    """Draw buckets that fill, as high as they have bytes, each with a line to where it is sent."""
    if not filled:
        return
    origin_s, largest = float(step.start_s.min()), max(bucket.size_bytes for bucket in filled)
    floor = _LANES[(step.source, _BUCKET_LANE)]
    below = _LANES[(step.source, COMMUNICATION_LANE)] + _TALL
    shapes, lines = [], []
    for bucket in filled:
        begin, full, sent = ((at - origin_s) * 1e3 for at in (bucket.begin_s, bucket.full_s, bucket.sent_s))
        top = floor + 0.9 * _TALL * bucket.size_bytes / largest
        shapes.append([(begin, floor), (full, top), (full, floor)])
        lines.append([(full, floor), (sent, below)])
    look: dict[str, Any] = {"zorder": 3, "clip_on": False}
    axis.add_collection(PolyCollection(shapes, facecolors=_GRADIENTS, linewidths=0, gid=_MOVING, **look))
    axis.add_collection(LineCollection(lines, colors=_GRADIENTS, linewidths=0.8, gid=_SENT, **look))


def _longest_gap_s(step: Timeline) -> tuple[float, float]:
    """Return when computation waits for communication the longest."""
    compute = step.lane == COMPUTE_LANE
    order = np.argsort(step.start_s[compute], kind="stable")
    start, reach = step.start_s[compute][order], np.maximum.accumulate(step.end_s[compute][order])
    if len(start) < 2:
        return 0.0, 0.0
    longest = int(np.argmax(start[1:] - reach[:-1]))
    return float(reach[longest]), float(start[longest + 1])


def _spans(
    axis: Axes,
    spans_s: Sequence[tuple[float, float]],
    origin_s: float,
    lane: tuple[str, int],
    colour: str,
    hatch: str,
    order: int,
) -> None:
    bars = [((low - origin_s) * 1e3, (high - low) * 1e3) for low, high in spans_s]
    rows = (_LANES[lane], _TALL)
    look: dict[str, Any] = {"linewidth": 0, "hatch": hatch, "zorder": order, "gid": _MOVING}
    axis.broken_barh(bars, rows, facecolors=PAPER, edgecolors=colour, **look)
