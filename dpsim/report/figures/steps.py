"""Draws one step as it was measured and as it was predicted, on one time axis."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from dpsim.report.charts import Steps
from dpsim.report.figures.style import ALLREDUCE, FAINT, INK, MUTED, PAPER, PARTS, grid
from dpsim.schedule import COMMUNICATION_LANE, COMPUTE_LANE, KINDS, WAIT_EVENT
from dpsim.timeline import Timeline

_COMMUNICATION = ("allreduce", "reduce-scatter", "all-gather", "synchronise", "receive")
_COLOURS = {**PARTS, **dict.fromkeys(_COMMUNICATION, ALLREDUCE), "recompute": PARTS["forward"]}
_LEGEND = {
    **{part: PARTS[part] for part in ("forward", "backward", "update")},
    "communication": ALLREDUCE,
    "other": PARTS["other"],
}
_LANES = {
    ("measured", COMPUTE_LANE): 3.75,
    ("measured", COMMUNICATION_LANE): 2.9,
    ("predicted", COMPUTE_LANE): 1.05,
    ("predicted", COMMUNICATION_LANE): 0.2,
}
_TALL = 0.62
_DOTS = "...."
_VISIBLE = 0.01
"""A gap of this share of a step is hatched."""


def draw(axis: Axes, shown: Steps, *, narrow: bool = False) -> None:
    """Draw a panel."""
    steps = (shown.measured, shown.predicted)
    ends_ms = [_rows(axis, step) for step in steps]
    origin_s = float(shown.measured.start_s.min())
    _spans(axis, shown.waits_s, origin_s, ("measured", COMMUNICATION_LANE), FAINT, _DOTS, 4)
    reach = max(ends_ms)
    axis.set_xlim(0, reach * 1.1)
    axis.set_ylim(0.0, 5.3)
    for step, end, label, y in zip(steps, ends_ms, shown.labels, (3.7, 1.0), strict=True):
        name = axis.text(0, y + 1.3, f"{step.source}: ", fontweight="bold", fontsize=9, color=INK, va="center")
        axis.annotate(label, (1, 0.5), xycoords=name, fontsize=8, color=MUTED, va="center")
        axis.plot([end] * 2, [y - 0.8, y + 0.72], color=INK, linewidth=1)
        axis.text(end + reach * 0.01, y - 0.02, f"{end:.2f} ms", fontsize=8.5, color=INK, va="center")
    names = {COMPUTE_LANE: "compute", COMMUNICATION_LANE: "communication"}
    axis.set_yticks([y + _TALL / 2 for y in _LANES.values()], [names[lane] for _, lane in _LANES])
    axis.tick_params(labelsize=8.5)
    grid(axis, "x")
    axis.set_xlabel("milliseconds since the step began", fontsize=8.5)
    axis.set_title(textwrap.fill(shown.title, 38 if narrow else 100), loc="left", fontsize=10.5, fontweight="bold")


def legend(panels: Sequence[Steps]) -> list[Patch]:
    """Return the keys of the colours, and of waiting for another rank where that can be seen."""
    handles = [Patch(color=colour, label=label) for label, colour in _LEGEND.items()]
    if any(panel.waits_s for panel in panels):
        handles.append(Patch(facecolor=PAPER, edgecolor=FAINT, hatch=_DOTS, label="waiting for another rank"))
    return handles


def _rows(axis: Axes, step: Timeline) -> float:
    """Draw one rank's step, beginning at 0, and hatch where it computes nothing; return its end in milliseconds."""
    origin_s = float(step.start_s.min())
    for lane in (COMPUTE_LANE, COMMUNICATION_LANE):
        events = np.flatnonzero((step.lane == lane) & (step.kind != WAIT_EVENT))
        spans = [((step.start_s[i] - origin_s) * 1e3, (step.end_s[i] - step.start_s[i]) * 1e3) for i in events]
        colours = [_COLOURS.get(KINDS[step.kind[i]], _COLOURS["other"]) for i in events]
        bottom = _LANES[(step.source, lane)]
        axis.broken_barh(spans, (bottom, _TALL), facecolors=colours, edgecolors=PAPER, linewidth=0.7, zorder=3)
    end_s = float(step.end_s.max())
    begin_s, until_s = _longest_gap_s(step)
    if until_s - begin_s > _VISIBLE * (end_s - origin_s):
        lane_of = (step.source, COMPUTE_LANE)
        _spans(axis, [(begin_s, until_s)], origin_s, lane_of, MUTED, "////", 2)
        middle, text = ((begin_s + until_s) / 2 - origin_s) * 1e3, f"waits {(until_s - begin_s) * 1e3:.2f} ms"
        axis.text(middle, _LANES[lane_of] + _TALL + 0.06, text, fontsize=8, color=MUTED, ha="center", va="bottom")
    return (end_s - origin_s) * 1e3


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
    axis.broken_barh(bars, rows, facecolors=PAPER, edgecolors=colour, linewidth=0, hatch=hatch, zorder=order)
