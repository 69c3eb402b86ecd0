"""Reproducibility across configurations: what is compared, and the record of all trainings, their bits as digests."""

from __future__ import annotations

import array
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from dpsim import codec
from dpsim.algorithms import RUNNABLE, algorithms_in
from dpsim.codec import Noun
from dpsim.collective import parse_devices
from dpsim.columns import Column
from dpsim.constraints import check, possible
from dpsim.dtypes import ComputeDtype, WireDtype
from dpsim.errors import ConfigError, unknown
from dpsim.fields import Decides, shared
from dpsim.fusion_rules import threshold_rules
from dpsim.machine import Network
from dpsim.optimizer import Optimizer, Sgd
from dpsim.plan import (
    BATCH_NORM_MODES,
    DEFAULT_LEAVES,
    OVERLAPS,
    BatchNormMode,
    Overlap,
    Plan,
)
from dpsim.records.checks import check_distinct, check_steps
from dpsim.records.sweep import Environment
from dpsim.rng import check_seed
from dpsim.setting import DataSet, Grid, Seed, plan_fields
from dpsim.strategy import DataParallel, parse_strategy
from dpsim.units import format_size

SCHEMA = "dpsim.reproduce/2"
RECORD = "reproduce.json"
PREDICTIONS = "predictions.json"
Cause = Literal["summation order", "batch norm", "shape", "other"]


def promised(plan: Plan) -> bool:
    """Return whether dpsim promises the same bits in every configuration of a plan's mode: with leaves it does."""
    return plan.leaves > 0


def plan_name(plan: Plan) -> str:
    """Return ``2 devices, 64 KiB, ring, poll``."""
    micro_batches = "" if plan.accumulate == 1 else f", {plan.accumulate} micro-batches"
    if plan.devices == 1:
        return f"1 device{micro_batches}"
    strategy = "" if plan.strategy == DataParallel.name else f", {plan.strategy}"
    size = format_size(plan.threshold_bytes)
    return f"{plan.layout or plan.devices} devices, {size}, {plan.algorithm}, {plan.overlap}{strategy}{micro_batches}"


class Reproduction(Noun, frozen=True):
    """A training, and all configurations of it that are compared: every combination, and one device.

    Each of ``batch_norms`` is a training of its own, and configurations are compared within it. Mode ``local`` is
    trained without leaves, because it has no meaning with them; ``leaves`` 0 means plain training in every mode.
    ``wire_dtype`` is the format in which gradients are sent (``None``: as they are), ``compute_dtype`` that of the
    operands of products and convolutions; both are part of the training. ``accumulates`` are numbers of micro-batches.
    """

    model: str = "cnn"
    dataset: DataSet = "digits"
    devices: tuple[int | str, ...] = (1, 2, 3, 4)
    fusion_thresholds_bytes: Annotated[tuple[float, ...], Decides.ORDER | Decides.STEP_TIME] = (0.0, 65536.0, math.inf)
    algorithms: Annotated[tuple[str, ...], Decides.ORDER | Decides.STEP_TIME] = ("auto",)
    overlaps: Annotated[tuple[Overlap, ...], Decides.STEP_TIME] = ("off",)
    batch_norms: Annotated[tuple[BatchNormMode, ...], Decides.BITS] = ("leaf",)
    steps: Annotated[int, Decides.BITS] = 50
    leaves: int = DEFAULT_LEAVES
    global_batch: int = 64
    optimizer: Optimizer = Sgd(weight_decay=1e-3)
    seed: Seed = 0
    fusion_rule: str = "tarantella"
    wire_dtype: WireDtype | None = None
    strategies: Annotated[tuple[str, ...], Decides.STEP_TIME] = ("data-parallel",)
    compute_dtype: ComputeDtype = "float32"
    accumulates: Annotated[tuple[int, ...], Decides.SHARES] = (1,)
    cycle_s: float = 1e-3

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check_steps(self.steps)
        words: tuple[tuple[str, Sequence[str], Sequence[str], tuple[str, ...]], ...] = (
            ("algorithm", self.algorithms, algorithms_in(*RUNNABLE), ("all",)),
            ("overlap", self.overlaps, OVERLAPS, ("all",)),
            ("batch norm", self.batch_norms, BATCH_NORM_MODES, ()),
        )
        for name, values, allowed, every in words:
            for value in values:
                if value not in allowed:
                    raise unknown(name, value, (*every, *allowed))
        msgspec.structs.force_setattr(self, "strategies", tuple(parse_strategy(each).text for each in self.strategies))
        for name, values in msgspec.structs.asdict(self).items():
            if isinstance(values, tuple):
                check_distinct(name, values)
        for plan in self.plans():
            check("network", algorithm=plan.algorithm, network=Network())

    def plans(self) -> tuple[Plan, ...]:
        """Return the plan of every combination, ordered by mode and then by devices. Raises ``ConfigError``.

        One device comes first in each mode, and once for each number of micro-batches; threshold, algorithm and overlap
        have no effect on it.
        """
        several = sorted((token for token in self.devices if parse_devices(token)[0] > 1), key=parse_devices)
        alone = {1, *(self.accumulates if len(several) < len(self.devices) else ())}
        single = {"devices": 1, "fusion_threshold_bytes": math.inf, "algorithm": "auto", "accumulate": sorted(alone)}
        crossed = {"devices": several} | {field: getattr(self, name) for name, field in AXES.items()}
        compared = [field for field in ("algorithm", "strategy") if len(crossed[field]) > 1]
        takes_none = {} if self.fusion_rule in threshold_rules() else {"fusion_threshold_bytes": ()}
        plans: list[Plan] = []
        for mode in self.batch_norms:
            fields = shared(self, Plan) | {"batch_norm": mode, "leaves": 0 if mode == "local" else self.leaves}
            for axes in (single, crossed) if several else (single,):
                for row in Grid.of(**fields | axes | takes_none).rows:
                    of_plan = plan_fields(row, lambda _: "auto")
                    if of_plan["devices"] == 1 or all(possible(name, **of_plan) for name in compared):
                        plans.append(Plan(**of_plan))
        return tuple(plans)


AXES = {
    "fusion_thresholds_bytes": "fusion_threshold_bytes",
    "algorithms": "algorithm",
    "overlaps": "overlap",
    "strategies": "strategy",
    "accumulates": "accumulate",
}
"""The fields of a reproduction that have several values, and the field of a plan that each sets."""


class Trajectory(Noun, frozen=True):
    """The outcome of a training. Configurations with the same outcome share one trajectory.

    ``digest`` is the one that ``dpsim train`` prints: the SHA-256 of parameters, optimizer state and running
    statistics, tensor by tensor in name order. ``tensors`` names those of rank 0 in the order in which a step makes
    them, and ``steps`` has the first 8 digits of the SHA-256 of each tensor after each step.
    """

    digest: str
    losses_digest: str
    losses: tuple[float, ...]
    tensors: tuple[str, ...]
    steps: tuple[tuple[str, ...], ...]


class Run(Noun, frozen=True):
    """A plan and the index of its trajectory. ``ranks_agree``: all ranks ended with the same bits."""

    plan: Plan = msgspec.field(name="configuration")
    trajectory: int
    ranks_agree: bool


class Difference(Noun, frozen=True):
    """Where one trajectory first differs from another. A step makes tensors in one order, in which one is the first.

    ``values_known`` is false where only digests are known, as of a saved run.
    """

    step: Annotated[int, Column("count", "The step, from 1, in which a tensor first differs from one device.")]
    tensor: Annotated[str, Column("name", "The first tensor that differs in that step.")]
    tensors_differing: Annotated[int, Column("count", "The tensors that differ after that step.")]
    tensors: Annotated[int, Column("count", "The tensors that were compared.")]
    cause: Annotated[Cause | None, Column("name", "The cause of the difference.")] = None
    evidence: Annotated[str, Column("text", "Why this is the cause.")] = ""
    values_known: Annotated[bool, Column("yes or no", "Whether the values are known, and not only their digests.")] = (
        msgspec.field(default=False, name="kept")
    )
    element: Annotated[
        tuple[int, ...], Column("text", "The index of the tensor's first differing element: `[3, 0]`.")
    ] = ()
    value: Annotated[float, Column("ratio", "The value of that element.")] = 0.0
    reference_value: Annotated[float, Column("ratio", "Its value on one device.")] = 0.0
    ulps: Annotated[int, Column("count", "How many floating-point numbers the two are apart.")] = 0
    relative: Annotated[float, Column("ratio", "The relative difference of the two.")] = 0.0
    elements_differing: Annotated[int, Column("count", "The elements of the tensor that differ.")] = 0
    elements: Annotated[int, Column("count", "The elements of the tensor.")] = 0
    max_ulps: Annotated[int, Column("count", "The most floating-point numbers that two elements are apart.")] = 0
    max_relative: Annotated[
        float, Column("ratio", "The largest difference of two elements, over the largest number of the tensor.")
    ] = 0.0


class PredictedDrift(Noun, frozen=True):
    """The predicted drift from one device of a mode that does not promise the same bits.

    ``parameters`` = |w_n - w_1| / |w_1| after the last step, from rounding alone (``None`` with local statistics, which
    change more than rounding does, and where ``reason`` says why there is no prediction). ``statistics`` is the root
    mean square, in standard deviations of a sample, of the difference between a device's mean and the whole batch's: of
    the first batch norm, before training, over the first 16 batches (``None`` without local batch norm).
    """

    batch_norm: BatchNormMode
    devices: int
    parameters: float | None = None
    statistics: float | None = None
    reason: str = ""


class MeasuredDrift(Noun, frozen=True):
    """The measured drift of a plan; ``loss`` is the relative difference of the last step's loss."""

    plan: Plan = msgspec.field(name="configuration")
    parameters: float
    loss: float
    statistics: float | None = None


class DriftInputs(Noun, frozen=True):
    """The inputs of a prediction of drift, measured in the run on one device before the prediction was made.

    ``spacing_updates`` = sum over steps of the mean of |update| times the spacing of floating-point numbers at w;
    ``squared_updates`` = sum over steps of the mean of update^2; ``parameter_rms`` is taken after the last step.
    ``unit`` is half the relative spacing of floating-point numbers. ``normalises``: the model has batch norm.
    """

    batch_norm: BatchNormMode
    spacing_updates: float
    squared_updates: float
    parameter_rms: float
    unit: float
    normalises: bool


class DriftPredictions(Noun, frozen=True):
    """All predictions of drift and their inputs; written and hashed before the runs that they predict.

    ``model_version`` is that of the model (0: from before versions were recorded).
    """

    reproduction: Reproduction
    predicted_at: str
    inputs: tuple[DriftInputs, ...] = msgspec.field(name="basis")
    points: tuple[PredictedDrift, ...]
    schema: str = "dpsim.drift/1"
    model_version: int = 0


class Divergence(Noun, frozen=True):
    """A trajectory that differs from its reference; both are indices into the record's ``trajectories``."""

    trajectory: int
    reference: int
    difference: Difference


class SavedComparison(Noun, frozen=True):
    """A comparison with a saved run. A difference is ``None`` where a configuration has the bits of the saved run.

    ``across_machines`` says in what the machine types of the two differ; then differences are not held against it.
    """

    path: str
    compared: tuple[Plan, ...]
    differences: tuple[Difference | None, ...]
    across_machines: tuple[str, ...] = ()


class ReproduceRecord(Noun, frozen=True):
    """All trainings of a reproduction, where they differ, and the drift.

    ``kernel_table`` is the digest of the table that decides which code computes in leaves.
    """

    reproduction: Reproduction
    environment: Environment
    measured_from: str
    measured_until: str
    trajectories: tuple[Trajectory, ...]
    runs: tuple[Run, ...]
    divergences: tuple[Divergence, ...] = msgspec.field(default=(), name="found")
    predictions: DriftPredictions | None = None
    predictions_sha256: str = ""
    drift: tuple[MeasuredDrift, ...] = ()
    saved_comparison: SavedComparison | None = msgspec.field(default=None, name="against")
    kernel_table: str = ""
    schema: str = SCHEMA

    def __post_init__(self) -> None:
        count = len(self.trajectories)
        indices = [run.trajectory for run in self.runs]
        indices += [index for each in self.divergences for index in (each.trajectory, each.reference)]
        for index in indices:
            if not 0 <= index < count:
                raise ConfigError(f"a run has trajectory {index}", allowed=f"0 to {count - 1}: there are {count}")
        for number, trajectory in enumerate(self.trajectories):
            if losses_digest(trajectory.losses) != trajectory.losses_digest:
                raise ConfigError(
                    f"the losses of trajectory {number} do not have the digest {trajectory.losses_digest[:16]!r}",
                    allowed="losses as they were recorded, with the digest of their bits",
                    remedy="take the record from where it was made: this one was changed",
                )

    def reference(self, plan: Plan) -> int:
        """Return the index of the trajectory to compare a plan's with: one device in the same mode."""
        return next(
            run.trajectory
            for run in self.runs
            if (run.plan.devices, run.plan.accumulate, run.plan.batch_norm) == (1, 1, plan.batch_norm)
        )

    def identical(self, run: Run) -> bool:
        """Return whether a run ended with the bits of one device, on all its ranks."""
        return run.ranks_agree and run.trajectory == self.reference(run.plan)

    def broken(self, run: Run) -> bool:
        """Return whether a run is promised to be identical and is not."""
        return promised(run.plan) and not self.identical(run)

    def difference(self, run: Run) -> Difference | None:
        """Return where a run first differs from the run on one device."""
        pair = self.reference(run.plan), run.trajectory
        return next((each.difference for each in self.divergences if (each.reference, each.trajectory) == pair), None)

    def measured_drift(self, plan: Plan) -> MeasuredDrift | None:
        """Return the measured drift of a plan, ``None`` where it was not measured."""
        return next((drift for drift in self.drift if drift.plan == plan), None)

    def predicted_drift(self, plan: Plan) -> PredictedDrift | None:
        """Return the predicted drift of a plan's mode and device count, ``None`` without a prediction.

        None is made of micro-batches, whose statistics and sums differ from those of the devices' whole shares.
        """
        points = self.predictions.points if self.predictions is not None and plan.accumulate == 1 else ()
        mode = plan.batch_norm, plan.devices
        return next((point for point in points if (point.batch_norm, point.devices) == mode), None)

    def drifts(self) -> list[tuple[PredictedDrift, list[MeasuredDrift]]]:
        """Return each prediction of drift with the measurements of the same mode and device count."""
        points = self.predictions.points if self.predictions is not None else ()
        return [(point, [each for each in self.drift if self.predicted_drift(each.plan) == point]) for point in points]

    @property
    def kept_promises(self) -> bool:
        """Whether everything that dpsim promises to be identical is, in this run and against the saved one.

        A saved run of another machine type is shown, and promises nothing.
        """
        saved = self.saved_comparison
        same_type = saved is not None and not saved.across_machines
        pairs = zip(saved.compared, saved.differences, strict=True) if saved is not None and same_type else ()
        return not any(map(self.broken, self.runs)) and all(
            difference is None for plan, difference in pairs if promised(plan)
        )


class DigestCase(Noun, frozen=True):
    """A training of a reproduction on running ranks, of which rank 0 saves arrays to ``file`` (empty: nowhere).

    Without ``until`` these are the final parameters, and the batch-norm means with which predicted drift is compared.
    With ``until`` the training ends after this number of steps, and they are the dump of that last step: every tensor,
    the gradients, and digests of each sample.
    """

    plan: Plan
    file: str = ""
    until: int = 0


class RunOutcome(Noun, frozen=True):
    """The outcome of one training. ``drift_inputs`` are measured on one device, in modes without a promise."""

    trajectory: Trajectory
    ranks_agree: bool
    drift_inputs: DriftInputs | None = None


def losses_digest(losses: Sequence[float]) -> str:
    """Return the SHA-256 of the bits of the losses, as float64."""
    return hashlib.sha256(array.array("d", losses).tobytes()).hexdigest()


def read(path: Path, what: str = "reproduce") -> ReproduceRecord:
    """Read a record, from its file or from the folder that holds it. Raises ``FileFormatError``."""
    return codec.read(path / RECORD if path.is_dir() else path, ReproduceRecord, what, SCHEMA)
