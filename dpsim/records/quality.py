"""The records of a study of training quality: what was declared, predicted and measured, every run with its losses.

Devices are leaves of one rank in all of these trainings: batch norm ``leaf`` with B / b leaves takes the statistics
that B / b devices with b samples each take. Nothing in these records is a time.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from dpsim import codec
from dpsim.codec import Noun
from dpsim.dtypes import ComputeDtype, in_dtype
from dpsim.errors import ConfigError
from dpsim.plan import BatchNormMode
from dpsim.records.sweep import Environment

STUDY_SCHEMA = "dpsim.quality-study/1"
RUN_SCHEMA = "dpsim.quality-run/1"
PREDICTIONS_SCHEMA = "dpsim.quality-predictions/1"
SCHEMA = "dpsim.quality/1"
RECORD, PREDICTIONS, RUNS = "quality.json", "quality_predictions.json", "runs"
LEAST_SEEDS = 10
"""A gap is claimed from so many seeds or more."""
LEAVES_AS_DEVICES = "devices are emulated as leaves of one rank, with the same statistics and sums"


def _check_batches(fitted: tuple[int, ...], held_out: tuple[int, ...], least: int, what: str) -> None:
    if len(set(fitted)) < least or not held_out or min((*fitted, *held_out)) < 1 or set(fitted) & set(held_out):
        raise ConfigError(
            f"{what} fitted at {list(fitted)} and judged at {list(held_out)}",
            allowed=f"{least} or more different sizes to fit, and 1 or more others to judge the fit",
        )


class GapStudy(Noun, frozen=True):
    """Batch norm with the statistics of local batches against the statistics of the global batch, at some seeds.

    ``others`` are models without batch norm, such as ``cnn:16,32,norm=group``, trained at the same batch: a way out.
    """

    model: str
    dataset: str
    fitted: tuple[int, ...]
    held_out: tuple[int, ...]
    others: tuple[str, ...] = ()
    global_batch: int = 64
    epochs: int = 20
    learning_rate: float = 0.05
    momentum: float = 0.9
    seeds: int = LEAST_SEEDS
    compute_dtype: ComputeDtype = "float32"

    def __post_init__(self) -> None:
        _check_batches(self.fitted, self.held_out, 2, "a gap")
        if self.seeds < LEAST_SEEDS:
            raise ConfigError(
                f"a gap from {self.seeds} seeds",
                allowed=f"{LEAST_SEEDS} or more",
                remedy="raise seeds: the difference of a few runs is mostly chance",
            )
        for batch in (*self.fitted, *self.held_out):
            if self.global_batch % batch or batch >= self.global_batch:
                raise ConfigError(
                    f"local batch {batch} of a global batch of {self.global_batch}",
                    allowed="divisors of the global batch that are smaller than it",
                )

    @property
    def name(self) -> str:
        """The model, the data and the global batch."""
        return f"{self.model} on {self.dataset}{in_dtype(self.compute_dtype)}, B = {self.global_batch}"


class DivergenceStudy(Noun, frozen=True):
    """Statistics of local batches against those of the global batch, at every batch norm, after ``steps`` of training.

    ``batches`` global batches give the samples' spread and are computed once at local batch ``scaled_at``; as many
    others are measured at each of ``local_batches``.
    """

    model: str
    dataset: str
    local_batches: tuple[int, ...] = (2, 8, 16, 32)
    scaled_at: int = 4
    global_batch: int = 64
    steps: int = 50
    batches: int = 8
    learning_rate: float = 0.05
    momentum: float = 0.9
    seed: int = 0
    compute_dtype: ComputeDtype = "float32"

    def __post_init__(self) -> None:
        _check_batches((self.scaled_at,), self.local_batches, 1, "divergence")
        if any(self.global_batch % b or b >= self.global_batch for b in (self.scaled_at, *self.local_batches)):
            raise ConfigError(
                f"local batches {list(self.local_batches)} and {self.scaled_at} of {self.global_batch}",
                allowed="divisors of the global batch that are smaller than it",
            )

    @property
    def name(self) -> str:
        """The model, the data and when in training."""
        return f"{self.model} on {self.dataset}{in_dtype(self.compute_dtype)}, after {self.steps} steps"


class StepsStudy(Noun, frozen=True):
    """Steps until the loss on the training set is ``target_loss``, against the global batch.

    The learning rate is ``learning_rate`` at ``reference_batch`` and grows with the global batch. A run that does not
    reach the target ends after ``most_samples`` samples.
    """

    model: str
    dataset: str
    target_loss: float
    fitted: tuple[int, ...]
    held_out: tuple[int, ...]
    learning_rate: float = 0.02
    reference_batch: int = 64
    momentum: float = 0.9
    seeds: int = 5
    most_samples: int = 60_000
    compute_dtype: ComputeDtype = "float32"

    def __post_init__(self) -> None:
        _check_batches(self.fitted, self.held_out, 3, "steps to a target")
        if not (math.isfinite(self.target_loss) and self.target_loss > 0):
            raise ConfigError(f"a target loss of {self.target_loss}", allowed="a finite number > 0")
        if self.seeds < 3:
            raise ConfigError(f"steps to a target from {self.seeds} seeds", allowed="3 or more: medians are compared")

    @property
    def name(self) -> str:
        """The model, the data and the target."""
        return f"{self.model} on {self.dataset}{in_dtype(self.compute_dtype)}, target {self.target_loss:g}"


class QualityStudy(Noun, frozen=True):
    """What is trained and predicted, as declared in a file."""

    name: str
    gap: tuple[GapStudy, ...] = ()
    divergence: tuple[DivergenceStudy, ...] = ()
    steps_to_target: tuple[StepsStudy, ...] = ()
    schema: str = STUDY_SCHEMA

    def multiplied_in(self, compute_dtype: ComputeDtype) -> QualityStudy:
        """The same study, with the operands of all its trainings' products and convolutions rounded to this dtype."""
        parts = {name: getattr(self, name) for name in ("gap", "divergence", "steps_to_target")}
        changed = {
            name: tuple(msgspec.structs.replace(each, compute_dtype=compute_dtype) for each in part)
            for name, part in parts.items()
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
    """All predictions, in the order of the studies; written and hashed before the first held-out run."""

    study: QualityStudy
    predicted_at: str
    gap: tuple[PredictedCurve, ...]
    divergence: tuple[tuple[DivergencePoint, ...], ...]
    steps_to_target: tuple[PredictedCurve, ...]
    schema: str = PREDICTIONS_SCHEMA


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


def read_study(path: Path) -> QualityStudy:
    """Read a declared study (``.toml`` or ``.json``). Raises ``FileFormatError``."""
    return codec.read(path, QualityStudy, "quality study", STUDY_SCHEMA)


def read_quality(folder: Path) -> QualityRecord:
    """Read the record of a study from its folder. Raises ``FileFormatError``."""
    return codec.read(folder / RECORD, QualityRecord, "quality record", SCHEMA)
