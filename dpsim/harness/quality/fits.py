"""The trainings of a study, and what is judged: the gap of batch norm, and steps to a target with the noise scale.

The primary outcome of the gap is the mean training loss of the last epoch, with batch statistics, as it is trained.
Noisy statistics raise it in every step, so that it tells local batches apart where an evaluation with running
statistics does not. It contains the noise of its own forward passes: the gap of an evaluation of the training set is
shown beside it.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from dpsim.data import load_dataset
from dpsim.errors import ConfigError
from dpsim.model.critical_batch import StepsFit, fit_steps, gradient_noise, power_law, same_samples
from dpsim.model.norm_gap import FORM, FORMS, fit_gap, interpolated_gap
from dpsim.records.convergence import Convergence
from dpsim.records.quality import (
    GapPoint,
    GapResult,
    GapStudy,
    MeanInterval,
    PredictedCurve,
    QualityStudy,
    StepsPoint,
    StepsResult,
    StepsStudy,
    TrainingCase,
    TrainingRun,
)

Runs = dict[TrainingCase, TrainingRun]
_SHARES = 8
_RESAMPLES = 200


def cases(study: QualityStudy, *, held_out: bool) -> list[TrainingCase]:
    """Return the trainings to fit, with their references; or those held out, with the ways out. Longest first."""
    every: list[TrainingCase] = []
    for gap in study.gap:
        for batch in gap.held_out if held_out else (*gap.fitted, None):
            every += gap_cases(gap, batch)
        for model in gap.others if held_out else ():
            every += gap_cases(gap, None, model)
    for steps in study.steps_to_target:
        for size in steps.held_out if held_out else steps.fitted:
            every += steps_cases(steps, size)
    return sorted(dict.fromkeys(every), key=lambda case: -case.steps)


def gap_cases(study: GapStudy, local_batch: int | None, model: str | None = None) -> list[TrainingCase]:
    """Return a training for each seed at a local batch; ``None``: with the statistics of the global batch."""
    steps_per_epoch = -(-len(load_dataset(study.dataset).train_y) // study.global_batch)
    return [
        study.case(
            model=model or study.model,
            local_batch=local_batch or study.global_batch,
            batch_norm="global" if local_batch is None else "leaf",
            seed=seed,
            steps=study.epochs * steps_per_epoch,
        )
        for seed in range(study.seeds)
    ]


def steps_cases(study: StepsStudy, global_batch: int) -> list[TrainingCase]:
    """Return a training to the target for each seed, at the rate of the linear rule."""
    return [
        study.case(
            global_batch=global_batch,
            local_batch=global_batch,
            batch_norm="global",
            learning_rate=study.learning_rate * global_batch / study.reference_batch,
            seed=seed,
            steps=-(-study.most_samples // global_batch),
        )
        for seed in range(study.seeds)
    ]


def mean_interval(values: Sequence[float]) -> MeanInterval:
    """The mean and its 95 % interval by Student's t, one value a seed. Raises ``ConfigError`` for fewer than two."""
    if len(values) < 2:
        raise ConfigError(f"an interval from {len(values)} seeds", allowed="2 or more")
    from scipy.stats import t

    mean = float(np.mean(values))
    half = float(t.ppf(0.975, len(values) - 1)) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return MeanInterval(mean=mean, low=mean - half, high=mean + half)


def predict_gap(study: GapStudy, runs: Runs) -> PredictedCurve:
    """Fit the gap, and predict it at the held-out local batches; the other forms and no gap are baselines."""
    reference = _of(study, runs, None)
    gaps = {b: _gap(_of(study, runs, b), reference, "final_loss").mean for b in study.fitted}
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


def compare_gap(study: GapStudy, predicted: PredictedCurve, runs: Runs) -> GapResult:
    """Return the measured gaps with their intervals beside the predictions."""
    reference = _of(study, runs, None)
    by_batch = dict(zip(predicted.batches, predicted.values, strict=True))

    def point(local_batch: int | None, model: str | None = None) -> GapPoint:
        own = _of(study, runs, local_batch, model)
        return GapPoint(
            model=model or study.model,
            local_batch=local_batch or study.global_batch,
            held_out=local_batch in study.held_out,
            predicted=None if local_batch is None else by_batch.get(local_batch),
            gap=_gap(own, reference, "final_loss"),
            test_gap=_gap(own, reference, "test_loss"),
            training_set_gap=_gap(own, reference, "training_set_loss"),
            accuracy=mean_interval([run.test_accuracy for run in own]),
            training_loss=mean_interval([run.final_loss for run in own]),
        )

    points = [point(b) for b in sorted({*study.fitted, *study.held_out})]
    return GapResult(
        study=study,
        predicted=predicted,
        points=tuple(points),
        accuracy=mean_interval([run.test_accuracy for run in reference]),
        others=tuple(point(None, model) for model in study.others),
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


def _gap(own: Sequence[TrainingRun], reference: Sequence[TrainingRun], loss: str) -> MeanInterval:
    return mean_interval(
        [math.log(getattr(a, loss)) - math.log(getattr(b, loss)) for a, b in zip(own, reference, strict=True)]
    )


def steps_of(run: TrainingRun) -> float | None:
    """Steps to the target, interpolated in the log of the loss between two evaluations; ``None`` if never reached."""
    target, evaluations = run.case.target_loss, run.evaluations
    if not evaluations or evaluations[-1].loss > target:
        return None
    if len(evaluations) == 1:
        return float(evaluations[0].step)
    before, after = evaluations[-2:]
    share = math.log(before.loss / target) / math.log(before.loss / after.loss)
    return before.step + share * (after.step - before.step)


def _steps(study: StepsStudy, runs: Runs, batch: int) -> list[float]:
    return [steps for case in steps_cases(study, batch) if (steps := steps_of(runs[case])) is not None]


def predict_steps(study: StepsStudy, runs: Runs) -> PredictedCurve:
    """Fit S_min and B_noise to the medians over seeds, and predict the held-out batches, with the baselines."""
    reached = {b: _steps(study, runs, b) for b in study.fitted}
    medians = {b: statistics.median(each) for b, each in reached.items() if len(each) == study.seeds}
    try:
        fit = fit_steps(medians)
    except ConfigError as error:
        never = [str(b) for b in study.fitted if b not in medians]
        missing = f"Global batch {', '.join(never)}: not every run reached the target. " if never else ""
        return PredictedCurve(reason=f"{missing}{error.given}; {error.remedy}")
    return PredictedCurve(
        parameters={"min_steps": fit.min_steps, "noise_batch": fit.noise_batch},
        batches=study.held_out,
        values=tuple(fit.steps(b) for b in study.held_out),
        baselines={
            "power law": tuple(power_law(medians, b) for b in study.held_out),
            "same samples": tuple(same_samples(medians, b) for b in study.held_out),
            "same steps": (statistics.median(medians.values()),) * len(study.held_out),
        },
    )


def compare_steps(study: StepsStudy, predicted: PredictedCurve, runs: Runs) -> StepsResult:
    """The measured steps beside the predictions, and the gradient noise scale of the fitted runs."""
    by_batch = dict(zip(predicted.batches, predicted.values, strict=True))
    points = tuple(
        StepsPoint(
            global_batch=b,
            held_out=b in study.held_out,
            outside=not min(study.fitted) <= b <= max(study.fitted),
            predicted=by_batch.get(b),
            steps=tuple(_steps(study, runs, b)),
            seeds=study.seeds,
        )
        for b in sorted({*study.fitted, *study.held_out})
    )
    measured = {point.global_batch: point.median or math.nan for point in points}
    return StepsResult(
        study=study,
        predicted=predicted,
        points=points,
        errors=errors(predicted, measured),
        gradient_noise_batch=gradient_noise_batch(study, runs),
        noise_interval=_noise_interval(study, runs),
    )


def gradient_noise_batch(study: StepsStudy, runs: Runs) -> float | None:
    """tr(Sigma) / |G|^2 over the evaluations of the fitted runs, each weighted by the steps it stands for.

    Both are averaged over a run before they are divided, and runs are averaged before that too. ``None`` where the
    squared norm of the gradient cannot be told from 0.
    """
    traces, squares = [], []
    for batch in study.fitted:
        for case in steps_cases(study, batch):
            evaluations = runs[case].evaluations
            before = [0, *(each.step for each in evaluations)]
            weights = [after - first for first, after in itertools.pairwise(before)]
            small, big = (
                float(np.average([getattr(each, name) for each in evaluations], weights=weights))
                for name in ("small_norm", "big_norm")
            )
            trace, square = gradient_noise([small], [big], batch / _SHARES, batch)
            traces.append(trace)
            squares.append(square)
    mean = float(np.mean(squares))
    return float(np.mean(traces)) / mean if mean > 0 else None


def _noise_interval(study: StepsStudy, runs: Runs) -> tuple[float, float] | None:
    """The 95 % interval of B_noise over resampled seeds; ``None`` without a fit."""
    reached = {b: _steps(study, runs, b) for b in study.fitted}
    if any(len(each) < study.seeds for each in reached.values()):
        return None
    generator, fitted = np.random.default_rng(0), []
    for _ in range(_RESAMPLES):
        chosen = generator.integers(study.seeds, size=study.seeds)
        try:
            fit = fit_steps({b: float(np.median(np.array(each)[chosen])) for b, each in reached.items()})
        except ConfigError:
            fitted.append(math.inf)
        else:
            fitted.append(fit.noise_batch)
    low, high = np.quantile(fitted, (0.025, 0.975), method="nearest")
    return float(low), float(high)


def convergence(result: StepsResult) -> Convergence | None:
    """What ``dpsim predict`` needs of a fit; ``None`` where there is none."""
    study, parameters = result.study, result.predicted.parameters
    if not parameters:
        return None
    fit = StepsFit(**parameters)
    return Convergence(
        model=study.model,
        dataset=study.dataset,
        target_loss=study.target_loss,
        min_steps=fit.min_steps,
        noise_batch=fit.noise_batch,
        batches=tuple(sorted(study.fitted)),
        learning_rate=study.learning_rate,
        reference_batch=study.reference_batch,
        momentum=study.momentum,
        gradient_noise_batch=result.gradient_noise_batch,
        compute_dtype=study.compute_dtype,
    )
