"""What the report of a sweep over the fusion threshold says: which one to choose, and whether the model knew it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from dpsim.harness.sweep.grids import of_devices, places, telling_thresholds
from dpsim.harness.sweep.scores import PREDICTED_NULLS
from dpsim.records.comparison import ComparedPoint, Comparison, Group
from dpsim.records.sweep import Experiment
from dpsim.report.charts import Chart, Lines, Mark, Series
from dpsim.report.content import Tile
from dpsim.report.sweep.cells import PointColumns, points_table
from dpsim.report.sweep.charts import curve, point_name, size_ticks
from dpsim.report.sweep.question import Question
from dpsim.report.sweep.reliability import (
    as_fast,
    cost_of_choice,
    uncertainty,
    unsure,
)
from dpsim.report.sweep.summary_table import alone, speedup, where
from dpsim.report.sweep.tables import (
    LEGEND,
    by_network,
    own_runtime_note,
)
from dpsim.report.table import Column, Table
from dpsim.report.words import (
    counted,
    devices_name,
    field_name,
    milliseconds,
    network_name,
    percent,
    threshold_name,
    threshold_noun,
)
from dpsim.setting import threshold_bytes
from dpsim.units import format_size

OWN_RUNTIME = "dpsim (emulated)"
"""The label of dpsim's own runtime, whose computation is emulated, beside PyTorch's DDP."""
_LARGE_EFFECT = 0.1
"""An effect of this size may matter, even where it is below the uncertainty."""


def question(comparison: Comparison) -> str:
    """Return the question that the sweep answers."""
    first, dataset = comparison.points[0], comparison.experiment.dataset
    sizes = {point.fusion_threshold_bytes for point in comparison.points}
    threshold = field_name("fusion_threshold_bytes", first.runtime)
    span = f" from {format_size(min(sizes))} to {format_size(max(sizes))} bytes".replace("inf bytes", "inf")
    return (
        f"Which {threshold}{span} makes a training step of {first.model} on {dataset} fastest at a global "
        f"batch of {first.global_batch}, and does the model know it without a measured step?"
    )


def _one_device(comparison: Comparison) -> tuple[str, ...]:
    """Return a sentence when nothing ran on more than one device."""
    return () if comparison.groups else ("Only one device was run: there is no threshold to choose.",)


def _answer(comparison: Comparison, group: Group) -> str:
    """Return the verdict on one network and device count."""
    verdicts = [_slower_than_one(group, comparison.best_measured(group)), _choice(comparison, group)]
    if not unsure(group):
        verdicts.append(_model(comparison, group))
    return " ".join(text for text in verdicts if text)


def _slower_than_one(group: Group, best: ComparedPoint) -> str:
    if best.measured_speedup is None or 1 / best.measured_speedup - 1 <= group.noise_floor:
        return ""
    return (
        f"Do not use {devices_name(group.devices)} on {network_name(group)}: at the best "
        f"{threshold_noun(group.runtime)} they are slower than one device (speedup {best.measured_speedup:.2f})."
    )


def _choice(comparison: Comparison, group: Group) -> str:
    """Return which threshold to choose, or that it does not matter."""
    best = comparison.best_measured(group)
    place = f"On {network_name(group)}, {devices_name(group.devices)}"
    ms, noun = milliseconds(best.measured_step_s), threshold_noun(group.runtime)
    if unsure(group):
        if group.below_noise and group.effect <= _LARGE_EFFECT:
            return (
                f"{place}, the {noun} does not matter here: from best to worst a step of {ms} ms changes by "
                f"{percent(group.effect)}, and the uncertainty of these medians is {percent(group.noise_floor)}."
            )
        return f"{place}, no {noun} is surely best: {uncertainty(group)}."
    text = f"{place}, the best {noun} is {threshold_name(best.fusion_threshold_bytes)}: {ms} ms per step"
    faster = gain(comparison, group)
    if faster is not None:
        text += f", {faster[0]:.2f}x as fast as {faster[1]}"
    if near := len(as_fast(comparison, group)) - 1:
        text += f"; {counted(near, f'other {noun}')} cannot be told apart from it"
    return f"{text}."


def _model(comparison: Comparison, group: Group) -> str:
    """Return what the model chose, and the cost of following it."""
    best, predicted = comparison.best_measured(group), comparison.best_predicted(group)
    if predicted is best:
        return "The model chose the same."
    return (
        f"The model chose {threshold_name(predicted.fusion_threshold_bytes)}, which took "
        f"{milliseconds(predicted.measured_step_s)} ms, {cost_of_choice(comparison, group)}."
    )


def gain(comparison: Comparison, group: Group) -> tuple[float, str] | None:
    """Return how many times faster the best setting is than one allreduce per tensor, or else than one per step."""
    best = comparison.best_measured(group)
    for extreme in (0.0, float("inf")):
        other = next((p for p in comparison.members(group) if p.fusion_threshold_bytes == extreme), None)
        if other is not None and other is not best:
            return (
                other.measured_step_s / best.measured_step_s,
                f"{threshold_noun(best.runtime)} {threshold_name(extreme)}",
            )
    return None


def _tiles(comparison: Comparison, group: Group) -> tuple[Tile, ...]:
    """Return the numbers of a group that are worth seeing at first sight."""
    best, predicted = comparison.best_measured(group), comparison.best_predicted(group)
    noun = threshold_noun(group.runtime)
    tiles = []
    if unsure(group):
        verdict = "no effect" if group.below_noise else "unsure"
        tiles.append(Tile(value=verdict, label=f"no {noun} is surely best: {uncertainty(group)}"))
    else:
        label = f"best {noun}, {milliseconds(best.measured_step_s)} ms"
        tiles.append(Tile(value=format_size(best.fusion_threshold_bytes), label=label))
        if faster := gain(comparison, group):
            tiles.append(Tile(value=f"{faster[0]:.2f}x", label=f"as fast as {faster[1]}"))
    tiles.append(
        Tile(
            value=format_size(predicted.fusion_threshold_bytes),
            label=f"predicted best, {milliseconds(predicted.measured_step_s)} ms measured",
        )
    )
    return tuple(tiles)


def _points(comparison: Comparison) -> Table:
    """Return every scored point, measured and predicted."""
    points = comparison.scored
    runtime = points[0].runtime
    compared_to_one = any(point.measured_speedup is not None for point in points if point.devices > 1)
    show = PointColumns(comparison=comparison)
    emulated = " Computation is emulated." if any(p.emulated_compute for p in comparison.points) else ""
    return points_table(
        comparison,
        columns=(
            show("layout", head="devices"),
            Column(head=field_name("fusion_threshold_bytes", runtime), cell=_threshold, left=True),
            show("algorithm", shown=len({point.algorithm for point in points if point.devices > 1}) > 1),
            show("buckets", 3),
            show("measured_step_s"),
            show.interval(),
            show("predicted_step_s"),
            show.predicted_interval(),
            show("error"),
            *show.other_runtimes(),
            *show.exposed(1, 4),
            show("measured_speedup", shown=compared_to_one),
            show("predicted_speedup", 2, shown=compared_to_one),
            *show.last(5),
        ),
        sections={
            _section_title(comparison, network, members): members for network, members in by_network(points).items()
        },
        note=f"{LEGEND}. Median step and the 95% bootstrap interval of the median. Error = predicted / measured - 1. "
        "Exposed: communication not hidden by computation. "
        + "Speedup over one device at the same global batch. " * compared_to_one
        + f"{threshold_noun(runtime).capitalize()} 0 is one allreduce per tensor, inf one per step.{emulated}"
        + own_runtime_note(comparison),
    )


def _section_title(comparison: Comparison, network: str, points: list[ComparedPoint]) -> str:
    overlap = comparison.chosen_overlap.get(points[0].setting.where, "")
    return f"{network}, overlap {overlap}" if any(point.devices > 1 for point in points) else network


def _threshold(point: ComparedPoint) -> str:
    return format_size(point.fusion_threshold_bytes) if point.devices > 1 else ""


def _chart(comparison: Comparison) -> Chart:
    return Chart(panels=[_curve(comparison.members(group)) for group in comparison.groups], height_in=3.5)


def _curve(points: Sequence[ComparedPoint]) -> Lines:
    """Return the step at each threshold, from 0 on, so that noise does not look like an effect."""
    x = list(range(len(points)))
    series = curve(points, x, lambda point, step_s, source: step_s * 1e3)
    own = [point.dpsim_step_s * 1e3 for point in points if point.dpsim_step_s is not None]
    if len(own) == len(points):
        series.append(Series(name=OWN_RUNTIME, x=x, y=own, look="own"))
    return Lines(
        title=point_name(points[0]),
        subtitle=f"ms per step (allreduce: {points[0].algorithm})",
        x_label=field_name("fusion_threshold_bytes", points[0].runtime),
        series=series,
        x_ticks=size_ticks(points),
        y_text="{:.3g}".format,
        x_span=(-0.4, len(points) - 0.6),
        marks=list(_marks(points)),
    ).within(1.3)


def _marks(points: Sequence[ComparedPoint]) -> Iterator[Mark]:
    """Yield the best points, as predicted and as measured, with labels on different sides."""
    best = {
        "predicted": next((i for i, point in enumerate(points) if point.is_best_predicted), None),
        "measured": next((i for i, point in enumerate(points) if point.is_best_measured), None),
    }
    same, below = best["predicted"] == best["measured"], False
    if (x := best["predicted"]) is not None:
        below = points[x].measured_step_s > points[x].predicted_step_s
        y = points[x].predicted_step_s * 1e3
        yield Mark(text="best predicted", x=x, y=y, look="predicted", label=not same, below=below)
    if (x := best["measured"]) is not None:
        alone = same or best["predicted"] is None
        below = points[x].predicted_step_s > points[x].measured_step_s if alone else not below
        text = "best, measured and predicted" if same else "best measured"
        yield Mark(text=text, x=x, y=points[x].measured_step_s * 1e3, look="measured", below=below)


def _worth(comparison: Comparison, group: Group) -> str:
    """Return whether several devices are faster than one, at all settings of a group or at the best."""
    speedups = [p.measured_speedup for p in comparison.members(group) if p.measured_speedup is not None]
    if not speedups:
        return ""
    devices, low, high = devices_name(group.devices), min(speedups), max(speedups)
    if 1 / high - 1 > group.noise_floor:
        return f"do not use {devices}, 1 is faster."
    if low - 1 > group.noise_floor:
        span = f"{low:.1f} to {high:.1f}" if f"{low:.1f}" != f"{high:.1f}" else f"{high:.1f}"
        return f"{devices} are {span} times as fast as 1, whatever the {threshold_noun(group.runtime)}."
    if high - 1 > group.noise_floor:
        return f"{devices} are {high:.1f} times as fast as 1 at best."
    return f"{devices} are as fast as 1, as far as can be seen."


def _fastest(comparison: Comparison, group: Group) -> str:
    """Return the settings that are as fast as the best: ``a threshold of 32 KiB or more``."""
    near = as_fast(comparison, group)
    members = sorted(point.fusion_threshold_bytes for point in comparison.members(group))
    sizes = sorted(point.fusion_threshold_bytes for point in near)
    noun = f"a {threshold_noun(group.runtime)} of "
    if len(sizes) == 1:
        ends = {0.0: "one bucket for each tensor", math.inf: "one bucket"}
        token = format_size(sizes[0])
        return f"{ends[sizes[0]]} ({threshold_noun(group.runtime)} {token})" if sizes[0] in ends else noun + token
    first = members.index(sizes[0])
    if members[first : first + len(sizes)] != sizes:
        return noun + ", ".join(map(format_size, sizes[:-1])) + f" or {format_size(sizes[-1])}"
    if sizes[-1] == members[-1]:
        return f"{noun}{format_size(sizes[0])} or more"
    return f"{noun}{format_size(sizes[0])} to {format_size(sizes[-1])}"


def _usual(comparison: Comparison, group: Group) -> ComparedPoint | None:
    """Return one allreduce for each tensor, as without fusion."""
    return next((point for point in comparison.members(group) if point.fusion_threshold_bytes == 0), None)


def _label(comparison: Comparison, point: ComparedPoint) -> str:
    size = point.fusion_threshold_bytes
    ends = {0.0: "one message per tensor", math.inf: "one message per step"}
    return ends.get(size, f"{threshold_noun(point.runtime)} {format_size(size)}")


def _screen(comparison: Comparison, groups: Sequence[Group]) -> list[Column[Group]]:
    def of_threshold(group: Group, threshold: float) -> str:
        points = [p for p in comparison.members(group) if p.fusion_threshold_bytes == threshold]
        return milliseconds(points[0].measured_step_s) if points else ""

    def best(group: Group) -> str:
        point = comparison.best_measured(group)
        return f"{milliseconds(point.measured_step_s)} ({format_size(point.fusion_threshold_bytes)})"

    return [
        Column(head="ms a step", cell=where, left=True),
        Column(head="1 device", cell=lambda group: alone(comparison.best_measured(group)), dispensable=1),
        Column(head="0 (each tensor)", cell=lambda group: of_threshold(group, 0.0), dispensable=3),
        Column(head="best threshold", cell=best),
        Column(head="inf (all)", cell=lambda group: of_threshold(group, math.inf), dispensable=4),
        Column(head="speedup at best", cell=lambda group: speedup(comparison.best_measured(group)), dispensable=1),
        Column(
            head="model chose",
            cell=lambda group: format_size(comparison.best_predicted(group).fusion_threshold_bytes),
            dispensable=2,
        ),
    ]


def _completed(experiment: Experiment) -> Experiment:
    given = [threshold_bytes(value) for value in experiment.values("fusion_threshold_bytes")]
    return of_devices(experiment, sorted(set(given or telling_thresholds(experiment))))


def _apart(experiment: Experiment) -> tuple[str, ...]:
    return (*places(experiment), "devices")


QUESTION = Question(
    name="fusion-threshold",
    about="the fusion threshold",
    completed=_completed,
    apart=_apart,
    nulls=PREDICTED_NULLS,
    alternatives=True,
    question=question,
    answer=_answer,
    more_answers=_one_device,
    tiles=_tiles,
    points=_points,
    chart=_chart,
    figure_name="step_time",
    figure_title="Step time",
    caption="Step time against the {threshold}. Dots: measured medians with their 95% intervals; line: predicted, "
    "with its {band}; dashed: predictions of the four baselines. 0 is one allreduce per tensor, "
    "inf one per step.",
    constant="the network and device count",
    effect="threshold",
    noun=lambda group: threshold_noun(group.runtime),
    label=_label,
    screen=_screen,
    worth=_worth,
    usual=_usual,
    fastest=_fastest,
)
