"""``Comparison``: measured and predicted side by side, as points and as scores. Reports of sweeps render it.

``dpsim.harness.sweep.compare`` derives it from the records.
"""

from __future__ import annotations

from typing import NamedTuple

from dpsim.codec import Noun
from dpsim.records.compared_point import ComparedPoint
from dpsim.records.coverage import StratumCoverage
from dpsim.records.quality import QualityResults
from dpsim.records.reproduce import ReproduceRecord
from dpsim.records.sweep import Experiment, Predictions, Results, share_clean

ALL_NETWORKS = "all"
HALVES, HALVES_SEED = 200, 0
"""The random halves of the rounds over which a regret is the mean, and the seed that draws them."""


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
