"""The gap of batch norm: fitted on some local batches, judged on others.

The primary outcome is the mean training loss of the last epoch, with batch statistics, as it is trained. Noisy
statistics raise it in every step, so that it tells local batches apart where an evaluation with running statistics does
not. It contains the noise of its own forward passes: the gap of an evaluation of the training set is shown beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from dpsim.errors import ConfigError
from dpsim.harness.quality.runs import Runs
from dpsim.harness.quality.statistics import mean_interval
from dpsim.harness.quality.task import gap_cases
from dpsim.predict.norm_gap import FORM, FORMS, fit_gap, interpolated_gap
from dpsim.records.quality import GapStudy, PredictedCurve, TrainingRun
from dpsim.records.quality_results import GapPoint, GapResult, MeanInterval, WayOut


def predict_gap(study: GapStudy, runs: Runs) -> PredictedCurve:
    """Fit the gap, and predict it at the held-out local batches; the other forms and no gap are baselines."""
    gaps = {b: log_loss_gap(study, runs, b).mean for b in study.fitted}
    try:
        fits = {form: fit_gap(gaps, study.global_batch, form) for form in FORMS}
    except ConfigError as error:
        return PredictedCurve(reason=f"{error.given}; {error.remedy}")
    baselines = {form: tuple(fit.gap(b) for b in study.held_out) for form, fit in fits.items() if form != FORM}
    baselines |= {
        "linear interpolation in log b": tuple(interpolated_gap(gaps, study.global_batch, b) for b in study.held_out),
        "no gap": (0.0,) * len(study.held_out),
    }
    fit = fits[FORM]
    return PredictedCurve(
        parameters={"scale": fit.scale, "shape": fit.shape},
        batches=study.held_out,
        values=tuple(fit.gap(b) for b in study.held_out),
        baselines=baselines,
    )


def log_loss_gap(study: GapStudy, runs: Runs, local_batch: int) -> MeanInterval:
    """The gap in the log of the final training loss, paired by seed."""
    return mean_interval(_paired(_of(study, runs, local_batch), _reference(study, runs), _log_final_loss))


def compare_gap(study: GapStudy, predicted: PredictedCurve, runs: Runs) -> GapResult:
    """The measured gaps with their intervals beside the predictions."""
    reference = _reference(study, runs)
    by_batch = dict(zip(predicted.batches, predicted.values, strict=True))
    points = []
    for b in sorted({*study.fitted, *study.held_out}):
        own = _of(study, runs, b)
        points.append(
            GapPoint(
                local_batch=b,
                held_out=b in study.held_out,
                predicted=by_batch.get(b),
                gap=mean_interval(_paired(own, reference, _log_final_loss)),
                test_gap=mean_interval(_paired(own, reference, lambda run: math.log(run.test_loss))),
                training_set_gap=mean_interval(_paired(own, reference, lambda run: math.log(run.training_set_loss))),
                accuracy=mean_interval([run.test_accuracy for run in own]),
                training_loss=mean_interval([run.final_loss for run in own]),
            )
        )
    others = [
        WayOut(
            model=model,
            gap=mean_interval(_paired(_of(study, runs, None, model), reference, _log_final_loss)),
            test_gap=mean_interval(
                _paired(_of(study, runs, None, model), reference, lambda run: math.log(run.test_loss))
            ),
            accuracy=mean_interval([run.test_accuracy for run in _of(study, runs, None, model)]),
        )
        for model in study.others
    ]
    return GapResult(
        study=study,
        predicted=predicted,
        points=tuple(points),
        accuracy=mean_interval([run.test_accuracy for run in reference]),
        others=tuple(others),
        errors=errors(predicted, {point.local_batch: point.gap.mean for point in points if point.held_out}),
    )


def errors(predicted: PredictedCurve, measured: Mapping[int, float]) -> dict[str, tuple[float, ...]]:
    """|predicted / measured - 1| at the held-out batches, by name; the model's own is ``predicted``."""
    if predicted.reason:
        return {}
    rows = {"predicted": predicted.values} | predicted.baselines
    return {
        name: tuple(
            abs(value / measured[b] - 1) if measured[b] else math.inf
            for b, value in zip(predicted.batches, values, strict=True)
        )
        for name, values in rows.items()
    }


def _of(study: GapStudy, runs: Runs, local_batch: int | None, model: str | None = None) -> list[TrainingRun]:
    return [runs[case] for case in gap_cases(study, local_batch, model)]


def _reference(study: GapStudy, runs: Runs) -> list[TrainingRun]:
    return _of(study, runs, None)


def _log_final_loss(run: TrainingRun) -> float:
    return math.log(run.final_loss)


def _paired(
    own: Sequence[TrainingRun], reference: Sequence[TrainingRun], value: Callable[[TrainingRun], float]
) -> list[float]:
    return [value(a) - value(b) for a, b in zip(own, reference, strict=True)]
