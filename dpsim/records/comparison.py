"""``Comparison``: measured and predicted side by side, as flat points and as scores. Reports of sweeps render it.

``dpsim.harness.sweep.compare`` derives it from the records; nothing is computed in this module.
"""

from __future__ import annotations

from dpsim.codec import Noun
from dpsim.compute_dtype import ComputeDtype
from dpsim.records.coverage import StratumCoverage
from dpsim.records.quality_results import QualityResults
from dpsim.records.sweep import Experiment
from dpsim.setting import Setting

ALL_NETWORKS = "all"


class ComparedPoint(Noun, frozen=True):
    """One configuration: what was measured (both runs of an A/A pair pooled), and what was predicted before.

    - ``error`` = predicted / measured - 1. ``noise`` is the A/A difference of the point's network and device count
      (``None``: no pair was run). ``repeat`` counts the pooled runs.
    - ``slow_samples`` is the share of samples above 1.5 times the median.
    - ``scored`` marks the points of the main table, which have the chosen overlap; the others only show what overlap
      does.
    - In a sweep over the number of devices, ``measured_drift`` = |w_n - w_1| / |w_1| after some steps (0 where the bits
      are the same), and the statistics' drift is that of local batch norm's means (``dpsim.records.reproduce``); each
      is ``None`` where it was not measured. ``digest`` is the digest of the trained state.
    - Where the machine's speed changed, ``measured_step_s`` is the median of steps that were scaled to the mean speed
      of the run, by the times of the reference computation. ``error_at_equal_speed`` is the median over the samples of
      the prediction for the speed of the sample's visit / the sample - 1, and ``predicted_at_run_speed_s`` the measured
      step with that error (``None`` in records that did not observe the speed). Where DDP trains, they are of what is
      predicted if all computation were slower than predicted by as much as its forward passes were.
    - ``memory_bytes`` is what the device with the most has allocated, without communication buffers (``None``: not
      known).
    - Where computation is emulated, ``deadline_lateness`` is how late layers ended (median), relative to the step, and
      ``free_cores`` the share of the cores' time in which no rank ran (``dpsim.records.sweep.Emulation``).
    - ``predicted_low_s`` to ``predicted_high_s`` is to hold the measured step with a probability of ``interval_level``
      (``None``: a band that was assumed). ``predicted_communication_cost_s`` is the predicted step - the one on a
      network where collectives take no time.
    - ``group`` names the group in which the point is compared with others, and ``setting`` is the whole setting.
    - ``dpsim_step_s`` is the median step of dpsim's own runtime with the same plan on the same network, where PyTorch's
      DDP was measured beside it, and ``dpsim_exposed_communication_s`` its exposed communication. Its ranks wait for
      the profiled times instead of computing (``None``: not measured).
    - ``runtime`` says who trained (``dpsim.training_runtime``). Where that is PyTorch's DDP,
      ``exposed_communication_s`` is what a communication hook made backward wait, or DDP's own logged time.
    """

    devices: int
    layout: str
    global_batch: int
    local_batch: float
    fusion_rule: str
    fusion_threshold_bytes: float
    buckets: int
    network: str
    emulated_compute: bool
    emulated_network: bool
    measured_step_s: float
    measured_low_s: float
    measured_high_s: float
    predicted_step_s: float
    predicted_low_s: float
    predicted_high_s: float
    exposed_communication_s: float
    predicted_exposed_communication_s: float
    error: float
    noise: float | None
    calibrated_on: str
    extrapolated: bool
    algorithm: str
    overlap: str
    samples: int
    repeat: int
    measured_speedup: float | None
    predicted_speedup: float | None
    efficiency: float | None
    is_best_measured: bool
    is_best_predicted: bool
    scored: bool
    predicted_buckets: int
    slow_samples: float
    null_step_s: dict[str, float]
    null_exposed_s: dict[str, float]
    setting: Setting
    measured_drift: float | None = None
    predicted_drift: float | None = None
    measured_statistics_drift: float | None = None
    predicted_statistics_drift: float | None = None
    digest: str = ""
    predicted_at_run_speed_s: float | None = None
    error_at_equal_speed: float | None = None
    model: str = ""
    accumulate: int = 1
    batch_norm: str = "local"
    leaves: int = 0
    strategy: str = "data-parallel"
    wire_dtype: str | None = None
    compute_dtype: ComputeDtype = "float32"
    group: str = ""
    memory_bytes: int | None = None
    predicted_memory_bytes: int | None = None
    deadline_lateness: float | None = None
    free_cores: float | None = None
    interval_level: float | None = None
    predicted_communication_cost_s: float | None = None
    runtime: str = "dpsim"
    dpsim_step_s: float | None = None
    dpsim_exposed_communication_s: float | None = None

    @property
    def measured_s_per_sample(self) -> float:
        """Measured seconds per sample."""
        return self.measured_step_s / self.global_batch


class Score(Noun, frozen=True):
    """The model's absolute errors and those of the nulls. ``skill`` = 1 - model / best null."""

    median_abs_error: float
    p90_abs_error: float
    null_median_abs_error: float
    null: str
    skill: float | None
    null_errors: dict[str, float]


class Group(Noun, frozen=True):
    """The scores of the settings that are compared with each other, and what choosing among them is worth.

    In a sweep over the fusion threshold a group is one network and device count; over the number of devices it is one
    network, with ``devices`` 0: its scores are over all counts above 1, and the choice is by time per sample.

    - ``step`` scores absolute step times against the nulls that know no measurement, ``shape`` the times over the mean
      of their panel (the group's settings on several devices) against all nulls, the constant known with hindsight
      included. A single setting has no shape (``None``).
    - ``exposed_communication`` scores absolute errors relative to the measured step, since exposed communication
      itself may be 0.
    - ``effect`` = worst / best measured setting - 1. ``noise_floor`` is the largest of the A/A difference and of the
      half widths of these two settings' intervals; ``below_noise`` says that the effect is smaller.
    - ``regret`` is the cost of following the prediction: the best setting is chosen on one half of the rounds and
      compared with the predicted best on the other half, then the halves are swapped, and both are averaged.
      ``regret_on_halves`` is false where there were too few rounds, so that all samples served for both.
    - ``drift`` = step time in the last third of the rounds / in the first third - 1.
    """

    name: str
    network: str
    emulated_network: bool
    devices: int
    points: int
    step: Score
    shape: Score | None
    exposed_communication: Score
    regret: float
    regret_on_halves: bool
    effect: float
    noise: float | None
    noise_floor: float
    below_noise: bool
    drift: float | None
    best_measured_threshold_bytes: float
    best_predicted_threshold_bytes: float
    best_measured_devices: int
    best_predicted_devices: int
    median_error: float
    median_error_at_equal_speed: float | None
    emulated_compute: bool = False
    runtime: str = "dpsim"

    @property
    def shape_counts(self) -> bool:
        """Whether the shape of the curve can be scored: the effect exceeds three times the noise."""
        return self.shape is not None and self.effect > 3 * self.noise_floor

    @property
    def apart(self) -> list[str]:
        """The values beside the network that set the group apart, such as ``2 devices``."""
        return self.name.split("; ")[1:]


class SpeedRecord(Noun, frozen=True):
    """How the machine's speed with this many devices at work changed, within and between calibration and measurement.

    At the slow speed the reference computation takes the slow factor times as long (1: there was no slow speed), for
    the slow share of the time. ``mean_change`` = its mean time in the measurement / in the calibration - 1.
    """

    devices: int
    calibrated_slow_factor: float
    calibrated_slow_share: float
    measured_slow_factor: float
    measured_slow_share: float
    mean_change: float


class Overall(Noun, frozen=True):
    """Scores over all device counts above 1 of one network, or of all networks (``network`` is then ``all``).

    Where computation is emulated a network has scores of its own, and none in those of all networks beside real ones.

    ``regret``, ``effect`` and ``noise`` are the largest over the groups.
    """

    network: str
    emulated_network: bool
    points: int
    step: Score
    shape: Score | None
    exposed_communication: Score
    regret: float
    effect: float
    noise: float | None
    emulated_compute: bool = False
    runtime: str = "dpsim"


class OverlapEffect(Noun, frozen=True):
    """What overlap does at one setting: step with overlap / step without - 1 (negative is faster).

    ``noise`` is the largest of the A/A difference and of the half widths of the two intervals. ``sign_right`` is
    ``None`` where the measured effect is within the noise.
    """

    network: str
    emulated_network: bool
    devices: int
    fusion_threshold_bytes: float
    algorithm: str
    overlap: str
    measured_effect: float
    predicted_effect: float
    noise: float
    sign_right: bool | None
    emulated_compute: bool = False
    runtime: str = "dpsim"


class Comparison(Noun, frozen=True):
    """The predictions of a sweep compared with its measurements. One device is scored apart.

    ``compared`` are the fields in which the settings of a group differ.
    ``cores`` are those of the machine, and ``speeds`` its speeds by the number of devices at work.
    ``compute_slowdown_half_width`` is half the widest 95 % interval of its compute slowdowns, relative to the slowdown.
    ``intervals`` is the coverage of the predicted intervals for each network and number of devices, ``interval`` that
    of all points together (none where the predictions state no level); one calibration is behind all of them.
    ``quality`` is what the sweep learnt of the quality of training, where it declared that.
    ``identical`` says whether all trainings with leaves ended with the same bits (``None``: nothing was promised).
    """

    experiment: Experiment
    points: tuple[ComparedPoint, ...]
    groups: tuple[Group, ...]
    networks: tuple[Overall, ...]
    overall: Overall | None
    single_device_median_abs_error: float | None
    overlap: tuple[OverlapEffect, ...]
    chosen_overlap: dict[str, str]
    predictions_sha256: str
    predicted_at: str
    measured_from: str
    measured_until: str
    same_environment: bool
    not_measured: tuple[str, ...]
    harness_warnings: tuple[str, ...]
    cores: int
    identical: bool | None = None
    drift_predictions_sha256: str = ""
    speeds: tuple[SpeedRecord, ...] = ()
    compute_slowdown_half_width: float = 0.0
    compared: tuple[str, ...] = ()
    quality: QualityResults | None = None
    intervals: tuple[StratumCoverage, ...] = ()
    interval: StratumCoverage | None = None

    @property
    def drift_measured(self) -> bool:
        """Whether trainings on several device counts were compared."""
        return any(p.digest for p in self.points)

    @property
    def scored(self) -> tuple[ComparedPoint, ...]:
        """The points of the main table."""
        return tuple(p for p in self.points if p.scored)

    def members(self, group: Group) -> tuple[ComparedPoint, ...]:
        """Return the scored points of a group, in the order of their settings."""
        return tuple(p for p in self.scored if p.group == group.name)

    def best_measured(self, group: Group) -> ComparedPoint:
        """Return the fastest measured point of a group."""
        return next(p for p in self.members(group) if p.is_best_measured)

    def best_predicted(self, group: Group) -> ComparedPoint:
        """Return the point of a group that was predicted to be fastest."""
        return next(p for p in self.members(group) if p.is_best_predicted)
