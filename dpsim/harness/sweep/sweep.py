"""``sweep``: calibrate, profile, predict every point, and only then measure; compare, and write the report."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Self

import msgspec

from dpsim import codec
from dpsim.dates import stamp
from dpsim.errors import ConfigError, DpsimError
from dpsim.folder_lock import locked
from dpsim.harness.quality.fits import cases
from dpsim.harness.sweep.compare import compare, with_groups
from dpsim.harness.sweep.coverage import residuals
from dpsim.harness.sweep.drift import DRIFT, drift, read_drift
from dpsim.harness.sweep.experiment import needed_for, predict_from
from dpsim.harness.sweep.packed import PACKED, read
from dpsim.harness.sweep.parts import joined_inputs
from dpsim.harness.sweep.quality import QUALITY, measure_quality, read_quality, study_of
from dpsim.harness.sweep.questions import completed
from dpsim.model import past
from dpsim.model.residuals import all_widths
from dpsim.model.version import MODEL_VERSION
from dpsim.progress import Progress
from dpsim.records.comparison import SweepData
from dpsim.records.quality import RECORD, QualityStudy
from dpsim.records.sweep import (
    Environment,
    Experiment,
    MeasuredPart,
    Predictions,
    Results,
    read_experiment,
    read_predictions,
    read_results,
)
from dpsim.report.sweep.write import write_report
from dpsim.setting import FIELDS, Grid
from dpsim.study.cases import run
from dpsim.study.environment import environment
from dpsim.study.inputs import networks_of, preparation_s, seconds_of_kind
from dpsim.study.loop import LEAST_ROUNDS
from dpsim.study.task import Samples, SweepTask, samples_before
from dpsim.study.time_limit import FEWEST_ROUNDS, first_rounds_text, limit_s

_SAMPLES = "samples.json"
ARRAY = "array.json"
"""The file of a folder whose sweep is measured by a job array (``dpsim.harness.sweep.array``)."""
_REPORT_S, _BUSY_REPORT_S = 10.0, 30.0
"""About what starting the ranks and writing the report take, on a quiet machine and beside others."""


def read_swept(folder: Path) -> SweepData:
    """Read the records of a finished sweep, and compare them. Raises ``FileFormatError``."""
    if (packed := folder / PACKED).is_file():
        swept = read(packed)
        comparison = compare(swept.predictions, swept.results, blind=swept.blind)
        return SweepData(swept.predictions, swept.results, comparison, None, swept.blind)
    blind = folder / "blind.json"
    predictions, results = read_predictions(folder / "predictions.json"), read_results(folder / "results.json")
    of_drift, of_blind = read_drift(predictions, folder), read_predictions(blind) if blind.exists() else None
    comparison = compare(predictions, results, of_drift, read_quality(predictions.experiment, folder), of_blind)
    return SweepData(predictions, results, comparison, of_drift, of_blind)


@dataclass(frozen=True, kw_only=True)
class Study:
    """An experiment, and what follows from it alone: derived once, for all that predict it, measure it and tell of it.

    ``run`` is the one driver of every study. How samples are taken is that of dpsim's own runtime; a study of a
    PyTorch script (``dpsim.harness.script.measure``) has its own.
    """

    experiment: Experiment
    quality: QualityStudy | None = None

    @classmethod
    def of(cls, declared: Experiment) -> Self:
        """Return the study of a declared experiment, with its defaults filled in. Raises ``ConfigError``."""
        experiment = completed(declared)
        quality = study_of(experiment) if experiment.settings else None  # impossible settings are refused first
        return cls(experiment=experiment, quality=quality)

    def finished(self, folder: Path) -> bool:
        """Return whether the folder, if it is of this experiment, has all its measurements."""
        names = ["results.json", *[DRIFT] * self.experiment.measures_drift]
        names += [f"{QUALITY}/{RECORD}"] * (self.quality is not None)
        return all((folder / name).exists() for name in names)

    def free_folder(self, reports: Path) -> Path:
        """Return the default folder of the study: ``reports/NAME``, ``reports/NAME-2`` and so on.

        It is the first that is new, empty, or holds the same experiment unfinished.
        """
        for number in itertools.count(1):
            folder = reports / (self.experiment.name if number == 1 else f"{self.experiment.name}-{number}")
            if self.finished(folder):
                continue
            with contextlib.suppress(DpsimError):
                self.existing(folder)
                return folder
        raise AssertionError("unreachable: there is always a next number")

    def existing(self, folder: Path) -> Predictions | None:
        """Return the predictions that the folder holds, if any. Raises ``ConfigError`` for another experiment."""
        return existing_predictions(folder, self.experiment)

    def run(self, folder: Path, progress: Progress, *, times_alone: bool = False) -> SweepData:
        """Predict and measure into ``folder``, or go on there where a study was interrupted; returns the records.

        Writes ``predictions.json`` (hashed before the first sample is taken), ``results.json``, where the experiment
        declares them the drift and the quality of training, and the report; with ``times_alone`` not these three.
        Raises ``ConfigError`` where the folder holds another experiment or another command writes into it,
        ``CommunicationError`` where ranks fail.
        """
        with locked(folder):
            finished = self.finished(folder)
            predictions = self.existing(folder)
            if predictions is None or not (folder / "results.json").exists():
                current = self.environment(folder)
                write_results(folder, current, self.samples(predictions, current, folder, progress))
                self.forget_samples(folder)
                predictions = read_predictions(folder / "predictions.json")
            if not times_alone:
                drift(predictions, folder, progress)
                if self.quality is not None:
                    measure_quality(self.quality, predictions, folder, progress)
            swept = read_swept(folder)
            if finished:
                progress(f"{folder} holds this experiment already; nothing is measured again")
            else:  # how far off the predictions were, for the intervals of the next studies
                measured_on = swept.results.environment
                past.add(measured_on.processor, measured_on.cores, residuals(swept.comparison))
            if not times_alone:
                progress("writing the report")
                write_report(folder, swept)
            return swept

    def environment(self, folder: Path) -> Environment:
        """Return where the samples in the folder are taken: here."""
        return environment()

    @property
    def preparing_s(self) -> float:
        """The seconds for which each kind of computation is profiled and calibrated beforehand, or twice that."""
        return seconds_of_kind(self.experiment.budget_s)

    def samples(
        self, predictions: Predictions | None, current: Environment, folder: Path, progress: Progress
    ) -> list[Samples]:
        """Profile, calibrate, predict and measure on ranks, or go on from the samples of an interrupted run.

        The ranks run ``dpsim.harness.sweep.on_ranks``; when they have measured enough, ``dpsim.study.measure`` decides.
        """
        if predictions is None:
            progress(plan_text(self))
        path = folder / _SAMPLES
        before: Samples | None = None
        if predictions is not None and path.exists():
            before = samples_before(path, predictions, progress)
            check_same_machine(predictions, current, folder)
        widths = all_widths(past.load(current.processor, current.cores))
        needed = needed_for(self.experiment, current)
        needed = msgspec.structs.replace(needed, widths=widths, seconds=self.preparing_s)
        task = SweepTask(
            experiment=self.experiment,
            needed=needed,
            folder=str(folder.resolve()),
            predictions=predictions if before is not None else None,
            before=before,
        )
        devices = max(setting.plan.devices for setting in needed.settings)
        networks = networks_of(needed.settings)
        kept = run("dpsim.harness.sweep.on_ranks:sweep_on_ranks", task, devices, progress, networks)
        return [codec.decode(kept, Samples, "samples")]

    def forget_samples(self, folder: Path) -> None:
        """Remove what was kept for a run that goes on; the results have it now."""
        (folder / _SAMPLES).unlink(missing_ok=True)


def sweep(experiment: Experiment, folder: Path, progress: Progress) -> SweepData:
    """Run a declared sweep into ``folder`` (``Study.run``)."""
    return Study.of(experiment).run(folder, progress)


def plan_text(of: Study) -> str:
    """Return how many settings a sweep measures, and about how long all of it takes."""
    experiment, settings, study, trainings = of.experiment, of.experiment.settings, of.quality, ""
    prepare_s, report_s = preparation_s(settings, of.preparing_s), _REPORT_S
    total_s = prepare_s + experiment.budget_s + report_s
    times = 1 + any(setting.emulated_compute for setting in settings)
    if study is not None:
        number = sum(len(cases(study, held_out=held_out)) for held_out in (False, True))
        trainings = f"; beside that {number} trainings, whose time is said before they start"
        trainings += " (--seeds 0 leaves them out)" * bool(study.gap)
    elif experiment.measures_drift:
        trainings = f"; beside that trainings of {experiment.steps} steps, whose time is said before they start"
    most_s = limit_s(experiment.budget_s)
    return (
        f"{len(settings)} settings, some of them twice, about {total_s:.0f} s or more in all: "
        f"{first_rounds_text(prepare_s, times)} to profile and calibrate, a budget of {experiment.budget_s:g} s to "
        f"measure (at most {most_s:g} s, where {LEAST_ROUNDS} rounds of all settings do not fit: then {FEWEST_ROUNDS} "
        f"are measured, and then fewer settings), {report_s:.0f} s for the report, {_BUSY_REPORT_S:.0f} s where cores "
        f"are busy{trainings}"
    )


def declared(name: str) -> Experiment:
    """Return the experiment that ``dpsim.experiments`` declares under a name, such as ``fusion_threshold``."""
    source = resources.files("dpsim.experiments.sweeps") / f"{name}.toml"
    with resources.as_file(source) as path:
        return read_experiment(path)


def existing_predictions(folder: Path, experiment: Experiment) -> Predictions | None:
    """Return the predictions in the folder, ``None`` if it is empty. Raises ``ConfigError`` for another experiment."""
    path = folder / "predictions.json"
    if not path.exists():
        files = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        if ARRAY in files:
            raise ConfigError(
                f"the folder {folder} holds a sweep that a job array measures",
                allowed="a new or empty folder",
                remedy="give --array to go on with it, or choose another folder with --output",
            )
        if files:
            raise ConfigError(
                f"the folder {folder} is not empty ({', '.join(files[:4])}) and holds no sweep of dpsim",
                allowed="a new or empty folder, or one of this experiment",
                remedy="choose another folder with --output",
            )
        return None
    predictions = read_predictions(path)
    if predictions.experiment != experiment:
        there, here = _declared_values(predictions.experiment), _declared_values(experiment)
        differing = [f"{name} is {there[name]} there, {here[name]} here" for name in there if there[name] != here[name]]
        raise ConfigError(
            f"the folder {folder} holds the report of another experiment: {'; '.join(differing[:3])}",
            allowed="a new folder, or the same experiment",
            remedy="choose another folder with --output; nothing in this one was changed",
        )
    return predictions


def _declared_values(experiment: Experiment) -> dict[str, str]:
    """What an experiment declares, by name, for a message: each field of its settings with all its values."""
    settings = {name: ", ".join(map(str, experiment.values(name))) or "left out" for name in FIELDS}
    grid = Grid.__struct_fields__
    return settings | {
        name: str(getattr(experiment, name)) for name in Experiment.__struct_fields__ if name not in grid
    }


def write_results(folder: Path, current: Environment, measured: Sequence[Samples]) -> None:
    """Write the samples of all places, or of all parts, as ``results.json``.

    Before it what was profiled and calibrated in turns with them is written, and the blind predictions from that.
    """
    predictions, inputs, blind = read_predictions(folder / "predictions.json"), measured[-1].inputs, None
    parts = [samples for samples in measured if samples.experiment != predictions.experiment]
    if parts:
        inputs = joined_inputs([samples.inputs for samples in parts if samples.inputs is not None])
    if inputs is not None:
        inputs = inputs.with_medians()
        codec.write_record(folder / "inputs.json", inputs)
        codec.write_record(folder / "blind.json", predict_from(predictions, inputs, same_minutes=True))
        blind = read_predictions(folder / "blind.json")
    experiment, points = predictions.experiment, [point for samples in measured for point in samples.points]
    others = [point for point in points if point.setting.runtime in experiment.other_runtimes]
    results = Results(
        experiment=experiment,
        environment=current,
        predictions_sha256=codec.digest(predictions) if parts else measured[0].predictions_sha256,
        predicted_at=predictions.predicted_at,
        measured_from=min(samples.measured_from for samples in measured),
        measured_until=stamp(),
        points=tuple(point for point in points if point not in others),
        recording_s_per_event=measured[0].recording_s_per_event,
        other_points=tuple(others),
        inputs_sha256="" if inputs is None else codec.digest(inputs),
        blind_sha256="" if blind is None else codec.digest(blind),
        model_version=predictions.model_version,
        parts=tuple(
            MeasuredPart(predictions_sha256=samples.predictions_sha256, measured_from=samples.measured_from)
            for samples in parts
        ),
    )
    codec.write_record(folder / "results.json", with_groups(results, predictions, blind))


def check_same_machine(predictions: Predictions, current: Environment, folder: Path) -> None:
    """Raise ``ConfigError`` unless the predictions were made on this machine, by this version of the model."""
    predicted = predictions.environment
    if (predicted.processor, predicted.cores, predicted.blas) != (current.processor, current.cores, current.blas):
        raise ConfigError(
            f"the predictions in {folder} were made on {predicted.processor} with {predicted.cores} cores, this is "
            f"{current.processor} with {current.cores}",
            allowed="the machine that was calibrated",
            remedy="start another sweep for this machine with --output",
        )
    if predictions.model_version != MODEL_VERSION:
        raise ConfigError(
            f"the predictions in {folder} were made by model {predictions.model_version}, this version of dpsim has "
            f"model {MODEL_VERSION}",
            allowed="one model for both predictions of a sweep",
            remedy="finish it with the version of dpsim that began it, or start another sweep with --output",
        )
