"""A study of training quality: what was declared, predicted and measured, every run with its losses; and its results.

Devices are leaves of one rank in all of these trainings: batch norm ``leaf`` with B / b leaves takes the statistics
that B / b devices with b samples each take. Nothing in these records is a time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from dpsim import codec
from dpsim.codec import Noun
from dpsim.dtypes import ComputeDtype, in_dtype
from dpsim.errors import ConfigError
from dpsim.fields import shared
from dpsim.optimizer import Sgd
from dpsim.plan import BatchNormMode, Plan
from dpsim.records.convergence import ConvergenceFile
from dpsim.records.sweep import Environment

STUDY_SCHEMA = "dpsim.quality-study/1"
RUN_SCHEMA = "dpsim.quality-run/1"
PREDICTIONS_SCHEMA = "dpsim.quality-predictions/1"
SCHEMA = "dpsim.quality/1"
RECORD, PREDICTIONS, RUNS = "quality.json", "quality_predictions.json", "runs"
PARTS = ("gap", "divergence", "steps_to_target")
LEAST_SEEDS = 10
"""A gap is claimed from so many seeds or more."""
LEAVES_AS_DEVICES = "devices are emulated as leaves of one rank, with the same statistics and sums"


def _check_batches(fitted: tuple[int, ...], held_out: tuple[int, ...], least: int, what: str) -> None:
    if len(set(fitted)) < least or not held_out or min((*fitted, *held_out)) < 1 or set(fitted) & set(held_out):
        raise ConfigError(
            f"{what} fitted at {list(fitted)} and judged at {list(held_out)}",
            allowed=f"{least} or more different sizes to fit, and 1 or more others to judge the fit",
        )


def _check_divisors(batches: Sequence[int], global_batch: int) -> None:
    for batch in batches:
        if global_batch % batch or batch >= global_batch:
            raise ConfigError(
                f"local batch {batch} of a global batch of {global_batch}",
                allowed="divisors of the global batch that are smaller than it",
            )


class _Part(Noun, frozen=True):
    """A part of a study: what is trained, by SGD, in all of its trainings."""

    model: str
    dataset: str
    learning_rate: float = 0.05
    momentum: float = 0.9
    compute_dtype: ComputeDtype = "float32"

    @property
    def trained(self) -> str:
        """The model and the data."""
        return f"{self.model} on {self.dataset}{in_dtype(self.compute_dtype)}"

    def case(self, **fields: Any) -> TrainingCase:
        """Return one training of the part."""
        return TrainingCase(**shared(self, TrainingCase) | fields)


class GapStudy(_Part, frozen=True, kw_only=True):
    """Batch norm with the statistics of local batches against the statistics of the global batch, at some seeds.

    ``others`` are models without batch norm, such as ``cnn:16,32,norm=group``, trained at the same batch: a way out.
    """

    fitted: tuple[int, ...]
    held_out: tuple[int, ...]
    others: tuple[str, ...] = ()
    global_batch: int = 64
    epochs: int = 20
    seeds: int = LEAST_SEEDS

    def __post_init__(self) -> None:
        _check_batches(self.fitted, self.held_out, 2, "a gap")
        if self.seeds < LEAST_SEEDS:
            raise ConfigError(
                f"a gap from {self.seeds} seeds",
                allowed=f"{LEAST_SEEDS} or more",
                remedy="raise seeds: the difference of a few runs is mostly chance",
            )
        _check_divisors((*self.fitted, *self.held_out), self.global_batch)

    @property
    def name(self) -> str:
        """The model, the data and the global batch."""
        return f"{self.trained}, B = {self.global_batch}"


class DivergenceStudy(_Part, frozen=True):
    """Statistics of local batches against those of the global batch, at every batch norm, after ``steps`` of training.

    The spread is estimated from ``batches`` global batches, computed once at local batch ``scaled_at``; each of
    ``local_batches`` is measured on as many others.
    """

    local_batches: tuple[int, ...] = (2, 8, 16, 32)
    scaled_at: int = 4
    global_batch: int = 64
    steps: int = 50
    batches: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        _check_batches((self.scaled_at,), self.local_batches, 1, "divergence")
        _check_divisors((self.scaled_at, *self.local_batches), self.global_batch)

    @property
    def name(self) -> str:
        """The model, the data and when in training."""
        return f"{self.trained}, after {self.steps} steps"


class StepsStudy(_Part, frozen=True, kw_only=True):
    """Steps until the loss on the training set is ``target_loss``, against the global batch.

    The learning rate is ``learning_rate`` at ``reference_batch`` and grows with the global batch. A run that does not
    reach the target ends after ``most_samples`` samples.
    """

    target_loss: float
    fitted: tuple[int, ...]
    held_out: tuple[int, ...]
    learning_rate: float = 0.02
    reference_batch: int = 64
    seeds: int = 5
    most_samples: int = 60_000

    def __post_init__(self) -> None:
        _check_batches(self.fitted, self.held_out, 3, "steps to a target")
        if not (math.isfinite(self.target_loss) and self.target_loss > 0):
            raise ConfigError(f"a target loss of {self.target_loss}", allowed="a finite number > 0")
        if self.seeds < 3:
            raise ConfigError(f"steps to a target from {self.seeds} seeds", allowed="3 or more: medians are compared")

    @property
    def name(self) -> str:
        """The model, the data and the target."""
        return f"{self.trained}, target {self.target_loss:g}"


class QualityStudy(Noun, frozen=True):
    """What is trained and predicted, as declared in a file."""

    name: str
    gap: tuple[GapStudy, ...] = ()
    divergence: tuple[DivergenceStudy, ...] = ()
    steps_to_target: tuple[StepsStudy, ...] = ()
    schema: str = STUDY_SCHEMA

    def multiplied_in(self, compute_dtype: ComputeDtype) -> QualityStudy:
        """The same study, with the operands of all its trainings' products and convolutions rounded to this dtype."""
        changed = {
            name: tuple(msgspec.structs.replace(each, compute_dtype=compute_dtype) for each in getattr(self, name))
            for name in PARTS
        }
        return msgspec.structs.replace(self, **changed)


class TrainingCase(Noun, frozen=True):
    """One training. With ``target_loss`` > 0 it ends at that loss on the training set, and at ``steps`` at the latest.

    ``local_batch`` is the size of the leaves; with batch norm ``global`` it changes no statistics.
    """

    model: str
    dataset: str
    global_batch: int
    local_batch: int
    batch_norm: BatchNormMode
    learning_rate: float
    momentum: float
    seed: int
    steps: int
    target_loss: float = 0.0
    compute_dtype: ComputeDtype = "float32"

    @property
    def plan(self) -> Plan:
        """The plan on one device, whose leaves stand for devices."""
        own = {"devices": 1, "leaves": self.global_batch // self.local_batch, "algorithm": "two-shot"}
        optimizer = Sgd(learning_rate=self.learning_rate, momentum=self.momentum)
        return Plan(**shared(self, Plan) | own, optimizer=optimizer)


class Evaluation(Noun, frozen=True):
    """The loss on the whole training set after some steps, with running statistics, and squared gradient norms there.

    ``small_norm`` and ``big_norm`` are squared norms of mean gradients, of each eighth of a global batch (their mean)
    and of all of it.
    """

    step: int
    loss: float
    small_norm: float
    big_norm: float


class TrainingRun(Noun, frozen=True):
    """The raw outcomes of a training.

    ``losses`` are mean training losses of each epoch of ``loss_every`` steps, with batch statistics, as trained; the
    last is the final training loss. ``evaluations`` are of runs with a target.
    """

    case: TrainingCase
    measured_at: str
    loss_every: int
    losses: tuple[float, ...]
    training_set_loss: float
    test_loss: float
    test_accuracy: float
    evaluations: tuple[Evaluation, ...] = ()
    schema: str = RUN_SCHEMA

    @property
    def final_loss(self) -> float:
        """The mean training loss of the last whole epoch."""
        return self.losses[-1]


class DivergencePoint(Noun, frozen=True):
    """RMS divergence of one batch norm's ``statistic`` (mean or variance) at a local batch, and its baseline.

    ``unscaled`` is predicted from the spread alone, ``predicted`` scaled by what was measured at ``scaled_at``.
    """

    layer: str
    statistic: str
    local_batch: int
    predicted: float
    unscaled: float
    independent_rows: float


class PredictedCurve(Noun, frozen=True):
    """Parameters that were fitted, and predicted values by held-out batch; ``baselines`` by name, in the same order.

    ``reason`` says why there is no prediction.
    """

    parameters: dict[str, float] = msgspec.field(default_factory=dict)
    batches: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    baselines: dict[str, tuple[float, ...]] = msgspec.field(default_factory=dict)
    reason: str = ""


class QualityPredictions(Noun, frozen=True):
    """All predictions, in the order of the studies; written and hashed before the first held-out run.

    ``model_version`` is that of the model (0: from before versions were recorded).
    """

    study: QualityStudy
    predicted_at: str
    gap: tuple[PredictedCurve, ...]
    divergence: tuple[tuple[DivergencePoint, ...], ...]
    steps_to_target: tuple[PredictedCurve, ...]
    schema: str = PREDICTIONS_SCHEMA
    model_version: int = 0


class QualityRecord(Noun, frozen=True):
    """What was predicted and measured. ``divergence`` are the measured values of the predictions' points."""

    predictions: QualityPredictions
    predictions_sha256: str
    environment: Environment
    measured_until: str
    runs: tuple[TrainingRun, ...]
    divergence: tuple[tuple[float, ...], ...]
    emulation: str = LEAVES_AS_DEVICES
    schema: str = SCHEMA


class MeanInterval(Noun, frozen=True):
    """A mean over seeds with its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def visible(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.low > 0 or self.high < 0


class GapPoint(Noun, frozen=True):
    """A model at a local batch: gaps in the log of the training loss and of the test loss, and the accuracy itself.

    ``training_set_gap`` is of the whole training set, evaluated at the end with running statistics. A model whose norm
    does not depend on the batch has no ``local_batch``.
    """

    model: str
    local_batch: int
    held_out: bool
    predicted: float | None
    gap: MeanInterval
    test_gap: MeanInterval
    training_set_gap: MeanInterval
    accuracy: MeanInterval
    training_loss: MeanInterval


class GapResult(Noun, frozen=True):
    """The gap of one study; ``errors`` are relative, at the held-out batches, by name of the prediction."""

    study: GapStudy
    predicted: PredictedCurve
    points: tuple[GapPoint, ...]
    accuracy: MeanInterval
    others: tuple[GapPoint, ...]
    errors: dict[str, tuple[float, ...]]


class DivergenceResult(Noun, frozen=True):
    """The measured divergence beside each predicted point."""

    study: DivergenceStudy
    points: tuple[DivergencePoint, ...]
    measured: tuple[float, ...]

    def errors(self, prediction: str = "predicted", statistic: str | None = None) -> list[float]:
        """Relative errors of ``predicted``, ``unscaled`` or ``independent_rows``, of one statistic or of both."""
        return [
            abs(getattr(point, prediction) / value - 1)
            for point, value in zip(self.points, self.measured, strict=True)
            if value > 0 and statistic in (None, point.statistic)
        ]


class StepsPoint(Noun, frozen=True):
    """Steps to the target at a global batch: of each seed that reached it, and their median."""

    global_batch: int
    held_out: bool
    outside: bool
    predicted: float | None
    steps: tuple[float, ...]
    seeds: int

    @property
    def median(self) -> float | None:
        """The median, ``None`` where not every seed reached the target."""
        return statistics.median(self.steps) if len(self.steps) == self.seeds else None


class StepsResult(Noun, frozen=True):
    """Steps to one target; ``noise_interval`` is of B_noise over resampled seeds.

    ``gradient_noise_batch`` is tr(Sigma) / |G|^2 on the way to the target.
    """

    study: StepsStudy
    predicted: PredictedCurve
    points: tuple[StepsPoint, ...]
    errors: dict[str, tuple[float, ...]]
    gradient_noise_batch: float | None
    noise_interval: tuple[float, float] | None


class QualityResults(Noun, frozen=True):
    """All results of a record, in the order of its studies."""

    record: QualityRecord
    gap: tuple[GapResult, ...]
    divergence: tuple[DivergenceResult, ...]
    steps_to_target: tuple[StepsResult, ...]
    convergence: ConvergenceFile


def median(values: Sequence[float]) -> float | None:
    """The median, ``None`` of nothing."""
    return statistics.median(values) if values else None


def read_study(path: Path) -> QualityStudy:
    """Read a declared study (``.toml`` or ``.json``). Raises ``FileFormatError``."""
    return codec.read(path, QualityStudy, "quality study", STUDY_SCHEMA)


def read_quality(folder: Path) -> QualityRecord:
    """Read the record of a study from its folder. Raises ``FileFormatError``."""
    return codec.read(folder / RECORD, QualityRecord, "quality record", SCHEMA)
