"""One step as it was measured and as it was predicted, on one time axis, for the best point of each network."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dpsim.records.comparison import ComparedPoint, Comparison
from dpsim.report.figures.style import ALLREDUCE, INK, MUTED, PAPER, PARTS, grid, panels, styled
from dpsim.report.sweep.timelines import Timelines, typical_step
from dpsim.report.words import devices_name, network_name
from dpsim.schedule import COMMUNICATION_LANE, COMPUTE_LANE, KINDS, WAIT_EVENT
from dpsim.timeline import Timeline
from dpsim.units import format_size

_COLOURS = {**PARTS, "allreduce": ALLREDUCE, "reduce-scatter": ALLREDUCE, "all-gather": ALLREDUCE}
_LANES = {
    ("measured", COMPUTE_LANE): 3.35,
    ("measured", COMMUNICATION_LANE): 2.5,
    ("predicted", COMPUTE_LANE): 1.05,
    ("predicted", COMMUNICATION_LANE): 0.2,
}
_TALL = 0.62


@dataclass(frozen=True, kw_only=True)
class _Panel:
    point: ComparedPoint
    measured: Timeline
    predicted: Timeline


def draw(comparison: Comparison, timelines: Timelines, *, narrow: bool = False) -> Figure | None:
    """Return a panel for each network's fastest point that has both timelines; ``None`` without such a point."""
    chosen: list[_Panel] = []
    for network in dict.fromkeys(point.network for point in comparison.scored if point.devices > 1):
        candidates = [
            _Panel(point=point, measured=both[0], predicted=both[1])
            for point in comparison.scored
            if point.network == network and point.devices > 1 and (both := timelines.both(point)) is not None
        ]
        if candidates:
            most = max(panel.point.devices for panel in candidates)
            of_most = (panel for panel in candidates if panel.point.devices == most)
            chosen.append(min(of_most, key=lambda panel: panel.point.measured_step_s))
    if not chosen:
        return None

    def make() -> Figure:
        height, head = (2.9, 0.5) if narrow else (2.75, 0.3)
        figure, axes = panels(len(chosen), narrow=narrow, height_in=height, columns=1, head_in=head)
        for axis, panel in zip(axes, chosen, strict=True):
            _draw(axis, panel, "\n" if narrow else " ")
        kinds = ("forward", "backward", "update", "allreduce", "other")
        figure.legend(
            handles=[Patch(color=_COLOURS[k], label=k) for k in kinds],
            loc="upper left",
            frameon=False,
            ncols=3 if narrow else 5,
            handlelength=1.0,
            handleheight=0.9,
            columnspacing=1.6,
            fontsize=9,
        )
        return figure

    return styled(make)


def _draw(axis: Axes, panel: _Panel, gap: str) -> None:
    ends = []
    for timeline in (panel.measured, panel.predicted):
        ends.append(_rows(axis, typical_step(timeline)))
    reach = max(ends) * 1e3
    axis.set_xlim(0, reach * 1.1)
    axis.set_ylim(0.0, 4.5)
    for source, end, point in (("measured", ends[0], 3.3), ("predicted", ends[1], 1.0)):
        axis.text(0, point + 0.92, source, fontweight="bold", fontsize=9, color=INK, va="center")
        axis.plot([end * 1e3] * 2, [point - 0.8, point + 0.72], color=INK, linewidth=1)
        axis.text(end * 1e3 + reach * 0.01, point - 0.02, f"{end * 1e3:.2f} ms", fontsize=8.5, color=INK, va="center")
    names = {COMPUTE_LANE: "compute", COMMUNICATION_LANE: "communication"}
    axis.set_yticks([y + _TALL / 2 for y in _LANES.values()], [names[lane] for _, lane in _LANES])
    axis.tick_params(labelsize=8.5)
    grid(axis, "x")
    axis.set_xlabel("milliseconds since the step began", fontsize=8.5)
    size = format_size(panel.point.fusion_threshold_bytes)
    title = f"{network_name(panel.point)},{gap}{devices_name(panel.point.devices)}, threshold {size}"
    axis.set_title(title, loc="left", fontsize=10.5, fontweight="bold")


def _rows(axis: Axes, step: Timeline) -> float:
    """Draw one rank's step, beginning at 0; returns its end in seconds."""
    origin = float(step.start_s.min())
    for lane in (COMPUTE_LANE, COMMUNICATION_LANE):
        events = np.flatnonzero((step.lane == lane) & (step.kind != WAIT_EVENT))
        spans = [((step.start_s[i] - origin) * 1e3, (step.end_s[i] - step.start_s[i]) * 1e3) for i in events]
        colours = [_COLOURS.get(KINDS[step.kind[i]], _COLOURS["other"]) for i in events]
        bottom = _LANES[(step.source, lane)]
        axis.broken_barh(spans, (bottom, _TALL), facecolors=colours, edgecolors=PAPER, linewidth=0.7, zorder=3)
    _waiting(axis, step, origin)
    return float(step.end_s.max()) - origin


def _waiting(axis: Axes, step: Timeline, origin: float) -> None:
    """Hatch the longest gap of the compute lane, where computation waits for communication."""
    compute = step.lane == COMPUTE_LANE
    order = np.argsort(step.start_s[compute], kind="stable")
    start, reach = step.start_s[compute][order], np.maximum.accumulate(step.end_s[compute][order])
    if len(start) < 2:
        return
    gaps = start[1:] - reach[:-1]
    i = int(np.argmax(gaps))
    length = float(gaps[i])
    if length <= 0.01 * float(step.end_s.max() - origin):
        return
    left, bottom = float(reach[i] - origin) * 1e3, _LANES[(step.source, COMPUTE_LANE)]
    axis.broken_barh(
        [(left, length * 1e3)],
        (bottom, _TALL),
        facecolors="none",
        edgecolors=MUTED,
        linewidth=0,
        hatch="////",
        zorder=2,
    )
    axis.text(
        left + length * 500,
        bottom + _TALL + 0.06,
        f"waits {length * 1e3:.2f} ms",
        fontsize=8,
        color=MUTED,
        ha="center",
        va="bottom",
    )
