"""The charts of sweeps: curves over a knob, rows of settings, a map, one step, and where the time goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from dpsim.grouping import grouped
from dpsim.records.compared_point import ComparedPoint
from dpsim.records.comparison import Comparison, Group
from dpsim.report.charts import Bars, Cell, Chart, Dot, Look, Map, Rows, Series, Steps
from dpsim.report.sweep.tables import group_title
from dpsim.report.sweep.timelines import Timelines, buckets, length_s, parts_s, ready_last, waits_for_ranks_s
from dpsim.report.sweep.verdict import marker
from dpsim.report.words import BASELINES, PROFILED_BASELINES, devices_name, field_name, network_name, percent
from dpsim.timeline import Timeline
from dpsim.units import format_size

Value = Callable[[ComparedPoint, float, Look], float]
"""What a curve shows of a point for a step of so many seconds, which was measured or predicted."""
_REST = "computation and the rest"
_VISIBLE = 0.01
"""Waiting for this share of a step is drawn."""
_SAME_LENGTH = 0.005
"""Lengths that differ by a smaller share look the same."""


def curve(
    points: Sequence[ComparedPoint],
    x: Sequence[float],
    value: Value,
    nulls_s: Callable[[ComparedPoint], Mapping[str, float]] = lambda point: point.null_step_s,
) -> list[Series]:
    """Return the baselines that all points have, what was predicted, and what was measured, over x.

    Baselines from the profile are in the table alone: beside the prediction they would hide it.
    """

    def series(source: Look) -> Series:
        y, *ends = (
            [value(p, getattr(p, f"{source}_{end}_s"), source) for p in points] for end in ("step", "low", "high")
        )
        low, high = ([end(pair) for pair in zip(*ends, strict=True)] for end in (min, max))
        return Series(name=source, x=x, y=y, low=low, high=high, look=source)

    def baseline(name: str) -> Series:
        source: Look = "measured" if name == "constant" else "predicted"
        y = [value(p, max(nulls_s(p)[name], 1e-12), source) for p in points]
        return Series(name=BASELINES[name], x=x, y=y, look="ideal" if name == "perfect_scaling" else "baseline")

    shared = [name for name in BASELINES if all(name in nulls_s(point) for point in points)]
    drawn = [name for name in shared if name not in PROFILED_BASELINES]
    return [*map(baseline, drawn), series("predicted"), series("measured")]


def size_ticks(points: Iterable[ComparedPoint]) -> dict[float, str]:
    """Return the positions 0, 1, ... with the fusion thresholds of the points."""
    return {float(i): format_size(p.fusion_threshold_bytes).replace(" ", "\n") for i, p in enumerate(points)}


def setting_label(point: ComparedPoint, compared: Sequence[str]) -> str:
    """Return ``2, global, 0 leaves``: the values that are compared; a number of leaves would not be known as one."""
    values = {name: point.text(name) for name in compared}
    return ", ".join(f"{value} leaves" if name == "leaves" else value for name, value in values.items())


def point_name(point: ComparedPoint) -> str:
    """Return ``2 devices on node``."""
    return f"{devices_name(point.devices)} on {network_name(point)}"


def settings_chart(comparison: Comparison, name: Callable[[ComparedPoint], str] | None = None) -> Chart:
    """Return a panel for each group: samples per second at each setting, the fastest first, measured and predicted."""
    compared = comparison.compared
    named = name or (lambda point: setting_label(point, compared))
    fields = ", ".join(map(field_name, compared))

    def dot(point: ComparedPoint, look: Look) -> Dot:
        step, high, low = (point.global_batch / getattr(point, f"{look}_{end}_s") for end in ("step", "low", "high"))
        return Dot(value=step, low=low, high=high, look=look)

    def panel(group: Group) -> Rows:
        apart = ", ".join(group.apart)
        return Rows(
            title=network_name(group),
            subtitle=f"{apart}: {fields}" if apart else fields,
            x_label="samples/s: ● measured, ◇ predicted",
            rows={
                named(point): (dot(point, "measured"), dot(point, "predicted")) for point in _fastest(comparison, group)
            },
        )

    most = max(len(comparison.members(group)) for group in comparison.groups)
    return Chart(panels=[panel(group) for group in comparison.groups], height_in=1.25 + 0.38 * most)


def _fastest(comparison: Comparison, group: Group) -> list[ComparedPoint]:
    return sorted(comparison.members(group), key=lambda point: point.measured_s_per_sample)


def map_fields(comparison: Comparison) -> tuple[str, str] | None:
    """Return the compared fields that maps are over, the one with more values first; None where fewer than two vary."""
    on_several = [point for point in comparison.scored if point.devices > 1]
    values = {name: {point.text(name) for point in on_several} for name in comparison.compared}
    varied = sorted((name for name in values if len(values[name]) > 1), key=lambda name: -len(values[name]))
    return (varied[0], varied[1]) if len(varied) > 1 else None


def map_chart(comparison: Comparison) -> Chart | None:
    """Return maps of samples/s over two fields, for each group and combination of the others; None where none vary."""
    chosen = map_fields(comparison)
    if chosen is None:
        return None
    others = [name for name in comparison.compared if name not in chosen]
    panels = [panel for group in comparison.groups for panel in _maps(comparison, group, chosen, others)]
    return Chart(panels=panels, height_in=1.2 + 0.5 * max(len(panel.down) for panel in panels))


def _maps(comparison: Comparison, group: Group, chosen: tuple[str, str], others: Sequence[str]) -> Iterator[Map]:
    best = max(point.global_batch / point.measured_step_s for point in comparison.members(group))
    mark = marker(comparison)
    maps = grouped(comparison.members(group), lambda point: tuple(point.text(name) for name in others))
    for points in maps.values():
        runtime = points[0].runtime
        x_label, y_label = (field_name(name, runtime) for name in chosen)
        title = ", ".join(f"{field_name(name, runtime)} {points[0].text(name)}" for name in others)
        yield Map(
            title=title or "all settings",
            subtitle=group_title(group),
            x_label=x_label,
            y_label=y_label,
            cells={(_text(p, chosen[0]), _text(p, chosen[1])): _cell(p, best, mark(p)) for p in points},
            across=_ordered(points, chosen[0]),
            down=_ordered(points, chosen[1]),
        )


def _cell(point: ComparedPoint, best: float, mark: str) -> Cell:
    measured, predicted = point.global_batch / point.measured_step_s, point.global_batch / point.predicted_step_s
    star, diamond = (f" {sign}" * (sign in mark) for sign in "★◆")
    text, below = f"{measured:,.0f}{star}", f"{predicted:,.0f}{diamond}"
    return Cell(share=measured / best, text=text, below=below, strong=bool(star or diamond))


def _ordered(points: Sequence[ComparedPoint], name: str) -> list[str]:
    """Return the texts of a field's values, ascending where they are numbers."""

    def key(point: ComparedPoint) -> tuple[bool, float, str]:
        value = point.setting.value(name)
        number = isinstance(value, int | float)
        return (not number, float(value) if number else 0.0, point.text(name))

    return list(dict.fromkeys(_text(point, name) for point in sorted(points, key=key)))


def _text(point: ComparedPoint, name: str) -> str:
    """Return the value of a field; one device has no fusion threshold."""
    return "any" if name == "fusion_threshold_bytes" and point.devices == 1 else point.text(name)


def step_chart(comparison: Comparison, timelines: Timelines) -> Chart | None:
    """Return a panel for each network, of the point on the most devices that trains fastest of those with timelines.

    Where strategies are compared, it is a panel for each of them, on the last network. Without any such point it is
    ``None``.
    """
    varied, by_strategy = _varied(comparison), "strategy" in comparison.compared
    on_several = [point for point in comparison.scored if point.devices > 1]
    if by_strategy:
        on_several = [point for point in on_several if point.network == on_several[-1].network]
    panels = []
    for points in grouped(on_several, lambda point: point.strategy if by_strategy else point.network).values():
        timed = [(point, *both) for point in points if (both := timelines.both(point)) is not None]
        if timed:
            most = max(point.devices for point, *_ in timed)
            fastest = min(
                (each for each in timed if each[0].devices == most), key=lambda each: each[0].measured_s_per_sample
            )
            panels.append(_step(*fastest, varied, timelines.gradient_bytes[fastest[0].setting]))
    return Chart(panels=panels, height_in=3.7, columns=1) if panels else None


def _step(
    point: ComparedPoint,
    measured: Timeline,
    predicted: Timeline,
    varied: Sequence[str],
    gradient_bytes: Mapping[str, int],
) -> Steps:
    last = ready_last(measured)
    waits = waits_for_ranks_s(measured, int(last.rank[0]))
    fields = [f"{field_name(name, point.runtime)} {point.text(name)}" for name in varied]
    return Steps(
        title=", ".join([network_name(point), devices_name(point.devices), *fields]),
        measured=last,
        predicted=predicted,
        labels=(
            _label(last, length_s(measured), "this step {}" + f", median {_ms(point.measured_step_s)}"),
            _label(predicted, point.predicted_step_s, "{}" + f" ({percent(point.error, sign=True)})"),
        ),
        exposed=(
            point.exposed_communication_s / point.measured_step_s,
            point.predicted_exposed_communication_s / point.predicted_step_s,
        ),
        waits_s=[(low, high) for low, high in waits if high - low > _VISIBLE * point.measured_step_s],
        buckets=(buckets(last, gradient_bytes), buckets(predicted, gradient_bytes)),
    )


def _label(drawn: Timeline, step_s: float, text: str) -> str:
    """Return a text with the length of a step; before it the length of what is drawn, where that is another.

    The step of all ranks is longer than that of a rank which began late; a prediction's also waits for its input.
    """
    label = text.format(_ms(step_s))
    drawn_s = length_s(drawn)
    if abs(drawn_s / step_s - 1) <= _SAME_LENGTH:
        return label
    return f"drawn {_ms(drawn_s)}; {label.removeprefix('this ')}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _varied(comparison: Comparison) -> list[str]:
    """Return the fields that a title names beside the network and the devices."""
    always, in_the_title = ("fusion_threshold_bytes", "local_batch"), ("devices", "network", "global_batch")
    fields = dict.fromkeys((*always, *comparison.compared, "batch_norm"))
    values = {name: {point.text(name) for point in comparison.scored} for name in fields if name not in in_the_title}
    return [name for name in values if name in always or len(values[name]) > 1]


def parts_chart(comparison: Comparison, timelines: Timelines) -> Chart:
    """Return a panel for each group of what the steps consist of, in two parts where not every point has timelines."""
    panels = [_parts(comparison, group, timelines) for group in comparison.groups]
    most = max((len(panel.bars) for panel in panels if panel.lying), default=0)
    return Chart(panels=panels, height_in=max(3.3, 1.25 + 0.4 * most))


def _parts(comparison: Comparison, group: Group, timelines: Timelines) -> Bars:
    compared = comparison.compared
    points = comparison.members(group) if len(compared) == 1 else _fastest(comparison, group)
    labels = [setting_label(point, compared) for point in points]
    if compared == ("fusion_threshold_bytes",):
        labels = list(size_ticks(points).values())
    both = [timelines.both(point) for point in points]
    complete = all(each is not None for each in both)
    apart = [value for value in group.apart if "device" not in value]
    first = points[0]
    return Bars(
        title=network_name(first) if "devices" in compared else point_name(first),
        subtitle=", ".join(["ms per step", *apart]),
        x_label=", ".join(field_name(name, first.runtime) for name in compared),
        bars=[
            (label, *_stacks(point, timeline if complete else None))
            for label, point, timeline in zip(labels, points, both, strict=True)
        ],
    )


def _stacks(point: ComparedPoint, both: tuple[Timeline, Timeline] | None) -> tuple[dict[str, float], dict[str, float]]:
    """Return the parts of a step in milliseconds, measured and predicted."""
    steps_s = (
        (point.measured_step_s, point.exposed_communication_s),
        (point.predicted_step_s, point.predicted_exposed_communication_s),
    )
    if both is None:
        parts = [{_REST: max(0.0, step - exposed), "exposed communication": exposed} for step, exposed in steps_s]
    else:
        parts = [parts_s(timeline, *of_step) for timeline, of_step in zip(both, steps_s, strict=True)]
    measured, predicted = ({name: value * 1e3 for name, value in part.items()} for part in parts)
    return measured, predicted
