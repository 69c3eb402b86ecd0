"""The columns of results as tables: name, data type, unit and meaning. ``docs/results.md`` is generated from them.

``FRAMES`` has the columns of every table of every kind of result. Names are those of the ``points`` of ``--json``. A
field of a nested object has a dot in its name, as in ``null_step_s.constant``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpsim.columns import AnyColumn, column, columns_of, nested
from dpsim.fusion_rules import FUSION_RULES
from dpsim.plan import Plan
from dpsim.records.bench_result import BenchPoint
from dpsim.records.compared_point import ComparedPoint, OfSetting
from dpsim.records.reproduce import Difference, Reproduction
from dpsim.records.train import RECORDED, TrainConfig, TrainResult
from dpsim.setting import Setting

_BENCH = columns_of(BenchPoint)
_SWEEP = columns_of(ComparedPoint)
_SETTING = {name: each for name, each in _SWEEP.items() if isinstance(each, OfSetting)}
_OF_RUN = (*_SETTING.values(), columns_of(Setting)["repeat"])
_FIELDS = columns_of(TrainConfig) | columns_of(Setting) | columns_of(Plan)
_TARGET_LOSS = column("target_loss", "ratio", "The loss at which training ends.")
_LOSSES = (
    column("step", "count", "The step of the training, from 1."),
    column("loss", "ratio", "The mean training loss of the step."),
)
CONFIGURATION = tuple(
    column
    for name, column in columns_of(Plan).items()
    if name in ("devices", "leaves") or name not in Reproduction.__struct_fields__
)
"""The columns of a plan that differ between the runs of a reproduction: those that it has several values of."""
_NESTED = {
    "optimizer": (
        column("optimizer.kind", "name", "The optimizer; missing in files of earlier versions."),
        column("optimizer.learning_rate", "ratio", "Its learning rate."),
        column("optimizer.momentum", "ratio", "The momentum of SGD and LARS."),
        column("optimizer.weight_decay", "ratio", "Its weight decay."),
    ),
    "rate_schedule": (
        column("rate_schedule.decay.kind", "name", "How the learning rate changes over time."),
        column("rate_schedule.warmup_epochs", "count", "The epochs in which the learning rate rises first.", "float64"),
    ),
}
_TRAINING = tuple(column for name in (*RECORDED, "devices") for column in _NESTED.get(name) or (_FIELDS[name],))
"""The columns of the fields of a training, those that a result has beside them."""

FRAMES: Mapping[str, Mapping[str, tuple[AnyColumn, ...]]] = {
    "sweep": {
        "points": tuple(_SWEEP.values()),
        "samples": (
            *_OF_RUN,
            column("round", "count", "The round of the interleaved run in which the step was measured, from 0."),
            column("step", "count", "The number of the sample within its run, from 0."),
            column("step_s", "s", "The time of the step on the slowest rank, as it was measured."),
            column("exposed_communication_s", "s", "Its communication that was not hidden by computation."),
            column("loss", "ratio", "The mean training loss of the step."),
            column("clean", "ratio", "1 where other processes left the step undisturbed, 0 where not."),
        ),
        "timeline": (
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
            _SWEEP["emulated_network"],
            column("clock", "name", "What read the times: `host`, or `device` for marks in the streams of a GPU."),
            column("asked_s", "s", "When the host had asked the device for it."),
        ),
    },
    "bench": {
        "points": tuple(_BENCH.values()),
        "samples": (
            *(_BENCH[name] for name in ("size_bytes", "dtype", "devices", "system", "peer")),
            column(
                "algorithm", "name", "The allreduce algorithm; `scaling` is the bound, `memcpy` a copy within a GPU."
            ),
            *(_BENCH[name] for name in ("default", "in_place", "cached")),
            column("repeat", "count", "0, or 1 for the second run of the default algorithm, which shows the noise."),
            column("round", "count", "The round of the interleaved run, from 0."),
            column("step", "count", "The number of the call within its round, from 0."),
            column("time_s", "s", "The time of the call on the slowest rank."),
        ),
    },
    "reproduce": {
        "points": (
            *CONFIGURATION,
            column("promised", "yes or no", "Whether dpsim promises the bits of one device here."),
            column("digest", "text", "The SHA-256 of parameters, optimizer state and running statistics at the end."),
            column("losses_digest", "text", "The SHA-256 of the losses of all steps."),
            column("final_loss", "ratio", "The training loss of the last step."),
            column("identical", "yes or no", "Whether all ranks ended with the bits of one device."),
            *nested(Difference, "first_difference"),
            column("parameter_drift", "ratio", "The relative distance |w_n - w_1| / |w_1| after the last step."),
            column("loss_drift", "ratio", "The relative difference of the last step's loss from one device's."),
            column(
                "statistics_drift",
                "ratio",
                "The difference of a device's batch-norm means from the whole batch's, in standard deviations.",
            ),
            column("predicted_parameter_drift", "ratio", "The prediction of parameter_drift."),
            column("predicted_statistics_drift", "ratio", "The prediction of statistics_drift."),
        ),
        "samples": (*CONFIGURATION, *_LOSSES),
    },
    "quality": {
        "points": (
            column(
                "measure",
                "name",
                "What was predicted: `gap` of batch norm, in the log of the training loss; RMS `divergence` of a "
                "statistic; or `steps_to_target`.",
            ),
            _FIELDS["model"],
            _FIELDS["dataset"],
            _FIELDS["global_batch"],
            column("local_batch", "count", "The samples of a device; missing for steps to a target.", "Int64"),
            _TARGET_LOSS,
            column("layer", "name", "The batch norm whose statistic diverges; missing for other measures."),
            column("statistic", "name", "Which of its statistics, mean or variance; missing for other measures."),
            column("held_out", "yes or no", "Whether it was predicted before it was measured, not fitted."),
            column("predicted", "ratio", "The prediction, or the fitted curve."),
            column("measured", "ratio", "What was measured: the mean gap, the RMS, or the median number of steps."),
            column("error", "ratio", "The relative error: predicted / measured - 1."),
        ),
        "samples": (
            _FIELDS["model"],
            _FIELDS["dataset"],
            _FIELDS["global_batch"],
            column("local_batch", "count", "The samples of a leaf, which stands for a device."),
            _FIELDS["batch_norm"],
            column("learning_rate", "ratio", "The learning rate."),
            column("momentum", "ratio", "The momentum."),
            _FIELDS["seed"],
            column("steps", "count", "The most steps that it may take."),
            _TARGET_LOSS,
            column("final_loss", "ratio", "The mean training loss of the last epoch, with batch statistics."),
            column("training_set_loss", "ratio", "The loss on the training set at the end, with running statistics."),
            column("test_loss", "ratio", "The loss on the test set at the end."),
            column("test_accuracy", "ratio", "The accuracy on the test set at the end."),
        ),
    },
    "train": {
        "points": (*_TRAINING, *columns_of(TrainResult).values()),
        "samples": (*_TRAINING, *_LOSSES),
    },
}
"""Columns by kind of result and by table; a table that a kind lacks is not there."""


def run_values(setting: Setting) -> dict[str, Any]:
    """Return the setting of a run under the names of its columns."""
    values = {name: each.of_setting(setting) for name, each in _SETTING.items()} | {"repeat": setting.repeat}
    return without_threshold(values, setting)


def without_threshold(values: dict[str, Any], setting: Setting) -> dict[str, Any]:
    """Return the values with no threshold where there is none: on one device, and under rules that take none."""
    plan = setting.plan
    if plan.devices > 1 and FUSION_RULES.find(plan.fusion_rule).default_threshold_bytes is not None:
        return values
    return values | {"fusion_threshold_bytes": None}
