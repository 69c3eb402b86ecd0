"""The records of a sweep: what was declared, predicted and measured, with every raw sample."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import msgspec

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import ConfigError
from dpsim.machine import Machine
from dpsim.optimizer import Optimizer, Sgd
from dpsim.plan import BatchNormMode, Plan
from dpsim.records.checks import check_steps
from dpsim.rng import check_seed
from dpsim.timeline import TimelineRecord
from dpsim.wire_dtype import WireDtype
from dpsim.workload import Workload

EXPERIMENT_SCHEMA = "dpsim.experiment/1"
PREDICTIONS_SCHEMA = "dpsim.predictions/1"
RESULTS_SCHEMA = "dpsim.results/1"


class Scaling(Noun, frozen=True):
    """What a sweep over the number of devices declares beyond a sweep over the fusion threshold.

    ``kind`` strong: every device count trains the same global batch. Weak: the experiment's ``global_batch`` is that of
    one device, and n devices train n times as many samples per step. ``batch_norm`` (``None``: the default) and
    ``leaves`` mean what they mean in a ``Plan``. Under strong scaling the drift from one device is measured over
    ``steps`` steps.
    """

    kind: Literal["strong", "weak"] = "strong"
    batch_norm: BatchNormMode | None = None
    leaves: int = 0
    steps: int = 50

    @property
    def mode(self) -> BatchNormMode:
        """The batch-norm mode that is trained."""
        return self.batch_norm or Plan.default_batch_norm(self.leaves)

    def __post_init__(self) -> None:
        check_steps(self.steps)
        if self.kind == "weak" and self.leaves:
            raise ConfigError(
                f"weak scaling with {self.leaves} leaves: every device count trains another global batch",
                allowed="leaves with strong scaling, where every device count trains the same batch",
                remedy="leave out --reproducible and --leaves, or use --scaling strong",
            )


class Experiment(Noun, frozen=True):
    """A declared sweep over the fusion threshold, or with ``scaling`` over the number of devices.

    Two reports are of the same experiment when their experiments are equal.

    ``devices`` are numbers of devices or layouts (``2x4``), with one layout for each number. Empty
    ``fusion_thresholds_bytes`` and ``algorithms`` are chosen by the sweep: thresholds that give different buckets, and
    each network's default algorithm. ``budget_s`` bounds the measuring. A point needs no more samples once the 95 %
    interval of its median is within +- ``interval`` of the median.
    """

    name: str = "fusion-threshold"
    model: str = "mlp:64x20"
    dataset: str = "digits"
    devices: tuple[int | str, ...] = (1, 2)
    networks: tuple[str, ...] = ("node", "paced:50us,1gbit")
    fusion_rule: str = "tarantella"
    fusion_thresholds_bytes: tuple[float, ...] = ()
    global_batch: int = 512
    algorithms: tuple[str, ...] = ()
    overlap: str = "auto"
    optimizer: Optimizer = Sgd(learning_rate=0.01)
    seed: int = 0
    budget_s: float = 45.0
    interval: float = 0.02
    wire_dtype: WireDtype | None = None
    scaling: Scaling | None = None
    schema: str = EXPERIMENT_SCHEMA

    @property
    def weak(self) -> bool:
        """Whether more devices train more samples per step."""
        return self.scaling is not None and self.scaling.kind == "weak"

    @property
    def measures_drift(self) -> bool:
        """Whether the device counts are trained and compared: they are if all train the same batches."""
        return self.scaling is not None and not self.weak

    def batch(self, devices: int) -> int:
        """Return the samples per step on this many devices."""
        return self.global_batch * devices if self.weak else self.global_batch

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if self.name in ("", ".", "..") or "/" in self.name or "\0" in self.name:
            raise ConfigError(f"an experiment named {self.name!r}", allowed="the name of a folder")
        if not all(threshold >= 0 for threshold in self.fusion_thresholds_bytes):
            raise ConfigError(
                f"fusion_thresholds_bytes is {list(self.fusion_thresholds_bytes)}", allowed="0 or more bytes, or inf"
            )
        if not self.budget_s >= 0:
            raise ConfigError(f"budget_s is {self.budget_s}", allowed="seconds >= 0")
        if not (math.isfinite(self.interval) and self.interval > 0):
            raise ConfigError(f"interval is {self.interval}", allowed="a finite number > 0")


class Environment(Noun, frozen=True):
    """Where a measurement was taken, in enough detail to refuse a comparison that would mean nothing."""

    dpsim: str
    python: str
    platform: str
    processor: str
    cores: int
    memory_bytes: int
    mpi: str
    numpy: str
    numba: str
    blas: str
    variables: dict[str, str]


class PointKey(Noun, frozen=True, order=True):
    """The configuration of a point; keys sort by network, devices, ..., threshold.

    ``repeat`` tells the two runs of an A/A pair apart (0 and 1).
    """

    network: str
    devices: int
    fusion_rule: str
    algorithm: str
    overlap: str
    global_batch: int
    fusion_threshold_bytes: float
    repeat: int = 0
    layout: str = ""

    @property
    def first_run(self) -> PointKey:
        """The key of the same configuration with ``repeat`` 0."""
        return msgspec.structs.replace(self, repeat=0)


class PredictedPoint(Noun, frozen=True):
    """The model's and the nulls' predictions of a point, made before it was measured.

    ``null_step_s`` and ``null_exposed_s`` hold the nulls that need no measurement: ``perfect_scaling``,
    ``alpha_beta_no_overlap`` and ``largest_bucket`` (the model's own prediction with one bucket per step). The fourth
    null, a constant per device count, is computed in the comparison. ``full_speed_step_s`` and ``slow_speed_step_s``
    are the step at each of the machine's two speeds, while ``step_s`` is the mean over both; they are ``None`` where
    speeds were not observed.
    """

    key: PointKey
    buckets: int
    step_s: float
    low_s: float
    high_s: float
    exposed_communication_s: float
    extrapolated: bool
    null_step_s: dict[str, float]
    null_exposed_s: dict[str, float]
    timeline: TimelineRecord | None = None
    full_speed_step_s: float | None = None
    slow_speed_step_s: float | None = None


class Predictions(Noun, frozen=True):
    """Everything that was predicted in a sweep, and what from. Written and hashed before the first measurement."""

    experiment: Experiment
    environment: Environment
    predicted_at: str
    workload: Workload
    machines: tuple[Machine, ...]
    points: tuple[PredictedPoint, ...]
    mechanisms: dict[str, dict[str, float]]
    schema: str = PREDICTIONS_SCHEMA


class MeasuredPoint(Noun, frozen=True):
    """The raw samples of one configuration: seconds of each step on the slowest rank, and its exposed communication.

    ``round`` is the round of the interleaved run in which each sample was taken, and ``losses`` are the mean training
    losses of the same steps. ``events_per_step`` counts the events that one rank records in a step; each takes
    ``recording_s_per_event`` of the results. ``reference_s`` is the time of the reference computation in the same visit
    as each sample, on the slowest rank (empty in records of earlier versions).
    """

    key: PointKey
    buckets: int
    step_s: tuple[float, ...]
    exposed_communication_s: tuple[float, ...]
    round: tuple[int, ...]
    losses: tuple[float, ...]
    events_per_step: int = 0
    timeline: TimelineRecord | None = None
    reference_s: tuple[float, ...] = ()


class Results(Noun, frozen=True):
    """Everything that was measured in a sweep, tied to the predictions by their SHA-256."""

    experiment: Experiment
    environment: Environment
    predictions_sha256: str
    predicted_at: str
    measured_from: str
    measured_until: str
    points: tuple[MeasuredPoint, ...]
    recording_s_per_event: float = 0.0
    warnings: tuple[str, ...] = ()
    schema: str = RESULTS_SCHEMA


def read_experiment(path: Path | str) -> Experiment:
    """Read a declared experiment (``.toml`` or ``.json``). Raises ``FileFormatError``."""
    return codec.read(Path(path), Experiment, "experiment", EXPERIMENT_SCHEMA)


def read_predictions(path: Path | str) -> Predictions:
    """Read the predictions of a sweep. Raises ``FileFormatError``."""
    return codec.read(Path(path), Predictions, "predictions", PREDICTIONS_SCHEMA)


def read_results(path: Path | str) -> Results:
    """Read the results of a sweep. Raises ``FileFormatError``."""
    return codec.read(Path(path), Results, "results", RESULTS_SCHEMA)


class TrainResult(Noun, frozen=True):
    """The result of a training run. ``losses`` are mean training losses, one per step; times are medians.

    ``step_s`` is taken over the steps with a whole batch except the first, each from the last rank's begin to the
    slowest rank's end (0 where there is no such step); ``images_per_s`` is the batch over it. A resumed run did
    ``first_step`` steps before; it has their losses but not their times. ``checkpoint_failure`` says why the last
    checkpoint could not be written (empty where it could). ``optimizer_state_bytes`` is the memory allocated for
    optimizer state on the device with the most (0: not known).
    """

    devices: int
    steps: int
    test_accuracy: float
    final_loss: float
    images_per_s: float
    step_s: float
    exposed_communication_s: float
    digest: str
    losses: tuple[float, ...]
    first_step: int = 0
    checkpoint_failure: str = ""
    optimizer_state_bytes: int = 0
