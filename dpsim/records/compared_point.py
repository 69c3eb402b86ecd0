"""``ComparedPoint``: one configuration measured and predicted side by side, a row whose columns are declared once.

``dpsim.harness.sweep.compare`` derives it from the records. A new column of a point is one entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from dpsim.columns import Column, Row, Unit, columns_of
from dpsim.constraints import HOOK
from dpsim.machine import NODE, Machine
from dpsim.plan import Plan
from dpsim.records.reproduce import MeasuredDrift, PredictedDrift, Trajectory
from dpsim.records.sweep import Emulation, MeasuredPoint, PredictedPoint, clean_values, enough_clean, share_clean
from dpsim.setting import Setting

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
        "The measured time of a step: the median over clean samples, or over all where too few are known to be clean.",
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
        "The relative difference of two runs of one setting, for this network and number of devices.",
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
        "Measured samples/s over those of one device.",
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
        "Other fusion rules and thresholds that make the same buckets, and were measured as this setting.",
        lambda p: ", ".join(p.predicted.names[1:]),
    )
    slow_samples = _Column(
        "ratio",
        f"The share of these samples above {SLOW} times the median.",
        lambda p: float(np.mean([s > SLOW * p.measured_step_s for s in clean_values(p.runs)])),
    )
    null_step_s = _Column(
        "s",
        "The time of a step by a simple guess, whose name stands after the dot.",
        lambda p: dict[str, float](),
        each=True,
    )
    null_exposed_s = _Column(
        "s", "The exposed communication of a step by the same guess.", lambda p: dict[str, float](), each=True
    )
    measured_drift = _Column(
        "ratio",
        "The relative distance |w_n - w_1| / |w_1| of the trained parameters from those on one device.",
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
        "What the device with the most has allocated: parameters, gradients, optimizer state, activations.",
        lambda p: max(run.memory_bytes for run in p.runs) or None,
        head="memory",
        form="size",
    )
    predicted_memory_bytes = _Column(
        "bytes",
        "The same as it was predicted.",
        lambda p: p.predicted.memory_bytes or None,
        head="predicted memory",
        form="size",
    )
    deadline_lateness = _Column(
        "ratio",
        "Where computation is emulated, how late layers ended (median), relative to the step.",
        lambda p: max((e.lateness_s / p.measured_step_s for e in p.emulations), default=None),
    )
    free_cores = _Column(
        "ratio",
        "Where computation is emulated, the share of the cores' time in which no rank ran.",
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
        "The predicted step minus the one on a network where collectives take no time.",
        lambda p: p.predicted.communication_cost_s,
    )
    runtime = OfSetting(lambda s: s.runtime)
    dpsim_step_s = _Column(
        "s",
        "Beside DDP: the step of dpsim's own runtime with the same plan and emulated computation.",
        lambda p: _other_step_s(p, "dpsim"),
        head="dpsim's runtime (emulated computation) ms",
        form="ms",
    )
    dpsim_exposed_communication_s = _Column(
        "s",
        "Its exposed communication.",
        lambda p: (
            _median(clean_values([p.other_run], "exposed_communication_s"))
            if p.other_run and p.dpsim_step_s is not None
            else None
        ),
    )
    hook_step_s = _Column(
        "s",
        "Beside DDP by gloo: the step with `dpsim.torch.allreduce_hook()`, which is not predicted.",
        lambda p: _other_step_s(p, HOOK),
        head="hook ms",
        form="ms",
    )
    hook_noise = _Column(
        "ratio",
        "The noise of measured_step_s / hook_step_s: the largest of A/A difference and half widths of both intervals.",
        lambda p: max(p.measured_noise, p.other_half_width or 0.0) if p.hook_step_s is not None else None,
    )

    ddp_step_s = _Column(
        "s",
        "Beside FSDP of a script that is written for DDP: the step of DDP, which is not predicted.",
        lambda p: _other_step_s(p, "torch-ddp-gloo"),
        head="DDP ms",
        form="ms",
    )

    share_clean = _Column(
        "ratio",
        "The share of the samples that other processes left undisturbed.",
        lambda p: share_clean(p.runs),
        head="clean",
        form="percent",
    )

    def text(self, name: str) -> str:
        """Return a field of the setting as tables write it, with the values of settings that make the same buckets."""
        return ", ".join(dict.fromkeys(each.text(name) for each in (self.setting, *self.predicted.same_buckets)))

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
