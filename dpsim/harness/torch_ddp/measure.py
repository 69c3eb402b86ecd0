"""``measure``: predicts what PyTorch's DDP will do with a user's script, then lets it train, and compares."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from dpsim import codec
from dpsim.errors import ConfigError
from dpsim.folder_lock import locked
from dpsim.harness.measurement.environment import environment, stamp
from dpsim.harness.measurement.loop import LEAST_ROUNDS
from dpsim.harness.sweep.compare import compare
from dpsim.harness.sweep.samples import Samples, samples_before
from dpsim.harness.sweep.sweep import check_same_machine, existing_predictions
from dpsim.harness.torch_ddp.experiment import DdpConfig, experiment_of
from dpsim.harness.torch_ddp.gpus import check_gpus, predicted_by_nccl
from dpsim.harness.torch_ddp.own_runtime import own_settings
from dpsim.harness.torch_ddp.predict import predicted
from dpsim.harness.torch_ddp.ready import ready_errors
from dpsim.harness.torch_ddp.task import MeasureTask
from dpsim.launch.jobs import check_launcher, on_ranks
from dpsim.launch.protection import script_protection
from dpsim.launch.scratch import scratch
from dpsim.launch.user_script import is_module
from dpsim.machine import Machine
from dpsim.progress import Progress
from dpsim.records.comparison import Comparison
from dpsim.records.sweep import Predictions, Results, read_predictions, read_results
from dpsim.report.sweep.write import write_report
from dpsim.torch_ddp.profile_script import check_torch
from dpsim.units import format_size
from dpsim.workload import Workload

_SAVED = "samples"

_PROCESS_BYTES = 2**28
"""What a process takes that has loaded PyTorch, without its model."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known before the prediction: the profile of the script, and the machine if NCCL communicates."""

    workload: Workload | None = None
    machine: Machine | None = None


def predict(config: DdpConfig, known: Known, folder: Path, progress: Progress) -> Predictions:
    """The predictions of a measurement, written into ``folder``; those that it holds already, if there are any.

    Raises ``ConfigError``.
    """
    check_torch()
    check_launcher()
    _check_machine(config, known)
    with locked(folder):
        return _predictions(config, known, folder, progress)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The comparison, and the relative errors of the moments when buckets became ready (none without a hook)."""

    comparison: Comparison
    ready_errors: list[float]


def measure(config: DdpConfig, known: Known, folder: Path, progress: Progress) -> Measured:
    """Predict, measure and compare; writes ``predictions.json`` first, then ``results.json`` and the report.

    What the folder holds is not done again, and an interrupted measurement goes on. Raises ``ConfigError``.
    """
    check_torch()
    check_launcher()
    _check_machine(config, known)
    if config.on_gpus:
        check_gpus(config.most_devices)
    with locked(folder):
        predictions = _predictions(config, known, folder, progress)
        path = folder / "results.json"
        if path.exists():
            progress(f"{folder} holds this experiment already; nothing is measured again")
        else:
            codec.write(path, _measured(predictions, folder, progress, script_may_write=config.script_may_write))
            shutil.rmtree(folder / _SAVED, ignore_errors=True)
        results = read_results(path)
        comparison = compare(predictions, results)
        progress("writing the report")
        write_report(folder, predictions, results, comparison)
        return Measured(comparison=comparison, ready_errors=ready_errors(predictions, results))


def _check_memory(processes: int) -> None:
    """Raises ``ConfigError`` where so many processes with PyTorch do not fit into memory."""
    needed, free = processes * _PROCESS_BYTES, psutil.virtual_memory().available
    if needed > free:
        raise ConfigError(
            f"a measurement in {processes} processes on this machine, each with PyTorch: {format_size(needed)} or more",
            allowed=f"{format_size(free)}, the memory that is free",
            remedy="give fewer --devices or fewer settings; dpsim predict predicts any number of devices",
        )


def _check_machine(config: DdpConfig, known: Known) -> None:
    """Raises ``ConfigError`` for a machine where the allreduces are calibrated here."""
    if known.machine is not None and not config.on_gpus:
        raise ConfigError(
            f"--machine with --communication {','.join(config.communication)}, whose allreduces are calibrated here",
            allowed="--machine with --communication nccl",
            remedy="leave --machine out",
        )


def _predictions(config: DdpConfig, known: Known, folder: Path, progress: Progress) -> Predictions:
    path = folder / "predictions.json"
    if path.exists():
        before = read_predictions(path)
        workload = known.workload or before.workloads[0]
        return existing_predictions(folder, experiment_of(config, workload)) or before
    if known.workload is not None:
        existing_predictions(folder, experiment_of(config, known.workload))  # raises before anything runs
    if config.on_gpus:
        codec.write(path, predicted_by_nccl(config, known.workload, known.machine, progress))
    else:
        _check_memory(config.most_devices)
        codec.write(path, predicted(config, known.workload, progress))
    return read_predictions(path)


def _measured(predictions: Predictions, folder: Path, progress: Progress, *, script_may_write: bool) -> Results:
    """Let DDP train every predicted setting: those of each network and way to communicate take turns.

    Goes on where an earlier measurement into this folder was interrupted.
    """
    current = environment()
    check_same_machine(predictions.environment, current, folder)
    places = list(dict.fromkeys(point.setting.where for point in predictions.points))
    measured: list[Samples] = []
    (folder / _SAVED).mkdir(exist_ok=True)
    for place, path in zip(places, _saved_samples(folder, predictions), strict=True):
        samples = samples_before(path, predictions, progress)
        if not samples.complete:
            progress(
                f"measuring on {place}: a budget of {predictions.experiment.budget_s / len(places):.3g} s, but"
                f" {LEAST_ROUNDS} rounds of all settings in any case"
            )
            samples = _measured_on(place, predictions, samples, path, progress, script_may_write=script_may_write)
            codec.write(path, samples)
        measured.append(samples)
    points = [point for samples in measured for point in samples.points]
    return Results(
        experiment=predictions.experiment,
        environment=current,
        predictions_sha256=codec.digest(predictions),
        predicted_at=predictions.predicted_at,
        measured_from=measured[0].measured_from,
        measured_until=stamp(),
        points=tuple(point for point in points if point.setting.runtime != "dpsim"),
        other_points=tuple(point for point in points if point.setting.runtime == "dpsim"),
    )


def _saved_samples(folder: Path, predictions: Predictions) -> list[Path]:
    """The file in which the samples of each place are saved until all are measured, in a folder for them alone.

    The ranks write it, and so can the script.
    """
    places = dict.fromkeys(point.setting.where for point in predictions.points)
    return [folder / _SAVED / f"{number}.json" for number in range(1, len(places) + 1)]


def _measured_on(
    place: str,
    predictions: Predictions,
    before: Samples,
    path: Path,
    progress: Progress,
    *,
    script_may_write: bool,
) -> Samples:
    """The samples of all settings of one place, those from before an interruption included."""
    experiment = predictions.experiment
    of_place = [point for point in predictions.points if point.setting.where == place]
    settings = tuple(point.setting for point in of_place)
    with scratch("ddp") as meeting:
        protection = None
        if not script_may_write:
            protection = script_protection(experiment.script, experiment.arguments, str(meeting), str(path.parent))
        task = MeasureTask(
            settings=settings + own_settings(settings) * bool(experiment.other_runtimes),
            script=experiment.script if is_module(experiment.script) else str(Path(experiment.script).absolute()),
            arguments=experiment.arguments,
            seed=experiment.seed,
            budget_s=experiment.budget_s / len(_saved_samples(path.parent, predictions)),
            interval=experiment.interval,
            folder=str(meeting),
            before=before,
            save_to=str(path.resolve()),
            sets_local_batch="local_batch" in experiment.axes,
            workload=predictions.workloads[of_place[0].workload],
            machine=predictions.machines[of_place[0].machine],
        )
        _check_memory(task.ranks)
        measured = on_ranks(
            "dpsim.harness.torch_ddp.measure_on_ranks:measure_on_ranks",
            dict(codec.to_builtins(task)),
            devices=task.ranks,
            progress=progress,
            protection=protection,
        )
    return msgspec.structs.replace(codec.decode(measured, Samples, "samples"), complete=True)
