"""Steps to a target loss: fitted on three global batches or more, judged on others; and the gradient noise scale."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np

from dpsim.errors import ConfigError
from dpsim.harness.quality.gap import errors
from dpsim.harness.quality.runs import Runs
from dpsim.harness.quality.task import steps_cases
from dpsim.predict.critical_batch import StepsFit, fit_steps, gradient_noise, power_law, same_samples
from dpsim.records.convergence import Convergence
from dpsim.records.quality import PredictedCurve, StepsStudy, TrainingRun
from dpsim.records.quality_results import StepsPoint, StepsResult

_SHARES = 8
_RESAMPLES = 200


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
