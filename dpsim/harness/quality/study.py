"""``study_quality``: fits, predicts, writes the predictions, and only then measures what was held out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from dpsim import codec
from dpsim.errors import FileFormatError
from dpsim.harness.quality.cases import Runs, cases, on_workers, run_all
from dpsim.harness.quality.fits import compare_gap, compare_steps, convergence, predict_gap, predict_steps
from dpsim.predict.statistics_divergence import STATISTICS, Spread, divergence, independent_rows
from dpsim.progress import Progress
from dpsim.records.convergence import ConvergenceFile
from dpsim.records.quality import (
    PREDICTIONS,
    PREDICTIONS_SCHEMA,
    RECORD,
    DivergencePoint,
    DivergenceResult,
    DivergenceStudy,
    QualityPredictions,
    QualityRecord,
    QualityResults,
    QualityStudy,
    read_quality,
)
from dpsim.study.environment import environment, stamp

CONVERGENCE = "convergence.json"
_Scale = Mapping[str, Mapping[str, Mapping[str, float]]]


def study_quality(study: QualityStudy, folder: Path, progress: Progress) -> QualityResults:
    """Run a study in a folder, or resume it: finished runs are kept. Writes the record and the convergence file.

    Raises ``FileFormatError`` where the folder holds another study, ``ConfigError`` for an impossible setting.
    """
    if (finished := read_results(folder)) is not None:
        _check_same(finished.record.predictions.study == study, folder / RECORD)
        return finished
    fitted = run_all(cases(study, held_out=False), folder, progress)
    predictions = _predictions(study, fitted, folder, progress)
    runs = fitted | run_all(cases(study, held_out=True), folder, progress)
    record = QualityRecord(
        predictions=predictions,
        predictions_sha256=codec.digest(predictions),
        environment=environment(),
        measured_until=stamp(),
        runs=tuple(runs.values()),
        divergence=_measured_divergence(study, predictions, progress),
    )
    derived = results(record)
    codec.write(folder / CONVERGENCE, derived.convergence)
    codec.write(folder / RECORD, record)
    return derived


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


def _predictions(study: QualityStudy, fitted: Runs, folder: Path, progress: Progress) -> QualityPredictions:
    """The predictions in the folder, else new ones, which are written before any held-out run."""
    path = folder / PREDICTIONS
    if path.exists():
        before = codec.read(path, QualityPredictions, "quality predictions", PREDICTIONS_SCHEMA)
        _check_same(before.study == study, path)
        return before
    progress("predicting")
    predictions = QualityPredictions(
        study=study,
        predicted_at=stamp(),
        gap=tuple(predict_gap(each, fitted) for each in study.gap),
        divergence=_predicted_divergence(study, progress),
        steps_to_target=tuple(predict_steps(each, fitted) for each in study.steps_to_target),
    )
    predictions = msgspec.structs.replace(predictions, predicted_at=stamp())
    codec.write(path, predictions)
    return codec.read(path, QualityPredictions, "quality predictions", PREDICTIONS_SCHEMA)


def _predicted_divergence(study: QualityStudy, progress: Progress) -> tuple[tuple[DivergencePoint, ...], ...]:
    if not study.divergence:
        return ()
    argument = {"studies": codec.to_builtins(study.divergence)}
    raw = on_workers("spreads", argument, len(study.divergence), progress)
    return tuple(
        predicted_divergence(
            each, {name: codec.decode(value, Spread, "spread") for name, value in spreads.items()}, scales
        )
        for each, (spreads, scales) in zip(study.divergence, raw, strict=True)
    )


def _measured_divergence(
    study: QualityStudy, predictions: QualityPredictions, progress: Progress
) -> tuple[tuple[float, ...], ...]:
    if not study.divergence:
        return ()
    argument = {"studies": codec.to_builtins(study.divergence)}
    raw = on_workers("divergences", argument, len(study.divergence), progress)
    return tuple(
        tuple(each[str(point.local_batch)][point.layer][point.statistic] for point in points)
        for each, points in zip(raw, predictions.divergence, strict=True)
    )


def predicted_divergence(
    study: DivergenceStudy, spreads: Mapping[str, Spread], scales: _Scale
) -> tuple[DivergencePoint, ...]:
    """Return the predicted divergence at every local batch, norm and statistic.

    The spread is that of a pass in which all samples were normalised together. With local statistics in the norms
    before it, a norm's samples spread less: the prediction is scaled by what was measured over what is predicted at one
    small local batch, ``scales``.
    """
    points = []
    for b in study.local_batches:
        for name, each in spreads.items():
            unscaled, null = (f(each, b, study.global_batch) for f in (divergence, independent_rows))
            at_scale = divergence(each, study.scaled_at, study.global_batch)
            for statistic in STATISTICS:
                actual = scales[str(study.scaled_at)][name][statistic]
                scale = actual / at_scale[statistic] if at_scale[statistic] > 0 else 1.0
                points.append(
                    DivergencePoint(
                        layer=name,
                        statistic=statistic,
                        local_batch=b,
                        predicted=scale * unscaled[statistic],
                        unscaled=unscaled[statistic],
                        independent_rows=null[statistic],
                    )
                )
    return tuple(points)


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
