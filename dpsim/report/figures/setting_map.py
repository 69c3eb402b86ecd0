"""A joint grid as maps: samples per second over two fields, a map for each combination of the others."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from dpsim.records.comparison import ComparedPoint, Comparison, Group
from dpsim.report.figures.style import INK, MEASURED, MUTED, PAPER, heading, one_panel_each
from dpsim.report.sweep.tables import group_title
from dpsim.report.words import field_name

_ROW_IN, _HEAD_IN = 0.5, 1.2
_FAINTEST = 0.06


def fields(comparison: Comparison) -> tuple[str, str] | None:
    """The compared fields that the maps are over, the one with more values across; None where fewer than two vary."""
    values = {
        name: {point.setting.text(name) for point in comparison.scored if point.devices > 1}
        for name in comparison.compared
    }
    varied = sorted((name for name in values if len(values[name]) > 1), key=lambda name: -len(values[name]))
    return (varied[0], varied[1]) if len(varied) > 1 else None


def draw(comparison: Comparison, *, narrow: bool = False) -> Figure:
    """Return a map for each group and each combination of the other compared fields."""
    chosen = fields(comparison)
    assert chosen is not None, "a map needs two fields with several values"
    others = [name for name in comparison.compared if name not in chosen]
    maps = [(group, points) for group in comparison.groups for points in _maps(comparison.members(group), others)]
    most = max(len({point.setting.text(chosen[1]) for point in points}) for _, points in maps)

    def panel(axis: Axes, shown: tuple[Group, list[ComparedPoint]]) -> None:
        group, points = shown
        title = ", ".join(f"{field_name(name, points[0].runtime)} {points[0].setting.text(name)}" for name in others)
        _panel(axis, comparison, group, points, chosen)
        heading(axis, title or "all settings", group_title(group))

    return one_panel_each(maps, panel, narrow=narrow, height_in=_HEAD_IN + _ROW_IN * most)


def _maps(points: Sequence[ComparedPoint], others: Sequence[str]) -> list[list[ComparedPoint]]:
    """The points of each map: those with the same values of the other fields."""
    maps: dict[tuple[str, ...], list[ComparedPoint]] = {}
    for point in points:
        maps.setdefault(tuple(point.setting.text(name) for name in others), []).append(point)
    return list(maps.values())


def _panel(
    axis: Axes, comparison: Comparison, group: Group, points: Sequence[ComparedPoint], chosen: tuple[str, str]
) -> None:
    across, down = (_ordered(points, name) for name in chosen)
    best = max(point.global_batch / point.measured_step_s for point in comparison.members(group))
    for point in points:
        column, row = across.index(_text(point, chosen[0])), down.index(_text(point, chosen[1]))
        _cell(axis, point, (column, row), best)
    axis.set_xlim(0, len(across))
    axis.set_ylim(len(down), 0)
    axis.set_xticks([place + 0.5 for place in range(len(across))], across)
    axis.set_yticks([place + 0.5 for place in range(len(down))], down)
    axis.tick_params(labelsize=8.5)
    axis.set_xlabel(field_name(chosen[0], points[0].runtime), fontsize=8.5)
    axis.set_ylabel(field_name(chosen[1], points[0].runtime), fontsize=8.5)
    axis.spines[["bottom"]].set_visible(False)


def _ordered(points: Sequence[ComparedPoint], name: str) -> list[str]:
    """The texts of a field's values, ascending where they are numbers."""

    def key(point: ComparedPoint) -> tuple[bool, float, str]:
        value = point.setting.value(name)
        number = isinstance(value, int | float)
        return (not number, float(value) if number else 0.0, point.setting.text(name))

    return list(dict.fromkeys(_text(point, name) for point in sorted(points, key=key)))


def _text(point: ComparedPoint, name: str) -> str:
    """The value of a field; one device has no fusion threshold."""
    return "any" if name == "fusion_threshold_bytes" and point.devices == 1 else point.setting.text(name)


def _cell(axis: Axes, point: ComparedPoint, place: tuple[int, int], best: float) -> None:
    """A cell: the more samples/s the darker, with measured and predicted samples/s and the marks of the best."""
    measured, predicted = point.global_batch / point.measured_step_s, point.global_batch / point.predicted_step_s
    strength = _FAINTEST + (0.55 - _FAINTEST) * (measured / best) ** 2
    marked = point.is_best_measured or point.is_best_predicted
    axis.add_patch(Rectangle(place, 1, 1, facecolor=MEASURED, alpha=strength, edgecolor="none"))
    axis.add_patch(
        Rectangle(place, 1, 1, fill=False, edgecolor=INK if marked else PAPER, linewidth=1.6 if marked else 1.0)
    )
    x, y = place[0] + 0.5, place[1] + 0.5
    marks = " ★" * point.is_best_measured + " ◆" * point.is_best_predicted
    axis.text(x, y - 0.15, f"{measured:,.0f}{marks}", ha="center", va="center", fontsize=9, color=INK)
    axis.text(x, y + 0.22, f"{predicted:,.0f}", ha="center", va="center", fontsize=7.5, color=MUTED)
