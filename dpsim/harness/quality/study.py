"""``study_quality``: fits, predicts, writes the predictions, and only then measures what was held out."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path

import msgspec

from dpsim import codec
from dpsim.dates import stamp
from dpsim.errors import FileFormatError
from dpsim.harness.quality.fits import Runs, cases, compare_gap, compare_steps, convergence, predict_gap, predict_steps
from dpsim.model.version import MODEL_VERSION
from dpsim.progress import Progress
from dpsim.records.convergence import ConvergenceFile
from dpsim.records.quality import (
    PREDICTIONS,
    PREDICTIONS_SCHEMA,
    RECORD,
    RUN_SCHEMA,
    RUNS,
    DivergenceResult,
    QualityPredictions,
    QualityRecord,
    QualityResults,
    QualityStudy,
    TrainingCase,
    TrainingRun,
    read_quality,
)
from dpsim.study.cases import run_each
from dpsim.study.environment import environment

CONVERGENCE = "convergence.json"
_FIT = "dpsim.study.runners.fit"


def study_quality(
    study: QualityStudy, folder: Path, progress: Progress, executor: Executor | None = None
) -> QualityResults:
    """Run a study in a folder, or resume it: finished runs are kept. Writes the record and the convergence file.

    The workers of an ``executor`` train side by side, and must see the same folder. Raises ``FileFormatError`` where
    the folder holds another study, ``ConfigError`` for an impossible setting.
    """
    if (finished := read_results(folder)) is not None:
        _check_same(finished.record.predictions.study == study, folder / RECORD)
        return finished
    fitted = run_all(cases(study, held_out=False), folder, progress, executor)
    predictions = _predictions(study, fitted, folder, progress, executor)
    runs = fitted | run_all(cases(study, held_out=True), folder, progress, executor)
    values = run_each(executor, f"{_FIT}:measured_values", study.divergence)
    record = QualityRecord(
        predictions=predictions,
        predictions_sha256=codec.digest(predictions),
        environment=environment(),
        measured_until=stamp(),
        runs=tuple(runs.values()),
        divergence=tuple(values),
    )
    derived = results(record)
    codec.write(folder / CONVERGENCE, derived.convergence)
    codec.write_record(folder / RECORD, record)
    return derived


def path_of(folder: Path, case: TrainingCase) -> Path:
    """Return the file of a case's run."""
    return folder / RUNS / f"{codec.digest(case)[:20]}.json"


def run_all(cases: Sequence[TrainingCase], folder: Path, progress: Progress, executor: Executor | None = None) -> Runs:
    """Return the runs of the cases: those in the folder are read, the others trained and saved there one by one.

    Raises ``FileFormatError`` for a damaged run, and what a training raises; runs that are finished stay.
    """
    missing = [case for case in cases if not path_of(folder, case).exists()]
    if missing:
        progress(f"{len(missing)} trainings to do, {len(cases) - len(missing)} finished before")
        tasks = [(case, path_of(folder.resolve(), case)) for case in missing]
        for number, _ in enumerate(run_each(executor, f"{_FIT}:train_into", tasks), start=1):
            if number % 10 == 0 or number == len(missing):
                progress(f"{number} of {len(missing)} trainings")
    return {case: _read(path_of(folder, case), case) for case in cases}


def _read(path: Path, case: TrainingCase) -> TrainingRun:
    run = codec.read(path, TrainingRun, "training run", RUN_SCHEMA)
    if run.case != case:
        raise FileFormatError(
            f"{path} is not the run that its name says",
            allowed="the file as dpsim wrote it",
            remedy="remove it, and it is trained again",
        )
    return run


def read_results(folder: Path) -> QualityResults | None:
    """The results of a finished study in a folder, ``None`` where there is none. Raises ``FileFormatError``."""
    return results(read_quality(folder)) if (folder / RECORD).exists() else None


def _check_same(same: bool, path: Path) -> None:
    if not same:
        raise FileFormatError(
            f"{path} is of another study",
            allowed="the folder of this study, or an empty one",
            remedy="choose another folder with --output",
        )


def _predictions(
    study: QualityStudy, fitted: Runs, folder: Path, progress: Progress, executor: Executor | None
) -> QualityPredictions:
    """The predictions in the folder, else new ones, which are written before any held-out run."""
    path = folder / PREDICTIONS
    if path.exists():
        before = codec.read(path, QualityPredictions, "quality predictions", PREDICTIONS_SCHEMA)
        _check_same(before.study == study, path)
        return before
    progress("predicting")
    predictions = QualityPredictions(
        model_version=MODEL_VERSION,
        study=study,
        predicted_at=stamp(),
        gap=tuple(predict_gap(each, fitted) for each in study.gap),
        divergence=tuple(run_each(executor, f"{_FIT}:predicted", study.divergence)),
        steps_to_target=tuple(predict_steps(each, fitted) for each in study.steps_to_target),
    )
    predictions = msgspec.structs.replace(predictions, predicted_at=stamp())
    codec.write_record(path, predictions)
    return codec.read(path, QualityPredictions, "quality predictions", PREDICTIONS_SCHEMA)


def _damage(record: QualityRecord, runs: Runs) -> str | None:
    """What shows that a record is not as it was written; ``None`` if nothing does."""
    predictions, study = record.predictions, record.predictions.study
    if codec.digest(predictions) != record.predictions_sha256:
        return "the digest of its predictions differs"
    if [len(points) for points in predictions.divergence] != [len(values) for values in record.divergence] or [
        len(predictions.gap),
        len(predictions.divergence),
        len(predictions.steps_to_target),
    ] != [len(study.gap), len(study.divergence), len(study.steps_to_target)]:
        return "it has not one prediction and one measurement for each part of its study"
    held_out = cases(study, held_out=True)
    missing = [case for case in (*cases(study, held_out=False), *held_out) if case not in runs]
    if missing:
        return f"{len(missing)} of its runs are missing"
    late = [case for case in held_out if runs[case].measured_at < predictions.predicted_at]
    return f"{len(late)} held-out runs are older than their predictions" if late else None


def results(record: QualityRecord) -> QualityResults:
    """What a record comes to. Raises ``FileFormatError`` where predictions are not those before its held-out runs."""
    predictions, study = record.predictions, record.predictions.study
    runs = {run.case: run for run in record.runs}
    if (reason := _damage(record, runs)) is not None:
        raise FileFormatError(
            f"the record of quality is damaged: {reason}",
            allowed="the record as dpsim wrote it",
            remedy="run the study again in an empty folder",
        )
    steps = tuple(
        compare_steps(each, curve, runs)
        for each, curve in zip(study.steps_to_target, predictions.steps_to_target, strict=True)
    )
    return QualityResults(
        record=record,
        gap=tuple(compare_gap(each, curve, runs) for each, curve in zip(study.gap, predictions.gap, strict=True)),
        divergence=tuple(
            DivergenceResult(study=each, points=points, measured=values)
            for each, points, values in zip(study.divergence, predictions.divergence, record.divergence, strict=True)
        ),
        steps_to_target=steps,
        convergence=ConvergenceFile(convergence=tuple(fit for each in steps if (fit := convergence(each)))),
    )
