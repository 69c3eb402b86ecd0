"""Trains every configuration in few MPI jobs: one device first, then the predictions of drift, then the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from dpsim import codec
from dpsim.data import load_dataset
from dpsim.dates import stamp
from dpsim.dtypes import UNIT_ROUNDOFF
from dpsim.errors import ConfigError
from dpsim.harness.reproduce.difference import StepDump, explained, first_difference, relative
from dpsim.kernels.allreduce.registry import versions
from dpsim.launch.scratch import scratch
from dpsim.lowering import lower
from dpsim.model.drift import local_batches, rounding_drift, statistics_drift, unpredictable_drift
from dpsim.model.version import MODEL_VERSION
from dpsim.nn.implementations import committed
from dpsim.plan import Plan
from dpsim.progress import Progress
from dpsim.records.reproduce import (
    Difference,
    DigestCase,
    Divergence,
    DriftInputs,
    DriftPredictions,
    MeasuredDrift,
    PredictedDrift,
    ReproduceRecord,
    Reproduction,
    Run,
    RunOutcome,
    Trajectory,
    promised,
)
from dpsim.runtime.describe import describe
from dpsim.runtime.micro_batches import plan_partial_sums
from dpsim.strategy import SYNCHRONOUS
from dpsim.study import models
from dpsim.study.cases import run as run_on_ranks
from dpsim.study.environment import environment

_AtStep = tuple[Plan, int]
"""A plan and a step of its training, from 1."""
_MOST_A_JOB = 200
"""The most trainings in one job: each takes a few of the about 2000 communicators of an MPI library."""


def measure(
    reproduction: Reproduction, file: Path | None, progress: Progress, plans: Sequence[Plan] | None = None
) -> ReproduceRecord:
    """Train and compare all plans, and explain where they differ; or compare only ``plans``, one device among them.

    One device is trained first, then the predictions of drift are written to ``file``, then the others are trained.
    Raises ``ConfigError``, ``NotFiniteError``, ``CommunicationError``.
    """
    compared = possible(reproduction) if plans is None else plans
    with scratch("reproduce") as files:
        trainings, measured_from = _Trainings(reproduction, files, progress), stamp()
        every = sorted(compared, key=lambda plan: plan.devices)
        alone = [plan for plan in every if plan.devices == 1 or all(map(promised, every))]  # a promise needs no drift
        trainings.train(alone)
        predictions, sha = _predictions(reproduction, compared, trainings.drift_inputs), ""
        if predictions.points:
            sha = codec.digest(predictions)
            if file is not None:
                codec.write_record(file, predictions)
        trainings.train([plan for plan in every if plan not in alone])
        record = ReproduceRecord(
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
        if plans is None:
            divergences = tuple(_explain(record, trainings))
            record = msgspec.structs.replace(record, divergences=divergences, measured_until=stamp())
        return record


def possible(reproduction: Reproduction) -> tuple[Plan, ...]:
    """Return the plans that can run.

    Where several algorithms are compared, those are left out that cannot carry a rank's partial sums of the largest
    bucket; where all strategies are, those that the model cannot be divided by.
    """
    dataset = load_dataset(reproduction.dataset, reproduction.seed)
    workload = describe(models.load(reproduction.model, dataset.input_shape, dataset.classes).replica(), "model")
    limits = {version.name: version.most_bytes for version in versions("cpu") if version.most_bytes is not None}

    def fits(plan: Plan) -> bool:
        try:
            largest = int(lower(workload, plan).bucket_size_bytes.max())
        except ConfigError:
            if reproduction.strategies != SYNCHRONOUS:
                raise
            return False
        if plan.algorithm not in limits or len(reproduction.algorithms) == 1:
            return True
        owners = plan_partial_sums(plan).owners
        return largest * max(map(owners.count, owners)) <= limits[plan.algorithm]

    return tuple(filter(fits, reproduction.plans()))


class _Trainings:
    def __init__(self, reproduction: Reproduction, scratch: Path, progress: Progress) -> None:
        self.reproduction, self._scratch, self._progress = reproduction, scratch, progress
        self.trajectories: list[Trajectory] = []
        self.runs: list[Run] = []
        self.drift_inputs: list[DriftInputs] = []
        self.drift: list[MeasuredDrift] = []
        self._references: dict[str, Path] = {}

    def train(self, plans: Sequence[Plan]) -> None:
        """Train plans, and measure the drift of those whose bits are not promised."""
        cases = [
            DigestCase(plan=plan, file="" if promised(plan) else str(self._scratch / f"{len(self.runs) + number}.npz"))
            for number, plan in enumerate(plans)
        ]
        for case, outcome in zip(cases, self._run(cases, "training"), strict=True):
            if outcome.trajectory not in self.trajectories:
                self.trajectories.append(outcome.trajectory)
            index = self.trajectories.index(outcome.trajectory)
            self.runs.append(Run(plan=case.plan, trajectory=index, ranks_agree=outcome.ranks_agree))
            if outcome.drift_inputs is not None:
                self.drift_inputs.append(outcome.drift_inputs)
            if case.file:
                self._measure_drift(case.plan, outcome.trajectory, Path(case.file))

    def dump(self, steps: Sequence[_AtStep]) -> dict[_AtStep, tuple[Path, tuple[str, ...]]]:
        """Train plans again up to a step; return the file with the dump of that step, and its digests."""
        cases = [
            DigestCase(plan=plan, file=str(self._scratch / f"dump {number}.npz"), until=step)
            for number, (plan, step) in enumerate(sorted(dict.fromkeys(steps), key=lambda each: each[0].devices))
        ]
        outcomes = self._run(cases, "training again")
        return {
            (case.plan, case.until): (Path(case.file), outcome.trajectory.steps[0])
            for case, outcome in zip(cases, outcomes, strict=True)
        }

    def _run(self, cases: Sequence[DigestCase], verb: str) -> Iterator[RunOutcome]:
        """Run cases, in jobs of as many ranks as the largest of them needs."""
        for first in range(0, len(cases), _MOST_A_JOB):
            job = cases[first : first + _MOST_A_JOB]
            argument = {"reproduction": self.reproduction, "cases": job}
            devices = max(case.plan.devices for case in job)
            outcomes = run_on_ranks(
                "dpsim.study.runners.digest:run", argument, devices, lambda text: self._progress(f"{verb} {text}")
            )
            yield from (codec.decode(outcome, RunOutcome, "reproduction") for outcome in outcomes)

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
    return DriftPredictions(
        reproduction=reproduction,
        predicted_at=stamp(),
        inputs=tuple(inputs),
        points=tuple(points),
        model_version=MODEL_VERSION,
    )


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
