"""Trains every configuration in few MPI jobs: one device first, then the predictions of drift, then the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from dpsim import codec
from dpsim.data import load_dataset
from dpsim.dtypes import UNIT_ROUNDOFF
from dpsim.harness import models
from dpsim.harness.reproduce.difference import StepDump, explained, first_difference, relative
from dpsim.kernels.allreduce.registry import versions
from dpsim.launch.jobs import on_ranks
from dpsim.launch.scratch import scratch
from dpsim.lowering import lower
from dpsim.nn.implementations import committed
from dpsim.plan import Plan
from dpsim.predict.drift import local_batches, rounding_drift, statistics_drift, unpredictable_drift
from dpsim.progress import Progress
from dpsim.records.reproduce import (
    PREDICTIONS,
    Difference,
    Divergence,
    DriftInputs,
    DriftPredictions,
    MeasuredDrift,
    PredictedDrift,
    ReproduceRecord,
    Reproduction,
    Run,
    RunOutcome,
    Task,
    Trajectory,
    promised,
)
from dpsim.runtime.describe import describe
from dpsim.runtime.micro_batches import plan_partial_sums
from dpsim.study.environment import environment, stamp

T = TypeVar("T")
_AtStep = tuple[Plan, int]
"""A plan and a step of its training, from 1."""
_MOST_A_JOB = 200
"""The most trainings in one job: each takes a few of the about 2000 communicators of an MPI library."""


def measure(reproduction: Reproduction, folder: Path | None, progress: Progress) -> ReproduceRecord:
    """Train and compare all plans. Predictions of drift are written into ``folder`` before the predicted runs.

    Raises ``ConfigError``, ``NotFiniteError``, ``CommunicationError``.
    """
    with scratch("reproduce") as files:
        trainings = _Trainings(reproduction, files, progress)
        record = _compared(trainings, possible(reproduction), None if folder is None else folder / PREDICTIONS)
        divergences = tuple(_explain(record, trainings))
        return msgspec.structs.replace(record, divergences=divergences, measured_until=stamp())


def measure_drift(
    reproduction: Reproduction, plans: Sequence[Plan], predictions: Path, progress: Progress
) -> ReproduceRecord:
    """Train and compare some plans of a reproduction, one device among them, without explaining differences.

    Predictions of drift are written to the file ``predictions`` before the predicted runs. Raises as ``measure``.
    """
    with scratch("drift") as files:
        return _compared(_Trainings(reproduction, files, progress), plans, predictions)


def _compared(trainings: _Trainings, plans: Sequence[Plan], file: Path | None) -> ReproduceRecord:
    """Train one device first, then write the predictions of drift to ``file``, then train the others."""
    reproduction, measured_from = trainings.reproduction, stamp()
    alone = [plan for plan in plans if plan.devices == 1]
    others = sorted((plan for plan in plans if plan.devices > 1), key=lambda plan: plan.devices)
    if all(map(promised, plans)):  # nothing to predict
        alone, others = alone + others, []
    trainings.train(alone)
    predictions, sha = _predictions(reproduction, plans, trainings.drift_inputs), ""
    if predictions.points:
        sha = codec.digest(predictions)
        if file is not None:
            codec.write(file, predictions)
    trainings.train(others)
    return ReproduceRecord(
        reproduction=reproduction,
        environment=environment(),
        measured_from=measured_from,
        measured_until=stamp(),
        trajectories=tuple(trainings.trajectories),
        runs=tuple(trainings.runs),
        predictions=predictions if predictions.points else None,
        predictions_sha256=sha,
        drift=tuple(trainings.drift),
        kernel_table=committed().digest,
    )


def possible(reproduction: Reproduction) -> tuple[Plan, ...]:
    """Return the plans that can run.

    Where several algorithms are compared, those are left out that cannot carry a rank's partial sums of the largest
    bucket.
    """
    dataset = load_dataset(reproduction.dataset, reproduction.seed)
    workload = describe(models.load(reproduction.model, dataset.input_shape, dataset.classes).replica(), "model")
    limits = {version.name: version.most_bytes for version in versions("cpu") if version.most_bytes is not None}

    def fits(plan: Plan) -> bool:
        if plan.algorithm not in limits or len(reproduction.algorithms) == 1:
            return True
        owners = plan_partial_sums(plan).owners
        largest = int(lower(workload, plan).bucket_size_bytes.max()) * max(map(owners.count, owners))
        return largest <= limits[plan.algorithm]

    return tuple(filter(fits, reproduction.plans()))


class _Trainings:
    """The trainings of a reproduction so far, and the jobs that run more of them."""

    def __init__(self, reproduction: Reproduction, scratch: Path, progress: Progress) -> None:
        self.reproduction, self._scratch, self._progress = reproduction, scratch, progress
        self.trajectories: list[Trajectory] = []
        self.runs: list[Run] = []
        self.drift_inputs: list[DriftInputs] = []
        self.drift: list[MeasuredDrift] = []
        self._references: dict[str, Path] = {}
        self._files = 0

    def train(self, plans: Sequence[Plan]) -> None:
        """Train plans, in jobs of as many ranks as the largest of them needs."""
        for batch in _jobs(plans):
            files = [None if promised(plan) else self._new_file() for plan in batch]
            for plan, outcome, file in zip(batch, self._run(batch, files, ()), files, strict=True):
                if outcome.trajectory not in self.trajectories:
                    self.trajectories.append(outcome.trajectory)
                index = self.trajectories.index(outcome.trajectory)
                self.runs.append(Run(plan=plan, trajectory=index, ranks_agree=outcome.ranks_agree))
                if outcome.drift_inputs is not None:
                    self.drift_inputs.append(outcome.drift_inputs)
                if file is not None:
                    self._measure_drift(plan, outcome.trajectory, file)

    def dump(self, steps: Sequence[_AtStep]) -> dict[_AtStep, tuple[Path, tuple[str, ...]]]:
        """Train plans again up to a step; return the file with the dump of that step, and its digests."""
        dumps: dict[_AtStep, tuple[Path, tuple[str, ...]]] = {}
        for batch in _jobs(sorted(dict.fromkeys(steps), key=lambda each: each[0].devices)):
            files = [self._new_file() for _ in batch]
            outcomes = self._run([plan for plan, _ in batch], files, [step for _, step in batch])
            for each, file, outcome in zip(batch, files, outcomes, strict=True):
                dumps[each] = file, outcome.trajectory.steps[0]
        return dumps

    def _run(self, plans: Sequence[Plan], files: Sequence[Path | None], until: Sequence[int]) -> list[RunOutcome]:
        """Run one job."""
        task = Task(
            reproduction=self.reproduction,
            plans=tuple(plans),
            files=tuple("" if file is None else str(file) for file in files),
            until=tuple(until),
        )
        verb = "training again" if until else "training"
        outcomes = on_ranks(
            "dpsim.harness.reproduce.on_ranks:train_on_ranks",
            codec.to_builtins(task),
            devices=max(plan.devices for plan in plans),
            pin=True,
            progress=lambda text: self._progress(f"{verb} {text}"),
        )
        return [codec.decode(outcome, RunOutcome, "reproduction") for outcome in outcomes]

    def _new_file(self) -> Path:
        self._files += 1
        return self._scratch / f"{self._files}.npz"

    def _measure_drift(self, plan: Plan, trajectory: Trajectory, file: Path) -> None:
        """Measure the drift of a training from its reference, which is the first training of its mode."""
        mode = plan.batch_norm
        if plan.devices == 1:
            self._references[mode] = file
            return
        reference = next(run for run in self.runs if run.plan.batch_norm == mode)
        reference_loss = self.trajectories[reference.trajectory].losses[-1]
        with np.load(self._references[mode]) as expected, np.load(file) as actual:
            parameters, statistics = _distance(expected, actual), _statistics_gap(expected, actual)
        self.drift.append(
            MeasuredDrift(
                plan=plan,
                parameters=parameters,
                loss=relative(reference_loss, trajectory.losses[-1]),
                statistics=statistics if mode == "local" else None,
            )
        )
        file.unlink()


def _jobs(trainings: Sequence[T]) -> Iterator[Sequence[T]]:
    for first in range(0, len(trainings), _MOST_A_JOB):
        yield trainings[first : first + _MOST_A_JOB]


def _distance(expected: StepDump, actual: StepDump) -> float:
    """Return |w_n - w_1| / |w_1| over all parameters."""
    names = [name for name in expected if name.startswith("parameters/")]
    moved = sum(float(np.square(actual[n].astype(np.float64) - expected[n]).sum()) for n in names)
    size = sum(float(np.square(expected[n].astype(np.float64)).sum()) for n in names)
    return float(np.sqrt(moved / size)) if size else 0.0


def _statistics_gap(expected: StepDump, actual: StepDump) -> float | None:
    """Return the root mean square of the difference of means, in standard deviations of a sample.

    The mean is over batches, ranks and channels.
    """
    if "means" not in actual:
        return None
    varying = expected["deviation"] > 0
    gaps = (actual["means"] - expected["means"])[..., varying] / expected["deviation"][varying]
    return float(np.sqrt(np.square(gaps).mean())) if gaps.size else None


def _predictions(reproduction: Reproduction, plans: Sequence[Plan], inputs: Sequence[DriftInputs]) -> DriftPredictions:
    """Predict the drift of every mode without a promise on every device count, from the run on one device."""
    points, batch = [], reproduction.global_batch
    unpredictable = unpredictable_drift(reproduction.compute_dtype)
    for of_mode in inputs:
        counts = {plan.devices for plan in plans if plan.batch_norm == of_mode.batch_norm and plan.devices > 1}
        local = of_mode.batch_norm == "local" and of_mode.normalises
        for devices in sorted(counts):
            rounding = rounding_drift(
                spacing_updates=of_mode.spacing_updates,
                squared_updates=of_mode.squared_updates,
                unit=of_mode.unit,
                parameter_rms=of_mode.parameter_rms,
                global_batch=batch,
                devices=devices,
                wire_unit=UNIT_ROUNDOFF.get(reproduction.wire_dtype or "", 0.0),
            )
            points.append(
                PredictedDrift(
                    batch_norm=of_mode.batch_norm,
                    devices=devices,
                    parameters=None if local or unpredictable else rounding,
                    statistics=statistics_drift(local_batches(batch, devices), batch) if local else None,
                    reason="" if local else unpredictable,
                )
            )
    return DriftPredictions(reproduction=reproduction, predicted_at=stamp(), inputs=tuple(inputs), points=tuple(points))


def _explain(record: ReproduceRecord, trainings: _Trainings) -> Iterator[Divergence]:
    """Yield every trajectory that differs from its reference, with where and why.

    Both are trained again up to the first step that differs.
    """
    differing: dict[tuple[int, int], tuple[Plan, Difference]] = {}
    for run in record.runs:
        reference = record.reference(run.plan)
        difference = first_difference(record.trajectories[reference], record.trajectories[run.trajectory])
        if difference is not None:
            differing.setdefault((reference, run.trajectory), (run.plan, difference))
    alone = {plan.batch_norm: plan for plan in (run.plan for run in record.runs) if plan.devices == 1}
    pairs = [
        ((alone[plan.batch_norm], difference.step), (plan, difference.step)) for plan, difference in differing.values()
    ]
    dumps = trainings.dump([each for pair in pairs for each in pair])
    for (indices, (_, difference)), pair in zip(differing.items(), pairs, strict=True):
        trajectories, step = [record.trajectories[index] for index in indices], difference.step - 1
        (reference_file, reference_digests), (other_file, other_digests) = (dumps[each] for each in pair)
        repeatable = [reference_digests, other_digests] == [trajectory.steps[step] for trajectory in trajectories]
        losses = trajectories[0].losses[step], trajectories[1].losses[step]
        with np.load(reference_file) as expected, np.load(other_file) as actual:
            difference = explained(difference, losses, dict(expected), dict(actual), repeatable=repeatable)
        yield Divergence(reference=indices[0], trajectory=indices[1], difference=difference)
