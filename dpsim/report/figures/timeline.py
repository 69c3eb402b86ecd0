"""One step as it was measured and as it was predicted, on one time axis, for the best point of each network."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dpsim.records.comparison import ComparedPoint, Comparison
from dpsim.report.figures.style import ALLREDUCE, FAINT, INK, MUTED, PAPER, PARTS, grid, panels, styled
from dpsim.report.sweep.timelines import Timelines, length_s, ready_last, waits_for_ranks_s
from dpsim.report.words import devices_name, field_name, network_name, percent
from dpsim.schedule import COMMUNICATION_LANE, COMPUTE_LANE, KINDS, WAIT_EVENT
from dpsim.timeline import Timeline

_COMMUNICATION, _WAITING = "communication", "waiting for another rank"
_COLOURS = {**PARTS, **dict.fromkeys(("allreduce", "reduce-scatter", "all-gather", "synchronise"), ALLREDUCE)}
_LEGEND = {
    **{part: PARTS[part] for part in ("forward", "backward", "update")},
    _COMMUNICATION: ALLREDUCE,
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
"""Waiting for this share of a step is drawn."""


@dataclass(frozen=True, kw_only=True)
class _Panel:
    point: ComparedPoint
    measured: Timeline
    predicted: Timeline

    @property
    def waits_s(self) -> list[tuple[float, float]]:
        """When the rank that is drawn waits for another one, as far as it can be seen."""
        shortest_s = _VISIBLE * self.point.measured_step_s
        waits = waits_for_ranks_s(self.measured, int(ready_last(self.measured).rank[0]))
        return [(low, high) for low, high in waits if high - low > shortest_s]


def draw(comparison: Comparison, timelines: Timelines, *, narrow: bool = False) -> Figure | None:
    """Return a panel for each network, of the point on the most devices that trains fastest of those with timelines.

    Without any such point it is ``None``.
    """
    varied = _varied(comparison)
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
            chosen.append(min(of_most, key=lambda panel: panel.point.measured_s_per_sample))
    if not chosen:
        return None

    def make() -> Figure:
        height, head = (3.4, 0.75) if narrow else (3.0, 0.3)
        figure, axes = panels(len(chosen), narrow=narrow, height_in=height, columns=1, head_in=head)
        for axis, panel in zip(axes, chosen, strict=True):
            _draw(axis, panel, varied, 38 if narrow else 100)
        handles = [Patch(color=colour, label=label) for label, colour in _LEGEND.items()]
        if any(panel.waits_s for panel in chosen):
            handles.append(Patch(facecolor=PAPER, edgecolor=FAINT, hatch=_DOTS, label=_WAITING))
        figure.legend(
            handles=handles,
            loc="upper left",
            frameon=False,
            ncols=2 if narrow else 6,
            handlelength=1.0,
            handleheight=0.9,
            columnspacing=1.6,
            fontsize=9,
        )
        return figure

    return styled(make)


def _varied(comparison: Comparison) -> list[str]:
    """Return the fields that a title names beside the network and the devices."""
    fields = dict.fromkeys(("fusion_threshold_bytes", "local_batch", *comparison.compared, "batch_norm"))
    always = ("fusion_threshold_bytes", "local_batch")
    points = comparison.scored
    return [
        name
        for name in fields
        if name not in ("devices", "network", "global_batch")
        and (name in always or len({point.setting.text(name) for point in points}) > 1)
    ]


def _draw(axis: Axes, panel: _Panel, varied: list[str], width: int) -> None:
    point, measured = panel.point, ready_last(panel.measured)
    ends = [_rows(axis, step) for step in (measured, panel.predicted)]
    origin = float(measured.start_s.min())
    axis.broken_barh(
        [((low - origin) * 1e3, (high - low) * 1e3) for low, high in panel.waits_s],
        (_LANES["measured", COMMUNICATION_LANE], _TALL),
        facecolors=PAPER,
        edgecolors=FAINT,
        linewidth=0.7,
        hatch=_DOTS,
        zorder=4,
    )
    reach = max(ends) * 1e3
    axis.set_xlim(0, reach * 1.1)
    axis.set_ylim(0.0, 5.3)
    labels = {
        "measured": f"this step {_ms(length_s(panel.measured))}, median {_ms(point.measured_step_s)}",
        "predicted": f"{_ms(point.predicted_step_s)} ({percent(point.error, sign=True)})",
    }
    for source, end, y in (("measured", ends[0], 3.7), ("predicted", ends[1], 1.0)):
        name = axis.text(0, y + 1.3, f"{source}: ", fontweight="bold", fontsize=9, color=INK, va="center")
        axis.annotate(labels[source], (1, 0.5), xycoords=name, fontsize=8, color=MUTED, va="center")
        axis.plot([end * 1e3] * 2, [y - 0.8, y + 0.72], color=INK, linewidth=1)
        axis.text(end * 1e3 + reach * 0.01, y - 0.02, f"{end * 1e3:.2f} ms", fontsize=8.5, color=INK, va="center")
    names = {COMPUTE_LANE: "compute", COMMUNICATION_LANE: "communication"}
    axis.set_yticks([y + _TALL / 2 for y in _LANES.values()], [names[lane] for _, lane in _LANES])
    axis.tick_params(labelsize=8.5)
    grid(axis, "x")
    axis.set_xlabel("milliseconds since the step began", fontsize=8.5)
    fields = [f"{field_name(name, point.runtime)} {point.setting.text(name)}" for name in varied]
    title = ", ".join([network_name(point), devices_name(point.devices), *fields])
    axis.set_title(textwrap.fill(title, width), loc="left", fontsize=10.5, fontweight="bold")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


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
    if length <= _VISIBLE * float(step.end_s.max() - origin):
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
