"""``Comparison``: measured and predicted side by side, as flat points and as scores. Reports of sweeps render it.

``dpsim.harness.sweep.compare`` derives it from the records. A new column of a point is one entry of ``ComparedPoint``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from dpsim.codec import Noun
from dpsim.columns import Column, Row, Unit, columns_of
from dpsim.constraints import HOOK
from dpsim.machine import NODE, Machine
from dpsim.plan import Plan
from dpsim.records.coverage import StratumCoverage
from dpsim.records.quality import QualityResults
from dpsim.records.reproduce import MeasuredDrift, PredictedDrift, ReproduceRecord, Trajectory
from dpsim.records.sweep import (
    Emulation,
    Experiment,
    MeasuredPoint,
    PredictedPoint,
    Predictions,
    Results,
    clean_values,
    enough_clean,
    share_clean,
)
from dpsim.setting import Setting

ALL_NETWORKS = "all"
HALVES, HALVES_SEED = 200, 0
"""The random halves of the rounds over which a regret is the mean, and the seed that draws them."""
SLOW = 1.5
"""A sample is slow above so many times the median."""
T = TypeVar("T")
_FIELDS = columns_of(Plan) | columns_of(Setting)


class _Column(Column["ComparedPoint", T]):
    """A column of a compared point; without an expression it is given when the point is made, or by those beside it."""


class OfSetting(Column["ComparedPoint", T]):
    """A column that follows from the setting alone; its unit and its text are those of the setting's field."""

    def __init__(self, of_setting: Callable[[Setting], T], unit: Unit | None = None, text: str = "") -> None:
        super().__init__(unit or "name", text, lambda point: of_setting(point.setting))
        self.of_setting = of_setting

    def __set_name__(self, owner: type[Any], name: str) -> None:
        if not self.text:
            field = _FIELDS[name]
            self.unit, self.text, self.dtype = field.unit, field.text, field.dtype
        super().__set_name__(owner, name)


class ComparedPoint(Row):
    """One configuration: what was measured (both runs of an A/A pair pooled), and what was predicted without that.

    Its sources: ``runs`` are the measured runs, and ``machine`` is what the prediction was made from. ``alone`` is the
    point on one device that its speedup is over, ``other_run`` that of another runtime with the same plan on the same
    network that was measured in turns with PyTorch's DDP (dpsim's own, or DDP with dpsim's hook), of whose median
    ``other_half_width`` is the half width of the 95 % interval over the median. ``trajectory`` is the outcome of its
    training, with the divergence from one device. Each is ``None`` where it was not measured.
    """

    setting: Setting
    predicted: PredictedPoint
    beforehand: PredictedPoint
    runs: tuple[MeasuredPoint, ...]
    machine: Machine
    alone: ComparedPoint | None = None
    other_run: MeasuredPoint | None = None
    other_half_width: float | None = None
    trajectory: Trajectory | None = None
    divergence: MeasuredDrift | None = None
    predicted_divergence: PredictedDrift | None = None

    devices = OfSetting(lambda s: s.plan.devices)
    layout = OfSetting(
        lambda s: s.devices_token, "name", "The devices as a layout: `2x4` is 2 nodes with 4 each, `8` is 8 on one."
    )
    global_batch = OfSetting(lambda s: s.plan.global_batch)
    local_batch = _Column(
        "count",
        "The samples that a device has at once (in a micro-batch), on average.",
        lambda p: p.setting.plan.local_batch,
        dtype="float64",
    )
    fusion_rule = OfSetting(lambda s: s.plan.fusion_rule)
    fusion_threshold_bytes = OfSetting(
        lambda s: s.plan.threshold_bytes,
        "bytes",
        "The fusion threshold: 0 is one bucket per tensor, inf is one per step. One device has none (NaN).",
    )
    buckets = _Column(
        "count", "The buckets (allreduces) of a step, as the run formed them.", lambda p: p.runs[0].buckets
    )
    network = OfSetting(lambda s: s.network)
    emulated_compute = OfSetting(
        lambda s: s.emulated_compute, "yes or no", "Whether computation was emulated: ranks waited for profiled times."
    )
    emulated_network = _Column(
        "yes or no",
        "Whether the network was emulated.",
        lambda p: p.setting.network != NODE or p.machine.emulated_network,
    )
    measured_step_s = _Column[float](
        "s",
        "The measured time of a step: the median over all clean samples, or over all where too few are clean or it is "
        "not known which are.",
        head="measured ms",
        form="ms",
    )
    measured_low_s = _Column[float]("s", "The lower end of its 95 % bootstrap interval.")
    measured_high_s = _Column[float]("s", "The upper end of its 95 % bootstrap interval.")
    predicted_step_s = _Column(
        "s",
        "The predicted time of a step: from the same minutes as the samples, or beforehand where nothing took turns.",
        lambda p: p.predicted.step_s,
        head="predicted ms",
        form="ms",
    )
    predicted_low_s = _Column("s", "The lower end of the predicted interval.", lambda p: p.predicted.low_s)
    predicted_high_s = _Column("s", "The upper end of the predicted interval.", lambda p: p.predicted.high_s)
    exposed_communication_s = _Column(
        "s",
        "Measured time of a step in which communication is not hidden: the median over the same samples.",
        lambda p: _median(clean_values(p.runs, "exposed_communication_s")),
        head="exposed ms",
        form="ms",
    )
    predicted_exposed_communication_s = _Column(
        "s",
        "The same as it was predicted.",
        lambda p: p.predicted.exposed_communication_s,
        head="predicted exposed",
        form="ms",
    )
    error = _Column(
        "ratio",
        "The error of the prediction: predicted_step_s / measured_step_s - 1.",
        lambda p: p.predicted_step_s / p.measured_step_s - 1,
        form="signed percent",
    )
    beforehand_step_s = _Column(
        "s",
        "The time of a step that was predicted before the first sample, from earlier profiles and calibrations.",
        lambda p: p.beforehand.step_s,
    )
    beforehand_error = _Column(
        "ratio",
        "The error of the prediction made beforehand: beforehand_step_s / measured_step_s - 1.",
        lambda p: p.beforehand_step_s / p.measured_step_s - 1,
        head="beforehand",
        form="signed percent",
    )
    noise = _Column[float | None](
        "ratio",
        "The relative difference of two runs of one setting, for this network and number of devices; NaN if none ran.",
    )
    calibrated_on = _Column(
        "text", "The processor, network and time of the calibration.", lambda p: p.machine.calibrated_on
    )
    extrapolated = _Column(
        "yes or no",
        "Whether the prediction lies outside the range of the calibration.",
        lambda p: p.predicted.extrapolated,
    )
    algorithm = OfSetting(lambda s: s.plan.algorithm)
    overlap = OfSetting(lambda s: s.plan.overlap)
    samples = _Column(
        "count", "The measured steps, over all runs of the setting.", lambda p: sum(len(run.step_s) for run in p.runs)
    )
    repeat = _Column(
        "count", "How many runs of the setting are pooled here: 1, or 2 for a repeated one.", lambda p: len(p.runs)
    )
    measured_speedup = _Column(
        "ratio",
        "Measured samples/s over those of one device; NaN if that is missing.",
        lambda p: None if p.alone is None else p.alone.measured_s_per_sample / p.measured_s_per_sample,
        head="speedup",
        form="times",
    )
    predicted_speedup = _Column(
        "ratio",
        "Predicted samples/s over those of one device.",
        lambda p: (
            None
            if p.alone is None
            else p.global_batch / p.alone.global_batch * p.alone.predicted_step_s / p.predicted_step_s
        ),
        form="times",
    )
    efficiency = _Column(
        "ratio",
        "The scaling efficiency: measured_speedup / devices.",
        lambda p: None if p.measured_speedup is None else p.measured_speedup / p.devices,
        form="percent",
    )
    is_best_measured = _Column("yes or no", "Whether this point was the fastest of its group.", lambda p: False)
    is_best_predicted = _Column(
        "yes or no", "Whether this point was predicted to be the fastest of its group.", lambda p: False
    )
    scored = _Column[bool](
        "yes or no",
        "Whether the point is scored: it has the overlap that the sweep chose. The others show what overlap does.",
    )
    predicted_buckets = _Column(
        "count", "The buckets of a step, as the model formed them.", lambda p: p.predicted.buckets
    )
    same_buckets = _Column(
        "text",
        "The other fusion rules and thresholds of the grid that make the same buckets: they are one setting, measured "
        "once. Empty: none.",
        lambda p: ", ".join(p.predicted.names[1:]),
    )
    slow_samples = _Column(
        "ratio",
        f"The share of these samples above {SLOW} times the median.",
        lambda p: float(np.mean([s > SLOW * p.measured_step_s for s in clean_values(p.runs)])),
    )
    null_step_s = _Column(
        "s",
        "The time of a step by a simple guess that the model has to beat, with the name of the guess after the dot.",
        lambda p: dict[str, float](),
        each=True,
    )
    null_exposed_s = _Column(
        "s", "The exposed communication of a step by the same guess.", lambda p: dict[str, float](), each=True
    )
    measured_drift = _Column(
        "ratio",
        "The relative distance |w_n - w_1| / |w_1| of the trained parameters from those on one device; NaN if not "
        "measured.",
        lambda p: None if p.divergence is None else p.divergence.parameters,
        head="drift",
        form="digits",
    )
    predicted_drift = _Column(
        "ratio",
        "The same as it was predicted.",
        lambda p: None if p.predicted_divergence is None else p.predicted_divergence.parameters,
        form="digits",
    )
    measured_statistics_drift = _Column(
        "ratio",
        "The difference of a device's batch-norm means from the whole batch's, in standard deviations.",
        lambda p: None if p.divergence is None else p.divergence.statistics,
        head="batch-norm means",
        form="digits",
    )
    predicted_statistics_drift = _Column(
        "ratio",
        "The same as it was predicted.",
        lambda p: None if p.predicted_divergence is None else p.predicted_divergence.statistics,
        head="predicted means",
        form="digits",
    )
    digest = _Column(
        "text",
        "The SHA-256 of the trained state; empty where none was trained.",
        lambda p: "" if p.trajectory is None else p.trajectory.digest,
        form="short",
    )
    model = OfSetting(lambda s: s.model)
    accumulate = OfSetting(lambda s: s.plan.accumulate)
    batch_norm = OfSetting(lambda s: s.plan.batch_norm)
    leaves = OfSetting(lambda s: s.plan.leaves)
    strategy = OfSetting(lambda s: s.plan.strategy)
    wire_dtype = OfSetting(lambda s: s.plan.wire_dtype)
    compute_dtype = OfSetting(lambda s: s.plan.compute_dtype)
    group = _Column[str](
        "text", "The network and the other values that its settings share; only they compete.", dtype="category"
    )
    memory_bytes = _Column(
        "bytes",
        "What the device with the most has allocated: parameters, gradients, optimizer state, activations; NaN if not "
        "known.",
        lambda p: max(run.memory_bytes for run in p.runs) or None,
        head="memory",
        form="size",
    )
    predicted_memory_bytes = _Column(
        "bytes",
        "The same as it was predicted; NaN if not known.",
        lambda p: p.predicted.memory_bytes or None,
        head="predicted memory",
        form="size",
    )
    deadline_lateness = _Column(
        "ratio",
        "Where computation is emulated, how late layers ended (median), relative to the step; else NaN.",
        lambda p: max((e.lateness_s / p.measured_step_s for e in p.emulations), default=None),
    )
    free_cores = _Column(
        "ratio",
        "Where computation is emulated, the share of the cores' time in which no rank ran; else NaN.",
        lambda p: min((emulation.free_cores for emulation in p.emulations), default=None),
    )
    interval_level = _Column(
        "ratio",
        "The probability with which the predicted interval is to hold the measured step; NaN: its width is assumed.",
        lambda p: p.predicted.interval_level,
    )
    interval_studies = _Column(
        "count",
        "The past studies of this machine whose errors tell how wide the predicted interval must be; 0: it is assumed.",
        lambda p: p.predicted.interval_studies,
    )
    predicted_communication_cost_s = _Column(
        "s",
        "The predicted step minus the one on a network where collectives take no time; NaN in earlier records.",
        lambda p: p.predicted.communication_cost_s,
    )
    runtime = OfSetting(lambda s: s.runtime)
    dpsim_step_s = _Column(
        "s",
        "Where PyTorch's DDP trained, the step of dpsim's own runtime with the same plan, whose ranks waited for the "
        "profiled times instead of computing; NaN if not measured.",
        lambda p: _other_step_s(p, "dpsim"),
        head="dpsim's runtime (emulated computation) ms",
        form="ms",
    )
    dpsim_exposed_communication_s = _Column(
        "s",
        "Its exposed communication; NaN if not measured.",
        lambda p: (
            _median(clean_values([p.other_run], "exposed_communication_s"))
            if p.other_run and p.dpsim_step_s is not None
            else None
        ),
    )
    hook_step_s = _Column(
        "s",
        "Where DDP trained by gloo, the step of DDP with `dpsim.torch.allreduce_hook()`, in turns with it; NaN if not "
        "measured. It is not predicted.",
        lambda p: _other_step_s(p, HOOK),
        head="hook ms",
        form="ms",
    )
    hook_noise = _Column(
        "ratio",
        "The noise of measured_step_s / hook_step_s: the largest of the A/A difference and the half widths of the two "
        "medians' 95 % intervals; NaN if not measured.",
        lambda p: max(p.measured_noise, p.other_half_width or 0.0) if p.hook_step_s is not None else None,
    )

    share_clean = _Column(
        "ratio",
        "The share of the samples that other processes left undisturbed; NaN if not known.",
        lambda p: share_clean(p.runs),
        head="clean",
        form="percent",
    )

    def text(self, name: str) -> str:
        """Return a field of the setting as tables write it, with the values of settings that make the same buckets."""
        return self.predicted.text(name)

    @property
    def too_few_clean(self) -> str:
        """Return ``n of m samples were clean`` where these are too few for a median, else nothing."""
        clean = sum(mark is True for run in self.runs for mark in run.clean)
        return "" if enough_clean(self.runs) else f"{clean} of {self.samples} samples were clean"

    @property
    def measured_noise(self) -> float:
        """The larger of the A/A difference and the half width of the measured median's interval over the median."""
        return max((self.measured_high_s - self.measured_low_s) / 2 / self.measured_step_s, self.noise or 0.0)

    @property
    def measured_s_per_sample(self) -> float:
        """Measured seconds per sample."""
        return self.measured_step_s / self.global_batch

    @property
    def emulations(self) -> tuple[Emulation, ...]:
        """How well the ranks kept their times, in each run in which they waited instead of computing."""
        return tuple(run.emulation for run in self.runs if run.emulation is not None)


def _other_step_s(point: ComparedPoint, runtime: str) -> float | None:
    """Return the median step of a point's other run if it is of this runtime."""
    run = point.other_run
    return _median(clean_values([run])) if run is not None and run.setting.runtime == runtime else None


def _median(values: Iterable[float]) -> float:
    return float(np.median(list(values)))


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
    - ``regret`` is the cost of following the prediction: the best setting is chosen on a random half of the rounds and
      compared with the predicted best on the other half. It is the mean over ``regret_halves`` such halves, drawn with
      ``regret_seed``, and ``regret_spread`` their standard deviation. ``regret_halves`` is 0 where there were too few
      rounds, so that all samples served for both.
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
    regret_spread: float
    regret_halves: int
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
    emulated_compute: bool = False
    runtime: str = "dpsim"
    regret_seed: int = HALVES_SEED

    @property
    def shape_counts(self) -> bool:
        """Whether the shape of the curve can be scored: the effect exceeds three times the noise."""
        return self.shape is not None and self.effect > 3 * self.noise_floor

    @property
    def apart(self) -> list[str]:
        """The values beside the network that set the group apart, such as ``2 devices``."""
        return self.name.split("; ")[1:]


class Overall(Noun, frozen=True):
    """Scores over all settings on several devices of one network; where computation is emulated they are apart.

    ``regret`` with its spread, ``effect`` and ``noise`` are the largest over the groups.
    """

    network: str
    emulated_network: bool
    points: int
    step: Score
    shape: Score | None
    exposed_communication: Score
    regret: float
    regret_spread: float
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
    ``cores`` are those of the machine. ``relative_uncertainty`` is one standard error of the mean of its times over a
    stretch as long as the profile (0: not known).
    ``compute_slowdown_half_width`` is half the widest 95 % interval of its compute slowdowns, relative to the slowdown;
    those of ranks that wait, which share no cores, do not count.
    ``intervals`` is the coverage of the predicted intervals for each network and number of devices, ``interval`` that
    of all points together; one calibration is behind all of them.
    ``quality`` is what the sweep learnt of the quality of training, where it declared that.
    ``blind_predicted_at`` is when the compared predictions were made, from what was profiled and calibrated in turns
    with the samples; empty where they were made beforehand. ``beforehand_median_abs_error`` is then that of those made
    before the first sample, and ``machine_change`` by how much the two differ in the median.
    ``identical`` says whether all trainings with leaves ended with the same bits (``None``: nothing was promised).
    """

    experiment: Experiment
    points: tuple[ComparedPoint, ...]
    groups: tuple[Group, ...]
    networks: tuple[Overall, ...]
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
    relative_uncertainty: float = 0.0
    compute_slowdown_half_width: float = 0.0
    compared: tuple[str, ...] = ()
    quality: QualityResults | None = None
    intervals: tuple[StratumCoverage, ...] = ()
    interval: StratumCoverage | None = None
    blind_predicted_at: str = ""
    beforehand_median_abs_error: float | None = None
    machine_change: float | None = None

    @property
    def interval_studies(self) -> int:
        """The past studies of the machine that each predicted interval rests on (0: some are assumed)."""
        return min(point.interval_studies for point in self.scored or self.points)

    @property
    def interval_level(self) -> float | None:
        """The level of the predicted intervals (``None``: the widths of some are assumed)."""
        return self.interval.level if self.interval is not None and self.interval_studies else None

    @property
    def share_clean(self) -> float | None:
        """The share of all samples that other processes left undisturbed; ``None`` where it is not known."""
        return share_clean([run for point in self.points for run in point.runs])

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


class SweepData(NamedTuple):
    """The records of a sweep, and what follows from them: ``dpsim.harness.sweep.compare.compare`` of them.

    ``blind`` is missing where profiles and calibrations came before all samples.
    """

    predictions: Predictions
    results: Results
    comparison: Comparison
    drift: ReproduceRecord | None = None
    blind: Predictions | None = None

    @property
    def scored(self) -> Predictions:
        """The predictions that the comparison is with: of the same minutes, or where there are none, beforehand."""
        return self.blind or self.predictions
