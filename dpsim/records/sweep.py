"""The records of a sweep: what was declared, predicted and measured, with every raw sample."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import ConfigError, unknown
from dpsim.machine import Machine
from dpsim.rng import check_seed
from dpsim.setting import FIELDS, Grid, Setting, settings_of
from dpsim.timeline import TimelineRecord
from dpsim.workload import Workload

EXPERIMENT_SCHEMA = "dpsim.experiment/2"
PREDICTIONS_SCHEMA = "dpsim.predictions/3"
RESULTS_SCHEMA = "dpsim.results/3"
MOST_SETTINGS = 10_000
"""The largest sweep. More settings would not be measured in a day, and are usually a mistake."""
LEAST_CLEAN = 6
"""A median of fewer clean samples says nothing of its setting."""


class Experiment(Grid, frozen=True, dict=True):
    """A declared sweep: a grid of settings, the question that it answers, and how it is measured.

    Two reports are of the same experiment when their experiments are equal. ``question`` is one of those of
    ``dpsim.harness.sweep.questions``; it fills in what the grid leaves out. ``compared`` are the fields whose values
    are compared with each other (empty: the question decides). ``budget_s`` bounds the measuring. A point needs no more
    samples once the 95 % interval of its median is within +- ``interval`` of the median. With ``steps`` every number of
    devices also trains so many steps, and the divergence from one device is measured. With ``seeds`` a sweep over batch
    norm also trains from so many seeds for ``epochs`` epochs, to measure what the local batch does to the loss; with
    ``target_loss`` one over the local batch trains to it at several global batches, to measure how many steps it takes.
    Collectives are calibrated on ``calibrated_devices`` alone (empty: on all), and predicted on the others.
    Where PyTorch's DDP trains, ``script`` is the user's script that it runs, with its ``arguments``, and
    ``other_runtimes`` are measured beside it with the same plans, where they can run them.
    """

    name: str = "sweep"
    question: str = "settings"
    dataset: str = "digits"
    compared: tuple[str, ...] = ()
    seed: int = 0
    budget_s: float = 45.0
    interval: float = 0.02
    steps: int = 0
    seeds: int = 0
    epochs: int = 8
    target_loss: float = 0.0
    schema: str = EXPERIMENT_SCHEMA
    script: str = ""
    arguments: tuple[str, ...] = ()
    other_runtimes: tuple[str, ...] = ()
    calibrated_devices: tuple[int, ...] = ()

    @functools.cached_property
    def settings(self) -> tuple[Setting, ...]:
        """The settings of the rows, in their order. Raises one ``ConfigError`` for all that are impossible."""
        return settings_of(self.rows)

    @property
    def weak(self) -> bool:
        """Whether more devices train more samples per step."""
        return bool(self.values("local_batch"))

    @property
    def measures_drift(self) -> bool:
        """Whether the device counts are trained and compared: they are if all train the same batches."""
        return self.steps > 0 and not self.weak

    def __post_init__(self) -> None:
        super().__post_init__()
        count = max(1, len(self.cases)) * math.prod(map(len, self.axes.values()))
        if count > MOST_SETTINGS:
            lengths = [f"{name} {len(values)}" for name, values in self.axes.items()]
            counts = ", ".join(lengths + [f"cases {len(self.cases)}"] * (len(self.cases) > 1))
            raise ConfigError(
                f"a grid of {count} settings (values: {counts})",
                allowed=f"at most {MOST_SETTINGS} settings",
                remedy="leave values out, or compare fewer fields at a time",
            )
        check_seed(self.seed)
        if self.name in ("", ".", "..") or "/" in self.name or "\0" in self.name:
            raise ConfigError(f"an experiment named {self.name!r}", allowed="the name of a folder")
        for name in self.compared:
            if name not in FIELDS:
                raise unknown("field of a setting", name, FIELDS)
        if self.steps < 0:
            raise ConfigError(f"steps is {self.steps}", allowed="1 or more, or 0: train no steps apart from the timing")
        for name in ("seeds", "target_loss"):
            if not (0 <= getattr(self, name) < math.inf):
                raise ConfigError(f"{name} is {getattr(self, name)}", allowed="a finite number > 0, or 0 for none")
        if self.epochs < 1:
            raise ConfigError(f"epochs is {self.epochs}", allowed="1 or more")
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


class PredictedPoint(Noun, frozen=True):
    """The model's and the nulls' predictions of a point, made without its samples.

    ``null_step_s`` and ``null_exposed_s`` hold the nulls that need no measurement, those of ``dpsim.model.nulls``.
    One more, a constant per device count, is computed in the comparison. ``memory_bytes`` is what a device needs,
    without communication buffers (0: not known). ``workload`` and ``machine`` are the places of what it was predicted
    from. ``low_s`` to ``high_s`` holds the median measured step with a probability of ``interval_level`` (``None``: its
    width is assumed); it is ``interval_factor`` times as wide as the model's own, by ``interval_studies`` past studies
    of the machine. ``communication_cost_s`` is ``step_s`` - the step on a network where collectives take no time.
    ``same_buckets`` are the settings of the grid whose fusion rules or thresholds make the same buckets: they are this
    setting under other names, and measured with it.
    """

    setting: Setting
    buckets: int
    step_s: float
    low_s: float
    high_s: float
    exposed_communication_s: float
    extrapolated: bool
    null_step_s: dict[str, float]
    null_exposed_s: dict[str, float]
    timeline: TimelineRecord | None = None
    memory_bytes: int = 0
    workload: int = 0
    machine: int = 0
    interval_level: float | None = None
    interval_factor: float = 1.0
    interval_studies: int = 0
    communication_cost_s: float | None = None
    same_buckets: tuple[Setting, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The fusion rule and threshold, such as ``ddp at 25 MiB``, then those that make the same buckets."""
        texts = (
            (each.plan.fusion_rule, each.text("fusion_threshold_bytes")) for each in (self.setting, *self.same_buckets)
        )
        return tuple(rule if threshold == "none" else f"{rule} at {threshold}" for rule, threshold in texts)


class Predictions(Noun, frozen=True):
    """Everything that was predicted in a sweep, and what from, by the model of ``model_version``.

    Those made beforehand are written and hashed before the first measurement, those of the same minutes after the last.
    ``mechanisms`` are the predicted seconds per step by overlap, for each kind of setting that was prepared apart
    (``dpsim.study.inputs``): for each network, where all settings have one model.
    """

    experiment: Experiment
    environment: Environment
    predicted_at: str
    workloads: tuple[Workload, ...]
    machines: tuple[Machine, ...]
    points: tuple[PredictedPoint, ...]
    mechanisms: dict[str, dict[str, float]]
    schema: str = PREDICTIONS_SCHEMA
    model_version: int = 0

    def made_from(self, point: PredictedPoint) -> tuple[Workload, Machine]:
        """Return the workload and the machine that a point was predicted from."""
        return self.workloads[point.workload], self.machines[point.machine]


class Emulation(Noun, frozen=True):
    """How well the ranks of a setting with emulated compute kept their times.

    A rank waits until moments that are known before the step; ``lateness_s`` (median), ``lateness_p95_s`` and
    ``lateness_most_s`` say how late it met them, over all ranks, layers and steps. ``free_cores`` is the share of the
    cores' time in which no rank ran: 1 - CPU time of all ranks / (wall time x cores). ``repeated_visits`` counts those
    that were made again, because other programs had made the ranks late.
    """

    lateness_s: float
    lateness_p95_s: float
    lateness_most_s: float
    free_cores: float
    repeated_visits: int = 0


class MeasuredPoint(Noun, frozen=True):
    """The raw samples of one configuration: seconds of each step on the slowest rank, and its exposed communication.

    ``round`` is the round of the interleaved run in which each sample was taken, and ``losses`` are the mean training
    losses of the same steps. ``events_per_step`` counts the events that one rank records in a step; each takes
    ``recording_s_per_event`` of the results. ``memory_bytes`` is what the device with the most has allocated, without
    communication buffers (0: not known). ``emulation`` is given where computation is emulated. ``logged_s`` are the
    times of each of these steps that PyTorch's DDP logs itself, under its own names, on the rank with the least exposed
    communication, and ``bucket_bytes`` the buckets that it reports. ``bucket_ready_s`` are the medians of the seconds
    of computation from the start of backward until a communication hook got each bucket. They are empty where dpsim
    trains, the last one also where DDP has no hook. ``clean`` tells of each sample whether other processes left it
    undisturbed by the rule of that name (``dpsim.study.disturbance``); ``None`` is not known, and so is a record
    without it.
    """

    setting: Setting
    buckets: int
    step_s: tuple[float, ...]
    exposed_communication_s: tuple[float, ...]
    round: tuple[int, ...]
    losses: tuple[float, ...]
    events_per_step: int = 0
    timeline: TimelineRecord | None = None
    memory_bytes: int = 0
    emulation: Emulation | None = None
    logged_s: dict[str, tuple[float, ...]] = msgspec.field(default_factory=dict)
    bucket_bytes: tuple[int, ...] = ()
    bucket_ready_s: tuple[float, ...] = ()
    clean: tuple[bool | None, ...] = ()
    disturbance_rule: str = ""


class Marked(Protocol):
    """Samples, and of each whether it is clean: those of a ``MeasuredPoint``, or those of a setting so far."""

    @property
    def step_s(self) -> Sequence[float]: ...

    @property
    def clean(self) -> Sequence[bool | None]: ...


def enough_clean(runs: Sequence[Marked]) -> bool:
    """Return whether runs of one setting have enough clean samples for a median, or nothing is known of any sample."""
    marks = [mark for run in runs for mark in run.clean if mark is not None]
    return not marks or sum(marks) >= LEAST_CLEAN


def share_clean(runs: Sequence[Marked]) -> float | None:
    """Return the share of the samples of runs that are clean, of those of which it is known; ``None`` without one."""
    marks = [mark for run in runs for mark in run.clean if mark is not None]
    return sum(marks) / len(marks) if marks else None


def clean_values(runs: Sequence[Marked], name: str = "step_s") -> tuple[Any, ...]:
    """Return the values of a series of samples (``step_s``, ``round``, ...) of which the medians of these runs are.

    They are of the clean samples of all runs. Where these are fewer than ``LEAST_CLEAN``, which ``enough_clean`` tells,
    they are of all samples whose mark is known, and without a mark anywhere of all samples.
    """
    has_marks = any(mark is not None for run in runs for mark in run.clean)
    allowed = (True,) if enough_clean(runs) and has_marks else (True, False) if has_marks else (None,)
    return tuple(
        value
        for run in runs
        for value, mark in zip(getattr(run, name), run.clean or (None,) * len(run.step_s), strict=True)
        if mark in allowed
    )


class MeasuredPart(Noun, frozen=True):
    """A part of a sweep that a job of its own measured, and the digest of what it had predicted before that."""

    predictions_sha256: str
    measured_from: str


class Results(Noun, frozen=True):
    """Everything that was measured in a sweep, tied to the predictions by their SHA-256.

    ``other_points`` are those of the experiment's other runtimes; each has the plan of one of ``points``, and none was
    predicted. ``inputs_sha256`` is the digest of what was profiled and calibrated in turns with the samples (empty:
    nothing was), and ``blind_sha256`` that of the predictions from it. Both predictions are by the model of
    ``model_version`` (0: from before versions and the second digest were recorded). ``groups`` are the places in
    ``points`` of the settings that are compared with each other, their second runs included, and ``guesses`` the nulls
    that the model is scored against on several devices (both empty: from before they were recorded). Where several jobs
    measured, ``parts`` has one for each, and what is hashed here are the predictions of all of them, joined.
    """

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
    other_points: tuple[MeasuredPoint, ...] = ()
    inputs_sha256: str = ""
    blind_sha256: str = ""
    model_version: int = 0
    groups: tuple[tuple[int, ...], ...] = ()
    guesses: tuple[str, ...] = ()
    parts: tuple[MeasuredPart, ...] = ()


def read_experiment(path: Path | str) -> Experiment:
    """Read a declared experiment (``.toml`` or ``.json``). Raises ``FileFormatError``."""
    return codec.read(Path(path), Experiment, "experiment", EXPERIMENT_SCHEMA)


def read_predictions(path: Path | str) -> Predictions:
    """Read the predictions of a sweep. Raises ``FileFormatError``."""
    return codec.read(Path(path), Predictions, "predictions", PREDICTIONS_SCHEMA)


def read_results(path: Path | str) -> Results:
    """Read the results of a sweep. Raises ``FileFormatError``."""
    return codec.read(Path(path), Results, "results", RESULTS_SCHEMA)
