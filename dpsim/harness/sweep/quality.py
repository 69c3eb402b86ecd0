"""The quality of training beside the times of a sweep: the gap of batch norm, and steps to a target loss."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from dpsim.dtypes import ComputeDtype
from dpsim.errors import ConfigError
from dpsim.harness.quality.fits import cases
from dpsim.harness.quality.study import read_results, study_quality
from dpsim.harness.sweep.norms import NORM_FIELDS
from dpsim.launch.workers import executor
from dpsim.nn.tokens import MODELS, parse_model
from dpsim.optimizer import Optimizer, Sgd
from dpsim.progress import Progress
from dpsim.records.quality import RECORD, DivergenceStudy, GapStudy, QualityResults, QualityStudy, StepsStudy
from dpsim.records.sweep import Experiment, Predictions
from dpsim.study.environment import cores
from dpsim.units import format_duration

QUALITY = "quality"
"""The folder of the study inside that of the sweep."""
_SIDE_BY_SIDE = 2
_GLOBAL_BATCH = 64
_FITTED, _HELD_OUT = (2, 16), (4, 8, 32)
_STEPS_FITTED, _STEPS_HELD_OUT = (32, 128, 256), (16, 64, 512)
_STEPS_SEEDS = 5


def study_of(experiment: Experiment) -> QualityStudy | None:
    """What a sweep trains for its quality; ``None`` where it declares neither seeds nor a target loss.

    A sweep over batch norm with ``seeds`` measures the gap of batch norm and the divergence of its statistics, one over
    the local batch with ``target_loss`` the steps to it. Raises ``ConfigError`` for what cannot be studied.
    """
    if experiment.question == "batch-norm" and experiment.seeds:
        return QualityStudy(name=experiment.name, gap=(_gap(experiment),), divergence=(_divergence(experiment),))
    if experiment.question == "local-batch" and experiment.target_loss:
        return QualityStudy(name=experiment.name, steps_to_target=(_steps(experiment),))
    if experiment.seeds or experiment.target_loss:
        raise ConfigError(
            f"seeds {experiment.seeds} and target_loss {experiment.target_loss:g} in a sweep over another question",
            allowed='seeds with question = "batch-norm", target_loss with question = "local-batch"',
            remedy="leave them out",
        )
    return None


def measure_quality(study: QualityStudy, predictions: Predictions, folder: Path, progress: Progress) -> QualityResults:
    """Return the quality of training that a sweep declares, measured into its folder or read from there.

    Before the trainings start it says about how long they take, by the predicted steps. Raises ``FileFormatError``
    where the folder holds another study.
    """
    if not (folder / QUALITY / RECORD).exists():
        progress(_time_text(study, predictions))
    with executor(f"{_SIDE_BY_SIDE}") as pool:
        return study_quality(study, folder / QUALITY, progress, pool)


def _time_text(study: QualityStudy, predictions: Predictions) -> str:
    """Say how long the trainings of a study take, by the predicted device seconds of a sample."""
    of_sample = [
        point.step_s * point.setting.plan.devices / point.setting.plan.global_batch for point in predictions.points
    ]
    trained = [*cases(study, held_out=False), *cases(study, held_out=True)]
    total_s = statistics.median(of_sample) * sum(case.steps * case.global_batch for case in trained)
    early = ", and less where they reach the target loss early" if study.steps_to_target else ""
    return (
        f"the quality: {len(trained)} trainings, {_SIDE_BY_SIDE} at a time, take about "
        f"{format_duration(total_s / min(_SIDE_BY_SIDE, cores()))} on a quiet machine{early}"
    )


def read_quality(experiment: Experiment, folder: Path) -> QualityResults | None:
    """The quality in the folder of a sweep, ``None`` where there is none. Raises ``FileFormatError``."""
    return None if study_of(experiment) is None else read_results(folder / QUALITY)


def _gap(experiment: Experiment) -> GapStudy:
    model = _with_batch_norm(experiment)
    others = [str(row["model"]) for row in experiment.rows if "model" in row and str(row["model"]) != model]
    return GapStudy(
        fitted=_FITTED,
        held_out=_HELD_OUT,
        others=tuple(dict.fromkeys(others)),
        global_batch=_GLOBAL_BATCH,
        epochs=experiment.epochs,
        seeds=experiment.seeds,
        **_trained(experiment, model) | _rate(experiment),
    )


def _divergence(experiment: Experiment) -> DivergenceStudy:
    trained = _trained(experiment, _with_batch_norm(experiment))
    return DivergenceStudy(global_batch=_GLOBAL_BATCH, seed=experiment.seed, **trained)


def _steps(experiment: Experiment) -> StepsStudy:
    return StepsStudy(
        target_loss=experiment.target_loss,
        fitted=_STEPS_FITTED,
        held_out=_STEPS_HELD_OUT,
        seeds=max(experiment.seeds, _STEPS_SEEDS),
        **_trained(experiment, experiment.settings[0].model) | _rate(experiment),
    )


def _trained(experiment: Experiment, model: str) -> dict[str, Any]:
    return {"model": model, "dataset": experiment.dataset, "compute_dtype": _compute_dtype(experiment)}


def _with_batch_norm(experiment: Experiment) -> str:
    """The model with batch norm among those compared. Raises ``ConfigError``."""
    models = dict.fromkeys(setting.model for setting in experiment.settings)
    for model in models:
        if model.partition(":")[0] not in MODELS or parse_model(model).norm == "batch":
            return model
    raise ConfigError(
        f"seeds {experiment.seeds} in a sweep over batch norm without a model that has it: {', '.join(models)}",
        allowed=f"a model with batch norm among the values of {NORM_FIELDS[0]}",
    )


def _compute_dtype(experiment: Experiment) -> ComputeDtype:
    """What all settings multiply in. Raises ``ConfigError`` where they differ."""
    dtypes = dict.fromkeys(setting.plan.compute_dtype for setting in experiment.settings)
    if len(dtypes) > 1:
        raise ConfigError(
            f"the quality of training with compute dtypes {' and '.join(dtypes)}",
            allowed="a compute dtype that all settings share",
            remedy="leave seeds and the target loss out, or make a sweep of each compute dtype",
        )
    return next(iter(dtypes))


def _rate(experiment: Experiment) -> dict[str, float]:
    """Return the learning rate and the momentum. Raises ``ConfigError`` for another optimizer than SGD."""
    optimizer: Optimizer = experiment.settings[0].plan.optimizer
    if not isinstance(optimizer, Sgd):
        raise ConfigError(
            f"the quality of training with {type(optimizer).__name__}",
            allowed="SGD, for whose rates the rules are known",
            remedy="leave seeds and the target loss out, or choose SGD",
        )
    return {"learning_rate": optimizer.learning_rate, "momentum": optimizer.momentum}
