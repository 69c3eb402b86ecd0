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
from dpsim.harness.measurement.environment import environment, stamp
from dpsim.harness.reproduce.difference import StepDump, explained, first_difference, relative
from dpsim.harness.reproduce.task import RunOutcome, Task
from dpsim.kernels.allreduce.registry import versions
from dpsim.launch.jobs import on_ranks
from dpsim.launch.scratch import scratch
from dpsim.lowering import lower
from dpsim.nn.implementations import committed
from dpsim.predict.drift import local_batches, rounding_drift, statistics_drift, unpredictable_drift
from dpsim.progress import Progress
from dpsim.records.reproduce import (
    PREDICTIONS,
    Configuration,
    Difference,
    Divergence,
    DriftInputs,
    DriftPredictions,
    MeasuredDrift,
    PredictedDrift,
    ReproduceRecord,
    Reproduction,
    Run,
    Trajectory,
)
from dpsim.runtime.describe import describe
from dpsim.runtime.micro_batches import plan_partial_sums

T = TypeVar("T")
_Place = tuple[Configuration, int]
"""A configuration and a step, from 1."""
_MOST_A_JOB = 200
"""The most trainings in one job: each takes a few of the about 2000 communicators of an MPI library."""


def measure(reproduction: Reproduction, folder: Path | None, progress: Progress) -> ReproduceRecord:
    """Train and compare all configurations. Predictions of drift are written into ``folder`` before the predicted runs.

    Raises ``ConfigError``, ``NotFiniteError``, ``CommunicationError``.
    """
    with scratch("reproduce") as files:
        trainings = _Trainings(reproduction, files, progress)
        record = _compared(trainings, possible(reproduction), None if folder is None else folder / PREDICTIONS)
        divergences = tuple(_explain(record, trainings))
        return msgspec.structs.replace(record, divergences=divergences, measured_until=stamp())


def measure_drift(
    reproduction: Reproduction, configurations: Sequence[Configuration], predictions: Path, progress: Progress
) -> ReproduceRecord:
    """Train and compare some configurations of a reproduction, one device among them, without explaining differences.

    Predictions of drift are written to the file ``predictions`` before the predicted runs. Raises as ``measure``.
    """
    with scratch("drift") as files:
        return _compared(_Trainings(reproduction, files, progress), configurations, predictions)


def _compared(trainings: _Trainings, configurations: Sequence[Configuration], file: Path | None) -> ReproduceRecord:
    """Train one device first, then write the predictions of drift to ``file``, then train the others."""
    reproduction, measured_from = trainings.reproduction, stamp()
    alone = [configuration for configuration in configurations if configuration.devices == 1]
    others = sorted((c for c in configurations if c.devices > 1), key=lambda configuration: configuration.devices)
    if all(configuration.promised for configuration in configurations):  # nothing to predict
        alone, others = alone + others, []
    trainings.train(alone)
    predictions, sha = _predictions(reproduction, configurations, trainings.drift_inputs), ""
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


def possible(reproduction: Reproduction) -> tuple[Configuration, ...]:
    """Return the configurations that can run.

    Where several algorithms are compared, those are left out that cannot carry a rank's partial sums of the largest
    bucket.
    """
    dataset = load_dataset(reproduction.dataset, reproduction.seed)
    workload = describe(models.load(reproduction.model, dataset.input_shape, dataset.classes).replica(), "model")
    limits = {version.name: version.most_bytes for version in versions("cpu") if version.most_bytes is not None}

    def fits(configuration: Configuration) -> bool:
        if configuration.algorithm not in limits or len(reproduction.algorithms) == 1:
            return True
        plan = reproduction.plan(configuration)
        owners = plan_partial_sums(plan).owners
        largest = int(lower(workload, plan).bucket_size_bytes.max()) * max(map(owners.count, owners))
        return largest <= limits[configuration.algorithm]

    return tuple(filter(fits, reproduction.configurations()))


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

    def train(self, configurations: Sequence[Configuration]) -> None:
        """Train configurations, in jobs of as many ranks as the largest of them needs."""
        for batch in _jobs(configurations):
            files = [None if configuration.promised else self._new_file() for configuration in batch]
            outcomes = self._run(batch, files, ())
            for configuration, outcome, file in zip(batch, outcomes, files, strict=True):
                index = self._index(outcome.trajectory)
                run = Run(configuration=configuration, trajectory=index, ranks_agree=outcome.ranks_agree)
                self.runs.append(run)
                if outcome.drift_inputs is not None:
                    self.drift_inputs.append(outcome.drift_inputs)
                if file is not None:
                    self._measure_drift(configuration, outcome.trajectory, file)

    def dump(self, places: Sequence[_Place]) -> dict[_Place, tuple[Path, tuple[str, ...]]]:
        """Train configurations again up to a step; return the file with the dump of that step, and its digests."""
        dumps: dict[_Place, tuple[Path, tuple[str, ...]]] = {}
        for batch in _jobs(sorted(set(places), key=lambda place: place[0].devices)):
            files = [self._new_file() for _ in batch]
            outcomes = self._run([configuration for configuration, _ in batch], files, [step for _, step in batch])
            for place, file, outcome in zip(batch, files, outcomes, strict=True):
                dumps[place] = file, outcome.trajectory.steps[0]
        return dumps

    def _run(
        self, configurations: Sequence[Configuration], files: Sequence[Path | None], until: Sequence[int]
    ) -> list[RunOutcome]:
        """Run one job."""
        task = Task(
            reproduction=self.reproduction,
            configurations=tuple(configurations),
            files=tuple("" if file is None else str(file) for file in files),
            until=tuple(until),
        )
        verb = "training again" if until else "training"
        outcomes = on_ranks(
            "dpsim.harness.reproduce.on_ranks:train_on_ranks",
            codec.to_builtins(task),
            devices=max(configuration.devices for configuration in configurations),
            pin=True,
            progress=lambda text: self._progress(f"{verb} {text}"),
        )
        return [codec.decode(outcome, RunOutcome, "reproduction") for outcome in outcomes]

    def _new_file(self) -> Path:
        self._files += 1
        return self._scratch / f"{self._files}.npz"

    def _index(self, trajectory: Trajectory) -> int:
        """Return the index of a trajectory, which is kept if it is new."""
        if trajectory not in self.trajectories:
            self.trajectories.append(trajectory)
        return self.trajectories.index(trajectory)

    def _measure_drift(self, configuration: Configuration, trajectory: Trajectory, file: Path) -> None:
        """Measure the drift of a training from its reference, which is the first training of its mode."""
        mode = configuration.batch_norm
        if configuration.devices == 1:
            self._references[mode] = file
            return
        reference = next(run for run in self.runs if run.configuration.batch_norm == mode)
        reference_loss = self.trajectories[reference.trajectory].losses[-1]
        with np.load(self._references[mode]) as expected, np.load(file) as actual:
            parameters, statistics = _distance(expected, actual), _statistics_gap(expected, actual)
        self.drift.append(
            MeasuredDrift(
                configuration=configuration,
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


def _predictions(
    reproduction: Reproduction, configurations: Sequence[Configuration], inputs: Sequence[DriftInputs]
) -> DriftPredictions:
    """Predict the drift of every mode without a promise on every device count, from the run on one device."""
    points, batch = [], reproduction.global_batch
    unpredictable = unpredictable_drift(reproduction.compute_dtype)
    for of_mode in inputs:
        counts = {c.devices for c in configurations if c.batch_norm == of_mode.batch_norm and c.devices > 1}
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
    differing: dict[tuple[int, int], tuple[Configuration, Difference]] = {}
    for run in record.runs:
        reference = record.reference(run.configuration)
        difference = first_difference(record.trajectories[reference], record.trajectories[run.trajectory])
        if difference is not None:
            differing.setdefault((reference, run.trajectory), (run.configuration, difference))
    alone = {c.batch_norm: c for c in (run.configuration for run in record.runs) if c.devices == 1}
    pairs = [
        ((alone[configuration.batch_norm], difference.step), (configuration, difference.step))
        for configuration, difference in differing.values()
    ]
    dumps = trainings.dump([place for pair in pairs for place in pair])
    for (indices, (_, difference)), places in zip(differing.items(), pairs, strict=True):
        trajectories, step = [record.trajectories[index] for index in indices], difference.step - 1
        (reference_file, reference_digests), (other_file, other_digests) = (dumps[place] for place in places)
        repeatable = [reference_digests, other_digests] == [trajectory.steps[step] for trajectory in trajectories]
        losses = trajectories[0].losses[step], trajectories[1].losses[step]
        with np.load(reference_file) as expected, np.load(other_file) as actual:
            difference = explained(difference, losses, dict(expected), dict(actual), repeatable=repeatable)
        yield Divergence(reference=indices[0], trajectory=indices[1], difference=difference)
