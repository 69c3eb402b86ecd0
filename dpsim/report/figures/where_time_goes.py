"""Where a step's time goes at each setting: stacked parts, measured and predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dpsim.records.comparison import ComparedPoint, Comparison
from dpsim.report.figures.style import (
    MUTED,
    PAPER,
    PARTS,
    grid,
    heading,
    panels,
    point_name,
    setting_label,
    size_ticks,
    styled,
)
from dpsim.report.sweep.timelines import Timelines, parts_s
from dpsim.report.words import field_name, network_name

_REST = "computation and the rest"
_COLOURS = {**PARTS, _REST: PARTS["backward"]}
_WIDTH = 0.36
_SHORT = 6
_FEW, _SMALL = 8, 6.5
"""More settings than a few have upright labels, in small letters."""
_HATCH = "////"
Bar = dict[str, float]


def draw(comparison: Comparison, timelines: Timelines, *, narrow: bool = False) -> Figure:
    """Return a panel for each group, with only two parts where not every point has both timelines."""
    members = [_in_order(comparison.members(group), comparison.compared) for group in comparison.groups]
    panel_bars = [(points, _bars(points, timelines)) for points in members]
    parts = dict.fromkeys(part for _, bars in panel_bars for pair in bars for part in pair[0])

    def make() -> Figure:
        figure, axes = panels(len(panel_bars), narrow=narrow, height_in=3.3, head_in=0.75 if narrow else 0.4)
        for axis, (points, bars) in zip(axes, panel_bars, strict=True):
            _panel(axis, points, bars, comparison.compared)
        handles = [Patch(color=_COLOURS[part], label=part) for part in parts]
        handles.append(Patch(facecolor=PAPER, edgecolor=MUTED, hatch=_HATCH, label="hatched, right: predicted"))
        figure.legend(
            handles=handles,
            loc="upper left",
            frameon=False,
            ncols=2 if narrow else 6,
            handlelength=1.0,
            handleheight=0.9,
            columnspacing=1.5,
            fontsize=9,
        )
        return figure

    return styled(make)


def _in_order(points: Sequence[ComparedPoint], compared: tuple[str, ...]) -> Sequence[ComparedPoint]:
    """Return the points as they stand where one field is compared, and otherwise those that train fastest first."""
    return points if len(compared) == 1 else sorted(points, key=lambda point: point.measured_s_per_sample)


def _bars(points: Sequence[ComparedPoint], timelines: Timelines) -> list[tuple[Bar, Bar]]:
    """Return the parts of each point in milliseconds, measured and predicted."""
    kept = [timelines.both(p) for p in points]
    bars = []
    for point, both in zip(points, kept, strict=True):
        steps = (
            (point.measured_step_s, point.exposed_communication_s),
            (point.predicted_step_s, point.predicted_exposed_communication_s),
        )
        if both is not None and all(b is not None for b in kept):
            parts = [parts_s(t, *step) for t, step in zip(both, steps, strict=True)]
        else:
            parts = [{_REST: max(0.0, step - exposed), "exposed communication": exposed} for step, exposed in steps]
        bars.append(({k: v * 1e3 for k, v in parts[0].items()}, {k: v * 1e3 for k, v in parts[1].items()}))
    return bars


def _panel(
    axis: Axes, points: Sequence[ComparedPoint], bars: Sequence[tuple[Bar, Bar]], compared: tuple[str, ...]
) -> None:
    for i, pair in enumerate(bars):
        for bar, x, predicted in ((pair[0], i - _WIDTH / 2 - 0.02, False), (pair[1], i + _WIDTH / 2 + 0.02, True)):
            bottom = 0.0
            for part, value in bar.items():
                colour = _COLOURS[part]
                look: dict[str, Any] = {"facecolor": colour, "edgecolor": PAPER, "linewidth": 0.5}
                if predicted:
                    look = {"facecolor": PAPER, "edgecolor": colour, "linewidth": 0.8, "hatch": _HATCH}
                axis.bar(x, value, _WIDTH, bottom=bottom, **look)
                bottom += value
    axis.set_xlim(-0.6, len(points) - 0.4)
    if compared == ("fusion_threshold_bytes",):
        size_ticks(axis, [point.fusion_threshold_bytes for point in points])
    else:
        labels = [setting_label(point, compared) for point in points]
        axis.set_xticks(range(len(points)), labels)
        axis.tick_params(labelsize=8.5)
        if max(map(len, labels)) > _SHORT:
            upright = len(points) > _FEW
            axis.tick_params("x", rotation=90 if upright else 25, labelsize=_SMALL if upright else 8.5)
    grid(axis)
    axis.set_xlabel(", ".join(field_name(name, points[0].runtime) for name in compared), fontsize=8.5)
    apart = [value for value in points[0].group.split("; ")[1:] if "device" not in value]
    title = network_name(points[0]) if "devices" in compared else point_name(points[0])
    heading(axis, title, ", ".join(["ms per step", *apart]))
