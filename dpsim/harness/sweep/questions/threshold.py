"""What the report of a sweep over the fusion threshold says: which one to choose, and whether the model knew it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from dpsim.harness.sweep.grids import of_devices, places, telling_thresholds
from dpsim.harness.sweep.scores import PREDICTED_NULLS
from dpsim.records.compared_point import ComparedPoint
from dpsim.records.comparison import Comparison, Group
from dpsim.records.sweep import Experiment
from dpsim.report.charts import Chart, Lines, Mark, Series
from dpsim.report.sweep.cells import PointColumns, points_table
from dpsim.report.sweep.charts import curve, point_name, size_ticks
from dpsim.report.sweep.question import Question
from dpsim.report.sweep.summary_table import alone, model_chose, speedup, where
from dpsim.report.sweep.tables import (
    LEGEND,
    by_network,
    own_runtime_note,
)
from dpsim.report.sweep.verdict import Verdict, slower_by, verdict
from dpsim.report.table import Column, Table
from dpsim.report.words import (
    devices_name,
    field_name,
    milliseconds,
    threshold_noun,
)
from dpsim.setting import threshold_bytes
from dpsim.units import format_size

OWN_RUNTIME = "dpsim (emulated)"
"""The label of dpsim's own runtime, whose computation is emulated, beside PyTorch's DDP."""


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
    panels = [_curve(comparison.members(group), verdict(comparison, group)) for group in comparison.groups]
    return Chart(panels=panels, height_in=3.5)


def _curve(points: Sequence[ComparedPoint], of: Verdict) -> Lines:
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
        marks=list(_marks(points, of)),
    ).within(1.3)


def _marks(points: Sequence[ComparedPoint], of: Verdict) -> Iterator[Mark]:
    """Yield the best points, as predicted and as measured, with labels on different sides; none without a choice."""
    best = {
        "predicted": points.index(of.chosen[0]) if of.choice and len(of.chosen) == 1 else None,
        "measured": None if of.best is None else points.index(of.best),
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
    pairs = [(point, point.alone) for point in comparison.members(group) if point.alone is not None]
    speedups = [point.measured_speedup or 1.0 for point, _ in pairs]
    if not pairs:
        return ""
    devices, low, high = devices_name(group.devices), min(speedups), max(speedups)
    if all(slower_by(group, point, alone) is not None for point, alone in pairs):
        return f"do not use {devices}, 1 is faster."
    gains = [slower_by(group, alone, point) is not None for point, alone in pairs]
    if all(gains):
        span = f"{low:.1f} to {high:.1f}" if f"{low:.1f}" != f"{high:.1f}" else f"{high:.1f}"
        settings = f", whatever the {threshold_noun(group.runtime)}" if len(pairs) > 1 else ""
        return f"{devices} are {span} times as fast as 1{settings}."
    if any(gains):
        return f"{devices} are {high:.1f} times as fast as 1 at best."
    return f"{devices} are as fast as 1, as far as can be seen."


def _fastest(comparison: Comparison, group: Group) -> str:
    """Return the settings that are as fast as the best: ``a threshold of 32 KiB or more``."""
    near = verdict(comparison, group).as_fast
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
        point = verdict(comparison, group).best
        return f"{milliseconds(point.measured_step_s)} ({format_size(point.fusion_threshold_bytes)})" if point else ""

    return [
        Column(head="ms a step", cell=where, left=True),
        Column(head="1 device", cell=lambda group: alone(comparison.best_measured(group)), dispensable=1),
        Column(head="0 (each tensor)", cell=lambda group: of_threshold(group, 0.0), dispensable=3),
        Column(head="best threshold", cell=best),
        Column(head="inf (all)", cell=lambda group: of_threshold(group, math.inf), dispensable=4),
        Column(head="speedup", cell=lambda group: speedup(comparison, group), dispensable=1),
        model_chose(comparison, lambda point: format_size(point.fusion_threshold_bytes)),
    ]


def _completed(experiment: Experiment) -> Experiment:
    thresholds = [threshold_bytes(value) for value in experiment.values("fusion_threshold_bytes")]
    return of_devices(experiment, sorted(set(thresholds or telling_thresholds(experiment))))


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
    more_answers=_one_device,
    short=lambda point: format_size(point.fusion_threshold_bytes),
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
