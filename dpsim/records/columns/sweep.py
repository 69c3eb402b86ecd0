"""The columns of a sweep: over the fusion threshold, or over the number of devices."""

from __future__ import annotations

from typing import Any

from dpsim.columns import column, columns_of
from dpsim.fusion_rules import FUSION_RULES
from dpsim.records.comparison import ComparedPoint, OfSetting
from dpsim.setting import Setting

POINTS = tuple(columns_of(ComparedPoint).values())
SETTING = {name: each for name, each in columns_of(ComparedPoint).items() if isinstance(each, OfSetting)}
_OF_RUN = (*SETTING.values(), columns_of(Setting)["repeat"])

SAMPLES = (
    *_OF_RUN,
    column("round", "count", "The round of the interleaved run in which the step was measured, from 0."),
    column("step", "count", "The number of the sample within its run, from 0."),
    column("step_s", "s", "The time of the step on the slowest rank, as it was measured."),
    column("exposed_communication_s", "s", "Its communication that was not hidden by computation."),
    column("loss", "ratio", "The mean training loss of the step."),
)

TIMELINE = (
    *_OF_RUN,
    column("source", "name", "`measured` or `predicted`."),
    column("step", "count", "The step within the timeline, from 0."),
    column("rank", "count", "The rank, from 0."),
    column("lane", "name", "`compute` or `communication`."),
    column("operation", "name", "What was done, such as `backward dense2` or `allreduce 3`."),
    column("kind", "name", "The kind of operation, such as `backward` or `allreduce`."),
    column("start_s", "s", "When it began, on one clock for all ranks of the timeline."),
    column("end_s", "s", "When it ended, on the same clock."),
    column("size_bytes", "bytes", "The bytes of the message; 0 for computation.", "int64"),
    columns_of(ComparedPoint)["emulated_network"],
    column("clock", "name", "What read the times: `host`, or `device` for marks in the streams of a GPU."),
    column("asked_s", "s", "When the host had asked the device for it; NaN on the host's clock."),
)


def run_values(setting: Setting) -> dict[str, Any]:
    """Return the setting of a run under the names of its columns."""
    values = {name: each.of_setting(setting) for name, each in SETTING.items()} | {"repeat": setting.repeat}
    return without_threshold(values, setting)


def without_threshold(values: dict[str, Any], setting: Setting) -> dict[str, Any]:
    """Return the values with no threshold where there is none: on one device, and under rules that take none."""
    plan = setting.plan
    if plan.devices > 1 and FUSION_RULES.find(plan.fusion_rule).default_threshold_bytes is not None:
        return values
    return values | {"fusion_threshold_bytes": None}
