"""What the report of a sweep over any grid of settings says: which trains fastest, and whether the model knew it."""

from __future__ import annotations

from dpsim.errors import ConfigError
from dpsim.fields import Decides
from dpsim.harness.sweep.grids import fitting, places, refuse_all_overlaps
from dpsim.harness.sweep.scores import PREDICTED_NULLS
from dpsim.records.compared_point import ComparedPoint
from dpsim.records.comparison import Comparison
from dpsim.records.sweep import Experiment
from dpsim.report.sweep.cells import PointColumns, points_table
from dpsim.report.sweep.charts import map_chart, settings_chart
from dpsim.report.sweep.question import Question
from dpsim.report.sweep.summary_table import setting_columns
from dpsim.report.sweep.tables import LEGEND, own_runtime_note
from dpsim.report.table import Column, Table
from dpsim.report.words import enumerated, field_name
from dpsim.report.write import figure
from dpsim.setting import FIELDS

_MAP = (
    "Samples per second at each setting, measured above and predicted below: the darker, the faster. ★ fastest "
    "of the group, or as fast as any, ◆ predicted to be."
)

_MEMORY = " Memory: what the device with the most has allocated, without buffers of communication."


def setting_name(comparison: Comparison, point: ComparedPoint) -> str:
    """Return the compared values of a setting: ``algorithm ring, global batch 512``."""
    return ", ".join(f"{field_name(name, point.runtime)} {point.text(name)}" for name in comparison.compared)


def _question(comparison: Comparison) -> str:
    fields = enumerated(field_name(name, comparison.points[0].runtime) for name in comparison.compared) or "setting"
    models = enumerated(point.model for point in comparison.points)
    verb = "train" if len(comparison.compared) > 1 else "trains"
    return (
        f"Which {fields} {verb} {models} on {comparison.experiment.dataset} fastest, in samples per second, and does "
        "the model know it without a measured step?"
    )


def _points(comparison: Comparison) -> Table:
    points = comparison.scored
    show = PointColumns(comparison=comparison)
    scaled = any(point.measured_speedup for point in points)
    sized = "strategy" in comparison.compared and any(point.memory_bytes is not None for point in points)

    def value(name: str) -> Column[ComparedPoint]:
        return Column(
            head=field_name(name, points[0].runtime),
            cell=lambda point: point.text(name),
            left=name != "devices",
        )

    return points_table(
        comparison,
        columns=(
            *(value(name) for name in comparison.compared),
            show.samples_per_s(),
            show("measured_step_s"),
            show.interval(3),
            show("predicted_step_s"),
            show.predicted_interval(),
            show("error"),
            *show.other_runtimes(),
            *show.exposed(1, 4),
            show("measured_speedup", shown=scaled),
            show("predicted_speedup", 2, shown=scaled),
            show("memory_bytes", 3, shown=sized),
            show("predicted_memory_bytes", 4, shown=sized),
            *show.last(5),
        ),
        note=f"{LEGEND}, by samples/s. Median step and the 95% bootstrap interval of the median. Error = predicted / "
        "measured - 1. Exposed: communication not hidden by computation. Speedup over one device at the same batch, "
        "where one device was measured." + (_MEMORY if sized else "") + own_runtime_note(comparison),
    )


def _completed(experiment: Experiment) -> Experiment:
    refuse_all_overlaps(experiment)
    if not experiment.varied:
        raise ConfigError(
            f"the experiment {experiment.name} has a single setting, with which nothing can be compared",
            allowed="[axes] with several values of a field, or several [[cases]]",
            remedy="give an axis several values, such as algorithm = ['ring', 'halving-doubling']",
        )
    if max(setting.plan.devices for setting in fitting(experiment)) < 2:
        raise ConfigError(
            "a sweep on one device", allowed="two devices or more in some setting: one communicates nothing"
        )
    return experiment


def _apart(experiment: Experiment) -> tuple[str, ...]:
    varied = experiment.varied
    compared = experiment.compared or tuple(name for name in varied if not FIELDS[name].decides & Decides.PROBLEM)
    batch = tuple(name for name in ("global_batch", "local_batch", "devices") if name in varied)[:1]
    where = places(experiment) if experiment.script else ("network",)
    shown = (*where, *(compared or batch), *(("algorithm", "overlap") if experiment.script else ()))
    return (*where, *(name for name in varied if name not in shown))  # DDP's algorithm and overlap are its place's


QUESTION = Question(
    name="settings",
    about="settings",
    completed=_completed,
    apart=_apart,
    nulls=PREDICTED_NULLS,
    alternatives_apart=False,
    question=_question,
    points=_points,
    chart=settings_chart,
    figure_name="settings",
    figure_title="Samples per second",
    caption="Samples per second at each setting. Dots: measured medians with their 95% intervals; diamonds: predicted, "
    "with their {band}s.",
    constant="the group",
    effect="setting by samples/s",
    label=setting_name,
    screen=lambda comparison, groups: setting_columns(comparison),
    more_charts=lambda comparison: (figure("map", "The map of the settings", _MAP, map_chart(comparison)),),
)
