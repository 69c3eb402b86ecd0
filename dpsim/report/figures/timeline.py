"""One step as it was predicted and as it went, on one time axis, for the best point of each network."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dpsim.records.comparison import ComparedPoint, Comparison
from dpsim.report.figures.style import ALLREDUCE, INK, MUTED, PAPER, PARTS, RULE, panels, styled
from dpsim.report.sweep.timelines import Timelines, kind_of, typical_step
from dpsim.report.words import EMULATED_COMPUTE, devices_name, network_name
from dpsim.schedule import COMMUNICATION_LANE, COMPUTE_LANE
from dpsim.timeline import Timeline
from dpsim.units import format_size

_COLOURS = {**PARTS, "allreduce": ALLREDUCE}
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
    """One panel a network: its best measured point for which both timelines were kept. ``None`` without any."""
    chosen: list[_Panel] = []
    for network in dict.fromkeys(p.network for p in comparison.scored if p.devices > 1):
        able = [
            p for p in comparison.scored if p.network == network and p.devices > 1 and timelines.both(p) is not None
        ]
        if able:
            most = max(p.devices for p in able)
            point = min((p for p in able if p.devices == most), key=lambda p: p.measured_step_s)
            both = timelines.both(point)
            if both is not None:
                chosen.append(_Panel(point=point, measured=both[0], predicted=both[1]))
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
    axis.grid(axis="x", color=RULE, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.set_xlabel("milliseconds since the step began", fontsize=8.5)
    size = format_size(panel.point.fusion_threshold_bytes)
    network = network_name(panel.point.network, panel.point.emulated_network)
    text = f"{network},{gap}{devices_name(panel.point.devices)}, threshold {size}"
    text += EMULATED_COMPUTE if panel.point.emulated_compute else ""
    axis.set_title(text, loc="left", fontsize=10.5, fontweight="bold")


def _rows(axis: Axes, step: Timeline) -> float:
    """Draw one rank's step from 0 on; returns its end in seconds."""
    origin = float(step.start_s.min())
    for lane in (COMPUTE_LANE, COMMUNICATION_LANE):
        mine = np.flatnonzero(step.lane == lane)
        spans = [((step.start_s[i] - origin) * 1e3, (step.end_s[i] - step.start_s[i]) * 1e3) for i in mine]
        colours = [_COLOURS[kind_of(step.operations[int(step.operation[i])])] for i in mine]
        bottom = _LANES[(step.source, lane)]
        axis.broken_barh(spans, (bottom, _TALL), facecolors=colours, edgecolors=PAPER, linewidth=0.7, zorder=3)
    _waiting(axis, step, origin)
    return float(step.end_s.max()) - origin


def _waiting(axis: Axes, step: Timeline, origin: float) -> None:
    """Hatch the longest gap of the compute lane: there computation waits for communication."""
    mine = step.lane == COMPUTE_LANE
    order = np.argsort(step.start_s[mine], kind="stable")
    start, reach = step.start_s[mine][order], np.maximum.accumulate(step.end_s[mine][order])
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
