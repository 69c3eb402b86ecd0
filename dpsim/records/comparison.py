"""``Comparison``: the measured and the predicted side by side, as flat points and as scores. What every report renders.

The harness derives it from records (``dpsim.harness.sweep.compare``); nothing here computes.
"""

from __future__ import annotations

from typing import Any

from dpsim import codec
from dpsim.codec import Noun
from dpsim.records.sweep import Scaling

ALL_NETWORKS = "all"
NULL_NAMES = {
    "constant": "a constant per device count (with hindsight: the median of what was measured)",
    "perfect_scaling": "perfect scaling (communication is free)",
    "alpha_beta_no_overlap": "alpha-beta without overlap",
    "largest_bucket": "the largest bucket (one allreduce per step)",
}


class ComparedPoint(Noun, frozen=True):
    """One configuration: what was measured (twins of an A/A pair pooled) and what was predicted before.

    ``error`` is predicted over measured, minus 1. ``noise`` is the A/A difference of the point's network
    and device count (``None``: no pair was run). ``repeat`` counts the runs that were pooled.
    ``slow_samples`` is the share of samples beyond 1.5 times the median. ``scored`` tells the points of
    the main table (the chosen overlap) from those that only show what overlap does. Of a sweep over the number of
    devices: ``measured_drift`` is |w_n - w_1| / |w_1| after some steps (0 where the bits are the same), the statistics'
    that of local batch norm's means (``dpsim.records.reproduce``), each ``None`` where there is none;
    ``digest`` is that of the trained state.

    Where the machine's speed changed ``measured_step_s`` is the mean over its speeds: the median of steps that were
    brought to the mean speed of the run by the times of the reference computation. ``predicted_at_run_speed_s`` is what
    would have been predicted for the speeds of the run, and ``error_at_equal_speed`` compares it with the measured step
    (``None`` in records that did not observe the speed).
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
    measured_drift: float | None = None
    predicted_drift: float | None = None
    measured_statistics_drift: float | None = None
    predicted_statistics_drift: float | None = None
    digest: str = ""
    predicted_at_run_speed_s: float | None = None
    error_at_equal_speed: float | None = None

    @property
    def measured_s_per_sample(self) -> float:
        """Seconds of a step over the samples of a step."""
        return self.measured_step_s / self.global_batch


class Score(Noun, frozen=True):
    """The model's absolute errors beside those of the nulls. ``skill`` is 1 - model / best null."""

    median_abs_error: float
    p90_abs_error: float
    null_median_abs_error: float
    null: str
    skill: float | None
    null_errors: dict[str, float]


class Group(Noun, frozen=True):
    """One network and one device count above 1: its scores, and what the choice of the threshold is worth.

    Of a sweep over the number of devices one network, with ``devices`` 0: scores over its counts above 1, and what the
    choice of the count is worth, by time a sample.

    ``exposed_communication`` scores absolute errors relative to the measured step time, for exposed
    communication itself may be 0. ``effect`` is the worst over the best measured setting, minus 1;
    ``noise_floor`` is the larger of the A/A difference and of the half widths of those two settings'
    intervals, and ``below_noise`` says that the effect is smaller. ``regret`` is what following the
    prediction costs: the best setting is chosen on one half of the rounds and compared with the
    predicted best on the other half, both ways round, averaged (``regret_on_halves`` is false when
    there were too few rounds and all samples had to serve for both). ``drift`` is the last third of
    the rounds over the first third, minus 1.
    """

    network: str
    emulated_network: bool
    devices: int
    points: int
    step: Score
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


class SpeedRecord(Noun, frozen=True):
    """How the machine's speed with so many devices at work changed between calibration and measurement, and within.

    A slow speed makes the reference computation take a slow factor times as long (1: there was none), for a slow share
    of the time. ``mean_change`` is its mean time in the measurement over that in the calibration, minus 1.
    """

    devices: int
    calibrated_slow_factor: float
    calibrated_slow_share: float
    measured_slow_factor: float
    measured_slow_share: float
    mean_change: float


class Overall(Noun, frozen=True):
    """Scores over all device counts above 1 of one network, or of all (``network`` is then ``all``).

    ``regret`` is the worst over the groups, ``effect`` the largest, ``noise`` the largest.
    """

    network: str
    emulated_network: bool
    points: int
    step: Score
    exposed_communication: Score
    regret: float
    effect: float
    noise: float | None


class OverlapEffect(Noun, frozen=True):
    """What overlap does at one setting: step time with it over step time without it, minus 1 (negative is faster).

    ``sign_right`` is ``None`` when the measured effect is within ``noise``: the larger of the A/A
    difference and of the half widths of the two intervals.
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


class Comparison(Noun, frozen=True):
    """A sweep's predictions against its measurements. One device is scored apart.

    ``cores`` are those of the machine, ``speeds`` its speeds by the number of devices at work, and
    ``compute_slowdown_half_width`` half the widest 95 % interval of its compute slowdowns, over the slowdown.
    ``scaling`` is that of a sweep over the number of devices. ``identical``:
    whether all its trainings with leaves came to the same bits, None where none was to.
    """

    name: str
    question: str
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
    scaling: Scaling | None = None
    identical: bool | None = None
    drift_predictions_sha256: str = ""
    speeds: tuple[SpeedRecord, ...] = ()
    compute_slowdown_half_width: float = 0.0

    @property
    def drift_measured(self) -> bool:
        """Whether the device counts were trained and compared."""
        return any(p.digest for p in self.points)

    @property
    def scored(self) -> tuple[ComparedPoint, ...]:
        """The points of the main table."""
        return tuple(p for p in self.points if p.scored)

    def members(self, group: Group) -> tuple[ComparedPoint, ...]:
        """The scored points of a group, by threshold or by number of devices."""
        return tuple(p for p in self.scored if p.network == group.network and group.devices in (0, p.devices))


def points_json(comparison: Comparison) -> list[dict[str, Any]]:
    """The flat points of ``--json``. One device has no threshold (null); an infinite one is ``"inf"``."""
    points: list[dict[str, Any]] = codec.to_builtins(comparison.points)
    return [point | ({"fusion_threshold_bytes": None} if point["devices"] == 1 else {}) for point in points]


def summary_json(comparison: Comparison) -> dict[str, Any]:
    """The summary of ``--json``: the overall scores under their fixed names, then the parts."""
    parts: dict[str, Any] = codec.to_builtins(comparison)
    overall: dict[str, Any] = parts["overall"] or {}
    step: dict[str, Any] = overall.pop("step", {})
    fixed = {key: step.get(key) for key in ("median_abs_error", "p90_abs_error", "null_median_abs_error", "skill")}
    kept = [
        "groups",
        "networks",
        "single_device_median_abs_error",
        "overlap",
        "chosen_overlap",
        "predictions_sha256",
        "predicted_at",
        "measured_from",
        "measured_until",
        "not_measured",
        "speeds",
    ]
    if comparison.scaling is not None:
        kept += ["scaling", "identical", "drift_predictions_sha256"]
    return (
        fixed
        | {"regret": overall.get("regret"), "null": step.get("null"), "null_errors": step.get("null_errors")}
        | {"exposed_communication": overall.get("exposed_communication"), "noise": overall.get("noise")}
        | {"effect": overall.get("effect")}
        | {key: parts[key] for key in kept}
    )
