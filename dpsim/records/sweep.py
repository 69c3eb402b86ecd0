"""Records of a sweep: what was declared, predicted and measured. Immutable, versioned, raw samples kept."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import ConfigError
from dpsim.machine import Machine
from dpsim.optimizer import Optimizer, Sgd
from dpsim.plan import BatchNormMode, Plan
from dpsim.rng import check_seed
from dpsim.timeline import TimelineRecord
from dpsim.wire_dtype import WireDtype
from dpsim.workload import Workload

EXPERIMENT_SCHEMA = "dpsim.experiment/1"
PREDICTIONS_SCHEMA = "dpsim.predictions/1"
RESULTS_SCHEMA = "dpsim.results/1"


class Scaling(Noun, frozen=True):
    """What a sweep over the number of devices has beside one over the fusion threshold.

    ``kind`` strong: every device count trains the same global batch. Weak: the experiment's ``global_batch`` is that of
    one device, and n devices train n times as many samples a step. ``batch_norm`` (None: the usual one) and ``leaves``
    are a ``Plan``'s. Under strong scaling the drift from one device is measured over ``steps`` steps.
    """

    kind: Literal["strong", "weak"] = "strong"
    batch_norm: BatchNormMode | None = None
    leaves: int = 0
    steps: int = 50

    @property
    def mode(self) -> BatchNormMode:
        """Whose statistics batch norm uses."""
        return self.batch_norm or Plan.default_batch_norm(self.leaves)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps is {self.steps}", allowed="1 or more")
        if self.kind == "weak" and self.leaves:
            raise ConfigError(
                f"weak scaling with {self.leaves} leaves: every device count trains another global batch",
                allowed="leaves with strong scaling, where all train the same",
                remedy="leave --reproducible and --leaves out, or take --scaling strong",
            )


class Experiment(Noun, frozen=True):
    """A declared sweep over the fusion threshold, or with ``scaling`` over the number of devices.

    Two reports are of one experiment when these are equal.

    ``devices`` are numbers of devices or layouts (``2x4``), with one layout for a number.
    Empty ``fusion_thresholds_bytes`` and ``algorithms`` are chosen by the sweep: thresholds that give different
    buckets, MPI's own allreduce on a real network and ``ring`` on an emulated one. ``budget_s`` bounds the
    measuring; a point needs no more samples once its median's 95 % interval is within +- ``interval`` of it.
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
        """Whether more devices train more samples a step."""
        return self.scaling is not None and self.scaling.kind == "weak"

    @property
    def measures_drift(self) -> bool:
        """Whether the device counts are trained and compared: they are if all train the same batches."""
        return self.scaling is not None and not self.weak

    def batch(self, devices: int) -> int:
        """Samples per step on so many devices."""
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
    """Where a measurement was taken: enough to refuse a comparison that would mean nothing."""

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


class PointKey(Noun, frozen=True):
    """Which configuration a point is. ``repeat`` tells the two runs of an A/A pair apart (0 and 1)."""

    network: str
    devices: int
    fusion_rule: str
    fusion_threshold_bytes: float
    algorithm: str
    overlap: str
    global_batch: int
    repeat: int = 0
    layout: str = ""


class PredictedPoint(Noun, frozen=True):
    """What the model said of a point before it was measured, with the nulls' predictions beside it.

    ``null_step_s`` and ``null_exposed_s`` hold the nulls that need no measurement: ``perfect_scaling``,
    ``alpha_beta_no_overlap`` and ``largest_bucket`` (the model's own prediction at one bucket a step);
    the fourth, a constant per device count, is formed in the comparison. ``full_speed_step_s`` and
    ``slow_speed_step_s`` are the step at either speed of the machine, where ``step_s`` is the mean over both; ``None``
    where speeds were not observed.
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
    """Everything predicted in a sweep, and what it was predicted from. Written and hashed before measuring."""

    experiment: Experiment
    environment: Environment
    predicted_at: str
    workload: Workload
    machines: tuple[Machine, ...]
    points: tuple[PredictedPoint, ...]
    mechanisms: dict[str, dict[str, float]]
    schema: str = PREDICTIONS_SCHEMA


class MeasuredPoint(Noun, frozen=True):
    """Raw samples of one configuration: seconds of each step (the slowest rank's) and its exposed communication.

    ``round`` says in which visit of the interleaved run a sample was taken. ``losses`` are the mean
    training losses of the same steps. ``events_per_step`` is what recording a step's timeline adds on one rank,
    each at the results' ``recording_s_per_event``. ``reference_s`` is the time of the reference computation in each
    sample's visit, on the slowest rank (empty in records of earlier versions).
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
    """Everything measured in a sweep, tied to the predictions by their SHA-256."""

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
    return codec.read(Path(path), Predictions, "predictions", PREDICTIONS_SCHEMA)


def read_results(path: Path | str) -> Results:
    return codec.read(Path(path), Results, "results", RESULTS_SCHEMA)


class TrainResult(Noun, frozen=True):
    """What a training run came to. ``losses`` are mean training losses, one a step; times are medians.

    ``step_s`` is of the steps with a whole batch but the first, each from the last rank's begin to the slowest rank's
    end (0 where there is none), and ``images_per_s`` is such a batch over it. A run that was resumed did
    ``first_step`` steps before, whose losses it has, but not their times. ``checkpoint_failure`` says why the last
    checkpoint could not be written (empty where it could).
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
