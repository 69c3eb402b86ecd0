"""A sweep on running ranks: predicts from the first rounds, then measures in turns with more of them."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from mpi4py import MPI
from msgspec.structs import replace

from dpsim import codec
from dpsim.data import load_dataset
from dpsim.harness.sweep.experiment import predict_beforehand
from dpsim.progress import Progress
from dpsim.records.sweep import Experiment, Predictions, read_predictions
from dpsim.runtime.recorder import seconds_per_event
from dpsim.study.measure import measure
from dpsim.study.on_ranks import Preparation, from_first
from dpsim.study.runners.training import TrainedSetting, check_losses
from dpsim.study.task import SweepTask, samples_for
from dpsim.study.time_limit import limit_s

_ONE_DEVICE_VISITS = 2
"""Visits a round to a setting of one device. There are few of them, where many settings share each other count."""


def sweep_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """Predict, then measure every setting until all intervals are narrow or the budget is spent.

    Rank 0 saves after every round and returns ``Samples`` (plain values).
    """
    task = codec.decode(argument, SweepTask, "sweep")
    experiment, folder = task.experiment, Path(task.folder)
    preparation = Preparation(comm, task.needed, report, task.before.inputs if task.before is not None else None)
    predictions = task.predictions or _predicted(comm, experiment, folder / "predictions.json", preparation)
    before = task.before or samples_for(predictions)
    dataset = load_dataset(experiment.dataset, experiment.seed)
    settings = [
        TrainedSetting(
            comm,
            point.setting,
            *predictions.made_from(point),
            dataset,
            experiment.seed,
            before.of(point.setting),
            preparation.watcher,
        )
        for point in predictions.points
    ]
    gc.collect()
    gc.freeze()
    one_device = [each for each in settings if each.setting.plan.devices == 1]
    samples = measure(
        settings,
        replace(before, recording_s_per_event=seconds_per_event()),
        folder / "samples.json",
        report,
        budget_s=experiment.budget_s,
        limit_s=limit_s(experiment.budget_s),
        interval=experiment.interval,
        seed=experiment.seed,
        often=one_device * (_ONE_DEVICE_VISITS - 1),
        beside=preparation.turns,
        inputs=preparation.inputs,
        check=lambda: check_losses(settings),
        comm=comm,
    )
    for each in settings:
        each.close()
    preparation.close()
    return codec.to_builtins(samples) if samples is not None else None


def _predicted(comm: MPI.Intracomm, experiment: Experiment, path: Path, preparation: Preparation) -> Predictions:
    """Return the predictions from the first rounds of profile and calibration, as rank 0 wrote them to ``path``."""
    preparation.first_rounds()

    def beforehand() -> Predictions:
        codec.write_record(path, predict_beforehand(experiment, preparation.inputs()))
        return read_predictions(path)

    return from_first(comm, beforehand)
