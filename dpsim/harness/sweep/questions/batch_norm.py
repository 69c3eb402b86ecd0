"""What the report of a sweep over batch norm says: what each norm costs in time, and whether the model knew it."""

from __future__ import annotations

from collections.abc import Sequence

from dpsim.harness.sweep.grids import of_devices, one_threshold, places, refuse_all_overlaps
from dpsim.harness.sweep.norms import NORM_FIELDS, NORMS_COMPARED, norm_cases
from dpsim.harness.sweep.scores import PERFECT_SCALING
from dpsim.nn.tokens import norm_of
from dpsim.records.compared_point import ComparedPoint
from dpsim.records.comparison import Comparison, Group
from dpsim.records.sweep import Experiment
from dpsim.report.charts import Chart
from dpsim.report.content import Tile
from dpsim.report.sweep.cells import PointColumns, points_table
from dpsim.report.sweep.charts import settings_chart
from dpsim.report.sweep.question import Question
from dpsim.report.sweep.summary_table import setting_columns
from dpsim.report.sweep.tables import LEGEND
from dpsim.report.table import Column, Table
from dpsim.report.words import percent

LOCAL, GLOBAL = "local", "global"


def norm_name(point: ComparedPoint) -> str:
    """Return the norm of a point: a mode of batch norm, or what stands in its place."""
    return norm_of(point.model, point.batch_norm)


def cost(group: tuple[ComparedPoint, ...], point: ComparedPoint) -> tuple[float, float] | None:
    """Return step with the point's norm / step with local batch norm - 1, measured and predicted; None without one."""
    local = next((each for each in group if norm_name(each) == LOCAL), None)
    if local is None or local is point:
        return None
    measured = point.measured_step_s / local.measured_step_s - 1
    return measured, point.predicted_step_s / local.predicted_step_s - 1


def _question(comparison: Comparison) -> str:
    model = comparison.points[0].model
    return (
        f"What does batch norm cost when training {model} on {comparison.experiment.dataset}: with the statistics of "
        "each device, of each leaf or of the whole batch, or with another norm in its place; and does the model know "
        "it without a measured step?"
    )


def _beside(comparison: Comparison, group: Group) -> str:
    costs = global_cost(comparison.members(group))
    if costs is None:
        return ""
    measured, predicted = (percent(cost, sign=True) for cost in costs)
    return (
        f"Statistics of the whole batch change a step by {measured} against those of each device (predicted "
        f"{predicted})."
    )


def global_cost(members: tuple[ComparedPoint, ...]) -> tuple[float, float] | None:
    """Return what statistics of the whole batch add to a step, measured and predicted; None where either is missing."""
    of_all = next((point for point in members if norm_name(point) == GLOBAL), None)
    return None if of_all is None else cost(members, of_all)


def _tiles(comparison: Comparison, group: Group) -> tuple[Tile, ...]:
    costs = global_cost(comparison.members(group))
    if costs is None:
        return ()
    label = f"added by global statistics; predicted {percent(costs[1], sign=True)}"
    return (Tile(value=percent(costs[0], sign=True), label=label),)


def _points(comparison: Comparison) -> Table:
    show = PointColumns(comparison=comparison)
    members = {group.name: comparison.members(group) for group in comparison.groups}

    def added(point: ComparedPoint, *, predicted: bool) -> str:
        costs = cost(members[point.group], point)
        return "" if costs is None else percent(costs[predicted], sign=True)

    return points_table(
        comparison,
        columns=(
            Column(head="norm", cell=norm_name, left=True),
            show.samples_per_s(3),
            show("measured_step_s"),
            show.interval(4),
            show("predicted_step_s"),
            show("error"),
            Column(head="over local", cell=lambda point: added(point, predicted=False)),
            Column(head="predicted over local", cell=lambda point: added(point, predicted=True), dispensable=1),
            *show.exposed(2, 2),
            *show.last(5),
        ),
        note=f"{LEGEND}. Norms: batch norm with the statistics of each device's samples (local), of each leaf (leaf), "
        "of the whole batch (global), or a model without batch norm: no norm (none), or a norm of each sample (group, "
        "instance, layer). Median step and the 95% bootstrap interval of the median. Error = predicted / measured - 1. "
        "Over local: step / step with local batch norm - 1. Exposed: communication not hidden by computation; the sums "
        "of global batch norm are, for computation waits for them.",
    )


def _chart(comparison: Comparison) -> Chart:
    return settings_chart(comparison, norm_name)


def _screen(comparison: Comparison, groups: Sequence[Group]) -> list[Column[Group]]:
    def added(group: Group) -> str:
        costs = global_cost(comparison.members(group))
        return "" if costs is None else f"{percent(costs[0], sign=True)} ({percent(costs[1], sign=True)})"

    return setting_columns(comparison, Column(head="global statistics add (predicted)", cell=added))


def _completed(experiment: Experiment) -> Experiment:
    refuse_all_overlaps(experiment)
    cases = tuple({name: row[name] for name in NORM_FIELDS if name in row} for row in experiment.rows)
    distinct = tuple(case for place, case in enumerate(cases) if case not in cases[:place])
    if len(distinct) == 1:
        emulated = experiment.value("compute") == "emulated"  # which cannot have leaves
        distinct = norm_cases(experiment, [n for n in NORMS_COMPARED if n != "leaf" or not emulated])
    batch = "local_batch" if experiment.weak else "global_batch"
    rest = experiment.changed(**dict.fromkeys(NORM_FIELDS))
    return of_devices(rest, one_threshold(rest), (batch,), distinct)


def _apart(experiment: Experiment) -> tuple[str, ...]:
    return (*places(experiment), "devices", "local_batch" if experiment.weak else "global_batch")


QUESTION = Question(
    name="batch-norm",
    about="batch norm",
    completed=_completed,
    apart=_apart,
    nulls=(PERFECT_SCALING,),
    alternatives_apart=False,
    question=_question,
    beside=_beside,
    short=norm_name,
    tiles=_tiles,
    points=_points,
    chart=_chart,
    figure_name="norms",
    figure_title="Samples per second with each norm",
    caption="Samples per second with each norm. Dots: measured medians with their 95% intervals; diamonds: predicted, "
    "with their bands.",
    constant="the group",
    effect="norm by samples/s",
    noun=lambda group: "norm",
    label=lambda comparison, point: f"norm {norm_name(point)}",
    screen=_screen,
)
