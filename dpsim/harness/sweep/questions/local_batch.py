"""What the report of a sweep over the local batch says: how fast each is, when a device is busy, what hides."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dpsim.errors import ConfigError
from dpsim.harness.sweep.grids import of_devices, one_threshold, places
from dpsim.harness.sweep.scores import PERFECT_SCALING, PROPORTIONAL
from dpsim.records.compared_point import ComparedPoint
from dpsim.records.comparison import Comparison, Group
from dpsim.records.sweep import Experiment
from dpsim.report.charts import Chart, Lines, Look
from dpsim.report.content import Tile
from dpsim.report.sweep.cells import PointColumns, points_table
from dpsim.report.sweep.charts import curve
from dpsim.report.sweep.question import Question
from dpsim.report.sweep.summary_table import setting_columns
from dpsim.report.sweep.tables import (
    LEGEND,
    group_title,
    own_runtime_note,
)
from dpsim.report.table import Column, Table
from dpsim.report.words import enumerated, percent

LEAST_BATCHES = 3
BUSY = 0.9
"""The share of a device's best samples/s from which on it counts as busy."""
HIDDEN = 0.05
"""The share of a step up to which exposed communication counts as hidden."""


class FromBatch(NamedTuple):
    """A local batch as it was measured and predicted; ``None``: at no batch of the curve."""

    measured: float | None
    predicted: float | None

    @property
    def texts(self) -> tuple[str, ...]:
        """Both as text; ``none`` where there is no such batch."""
        return tuple("none" if batch is None else f"{batch:g}" for batch in self)


def busy_from(points: Sequence[ComparedPoint]) -> FromBatch:
    """Return the smallest local batch from which on samples/s stay at 90 % of the best of the curve or more."""

    def of(source: str) -> float | None:
        rates = [(point.local_batch, point.global_batch / getattr(point, f"{source}_step_s")) for point in points]
        best = max(rate for _, rate in rates)
        return _from((batch, rate >= BUSY * best) for batch, rate in rates)

    return FromBatch(of("measured"), of("predicted"))


def hidden_from(points: Sequence[ComparedPoint]) -> FromBatch:
    """Return the smallest local batch from which on at most 5 % of the step are exposed communication."""
    measured = ((p.local_batch, p.exposed_communication_s / p.measured_step_s <= HIDDEN) for p in points)
    predicted = ((p.local_batch, p.predicted_exposed_communication_s / p.predicted_step_s <= HIDDEN) for p in points)
    return FromBatch(_from(measured), _from(predicted))


def _from(fulfilled: Iterable[tuple[float, bool]]) -> float | None:
    """Return the smallest batch from which on it is as wanted at every batch."""
    wanted = itertools.takewhile(lambda each: each[1], sorted(fulfilled, key=lambda each: (-each[0], each[1])))
    return min((batch for batch, _ in wanted), default=None)


def _question(comparison: Comparison) -> str:
    models = enumerated(point.model for point in comparison.points)
    scaling = "the same local batch on any number of devices" if comparison.experiment.weak else "a fixed global batch"
    return (
        f"How many samples per second does training {models} on {comparison.experiment.dataset} reach at each local "
        f"batch, with {scaling}; when is a device busy, when does communication no longer hide, and does the model "
        "know all this without a measured step?"
    )


def _beside(comparison: Comparison, group: Group) -> str:
    points = comparison.members(group)
    busy, predicted = busy_from(points).texts
    text = f"The devices reach {BUSY:.0%} of the most samples/s from local batch {busy} on (predicted: {predicted})."
    return f"{text} {_hiding(points)}" if max(point.devices for point in points) > 1 else text


def _hiding(points: Sequence[ComparedPoint]) -> str:
    hidden = hidden_from(points)
    if hidden.measured is None and hidden.predicted is None:
        share = min(point.exposed_communication_s / point.measured_step_s for point in points)
        return (
            f"Communication hides at none of these batches, as predicted: {percent(share)} of the step or more are "
            "exposed."
        )
    if hidden.measured is None:
        return f"Communication hides at none of these batches; it was predicted to, from {hidden.predicted:g} on."
    if hidden.measured == min(point.local_batch for point in points):
        if hidden.predicted == hidden.measured:
            expected = "as predicted"
        else:
            expected = "predicted: at none" if hidden.predicted is None else f"predicted: from {hidden.predicted:g} on"
        return (
            f"Communication hides at all of these batches ({expected}): at most {HIDDEN:.0%} of the step are exposed."
        )
    first, predicted = hidden.texts
    return f"Below a local batch of {first} (predicted: {predicted}) more than {HIDDEN:.0%} of the step are exposed."


def _tiles(comparison: Comparison, group: Group) -> tuple[Tile, ...]:
    busy, predicted = busy_from(comparison.members(group)).texts
    label = f"local batch from which {BUSY:.0%} of the most samples/s are reached; predicted {predicted}"
    return (Tile(value=busy, label=label),)


def _share_exposed(point: ComparedPoint) -> str:
    """Return the share of the step that is exposed communication; nothing on one device."""
    return percent(point.exposed_communication_s / point.measured_step_s) if point.devices > 1 else ""


def _profiled(comparison: Comparison) -> str:
    """Return what the predictions lie between; nothing where each local batch of a script was profiled."""
    if comparison.experiment.script:
        return ""
    return "Only every other local batch was profiled; the predictions of the others lie between. "


def _points(comparison: Comparison) -> Table:
    points = comparison.scored
    show = PointColumns(comparison=comparison)
    expected = any(point.predicted_memory_bytes is not None for point in points)
    sized = any(point.memory_bytes is not None for point in points)
    scaled = any(point.measured_speedup for point in points if point.devices > 1)
    return points_table(
        comparison,
        columns=(
            show("local_batch"),
            show("global_batch", 6),
            show.samples_per_s(),
            show("measured_step_s"),
            show.interval(5),
            show("predicted_step_s"),
            show("error"),
            *show.other_runtimes(),
            *show.exposed(3, 4),
            Column(head="exposed share", cell=_share_exposed, dispensable=1),
            show("measured_speedup", shown=scaled),
            show("predicted_speedup", 2, shown=scaled),
            show("efficiency", 2, shown=scaled),
            show("memory_bytes", 2, shown=sized),
            show("predicted_memory_bytes", 4, shown=expected),
            *show.last(7),
        ),
        note=f"{LEGEND}, by samples/s. Median step and the 95% bootstrap interval of the median. Error = predicted / "
        "measured - 1. "
        + _profiled(comparison)
        + "Exposed: communication not hidden by computation. Speedup over one device at the same "
        + ("local" if comparison.experiment.weak else "global")
        + " batch; efficiency = speedup / devices."
        + sized * " Memory: what the device with the most allocates, without communication buffers."
        + own_runtime_note(comparison),
    )


def _chart(comparison: Comparison) -> Chart:
    panels = [_curve(group, comparison.members(group)) for group in comparison.groups]
    return Chart(panels=panels, height_in=3.6)


def _curve(group: Group, members: Sequence[ComparedPoint]) -> Lines:
    """Return samples per second at each local batch, and from which batch the devices are busy."""
    points = sorted(members, key=lambda point: point.local_batch)
    busy = busy_from(points)
    verticals: tuple[tuple[float | None, Look], ...] = ((busy.measured, "measured"), (busy.predicted, "predicted"))
    batches = [point.local_batch for point in points]
    return Lines(
        title=group_title(group),
        subtitle="samples per second",
        x_label="local batch",
        series=curve(points, batches, lambda point, step_s, source: point.global_batch / step_s),
        x_ticks={batch: f"{batch:g}" for batch in batches},
        y_text="{:,.0f}".format,
        log_x=True,
        verticals=[(batch, look) for batch, look in verticals if batch is not None],
    ).within(1.3)


def _screen(comparison: Comparison, groups: Sequence[Group]) -> list[Column[Group]]:
    def busy(group: Group) -> str:
        measured, predicted = busy_from(comparison.members(group)).texts
        return f"{measured} ({predicted})"

    return setting_columns(comparison, Column(head=f"{BUSY:.0%} of fastest from batch (predicted)", cell=busy))


def _completed(experiment: Experiment) -> Experiment:
    """Return the experiment with the batches that vary: the local ones under weak scaling, or else the global ones.

    No null knows how time depends on the batch: a sum of computation and allreduces would be the model itself.
    """
    if experiment.value("leaves"):
        raise ConfigError(
            f"a sweep over the local batch with {experiment.value('leaves')} leaves",
            allowed="training without leaves",
            remedy="leave out --reproducible and leaves",
        )
    varied = "local_batch" if experiment.weak else "global_batch"
    batches = experiment.values(varied)
    if len(batches) < LEAST_BATCHES:
        raise ConfigError(
            f"a sweep over the local batch with {len(batches)} values of {varied}: {', '.join(map(str, batches))}",
            allowed=f"{LEAST_BATCHES} or more: the curve is predicted between those that are profiled",
            remedy="give more, such as --local-batch 8,16,32,64,128",
        )
    return of_devices(experiment, one_threshold(experiment), varied=(varied,))


def _apart(experiment: Experiment) -> tuple[str, ...]:
    return (*places(experiment), "devices")


QUESTION = Question(
    name="local-batch",
    about="the local batch",
    completed=_completed,
    apart=_apart,
    nulls=(PERFECT_SCALING, PROPORTIONAL),
    single_nulls=(PROPORTIONAL,),
    interpolates=True,
    question=_question,
    beside=_beside,
    tiles=_tiles,
    points=_points,
    chart=_chart,
    figure_name="local_batch",
    figure_title="Samples per second",
    caption="Samples per second against the local batch, which doubles from mark to mark. Dots: measured, with the 95% "
    "intervals of the step; line: predicted, with its band; dashed: predictions of the baselines. The thin "
    f"vertical lines: the local batch from which the devices reach {BUSY:.0%} of their best, measured and predicted.",
    constant="the group (times of a sample)",
    effect="local batch by samples/s",
    noun=lambda group: "local batch",
    label=lambda comparison, point: f"local batch {point.local_batch:g}",
    screen=_screen,
)
