"""Trains every combination in few MPI jobs: one device first, then predictions of drift, then the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from dpsim import codec, models
from dpsim.data import load_dataset
from dpsim.harness.measurement.environment import environment, stamp
from dpsim.harness.reproduce.difference import StepDump, explained, first_difference, relative
from dpsim.harness.reproduce.task import RunOutcome, Task
from dpsim.kernels.allreduce.registry import versions
from dpsim.launch.jobs import on_ranks
from dpsim.launch.scratch import scratch
from dpsim.lowering.data_parallel import lower
from dpsim.nn.kernel_table import committed
from dpsim.predict.drift import local_batches, rounding_drift, statistics_drift
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
from dpsim.wire_dtype import UNITS

Progress = Callable[[str], None]
T = TypeVar("T")
_Place = tuple[Configuration, int]
"""A configuration and a step, from 1."""
_MOST_A_JOB = 200
"""Trainings of one job: MPI libraries have some 2000 communicators, of which each takes a few."""


def measure(reproduction: Reproduction, folder: Path | None, progress: Progress) -> ReproduceRecord:
    """Everything trained and compared. Predictions of drift are written into ``folder`` before what they predict runs.

    Raises ``ConfigError``, ``NotFiniteError``, ``CommunicationError``.
    """
    with scratch("reproduce") as states:
        work = _Work(reproduction, states, progress)
        record = _compared(work, possible(reproduction), None if folder is None else folder / PREDICTIONS)
        return msgspec.structs.replace(record, found=tuple(_explain(record, work)), measured_until=stamp())


def measure_drift(
    reproduction: Reproduction, configurations: Sequence[Configuration], predictions: Path, progress: Progress
) -> ReproduceRecord:
    """Some of a reproduction's configurations (one device among them) trained and compared, not looked into.

    Predictions of drift are written as the file ``predictions`` before what they predict runs. Raises as ``measure``.
    """
    with scratch("drift") as states:
        return _compared(_Work(reproduction, states, progress), configurations, predictions)


def _compared(work: _Work, configurations: Sequence[Configuration], file: Path | None) -> ReproduceRecord:
    """One device first, then the predictions of drift into ``file``, then the others."""
    reproduction, measured_from = work.reproduction, stamp()
    alone = [one for one in configurations if one.devices == 1]
    others = sorted((one for one in configurations if one.devices > 1), key=lambda one: one.devices)
    if all(one.promised for one in configurations):  # nothing to predict
        alone, others = alone + others, []
    work.train(alone)
    predictions, sha = _predictions(reproduction, configurations, work.basis), ""
    if predictions.points:
        sha = codec.digest(predictions)
        if file is not None:
            codec.write(file, predictions)
    work.train(others)
    return ReproduceRecord(
        reproduction=reproduction,
        environment=environment(),
        measured_from=measured_from,
        measured_until=stamp(),
        trajectories=tuple(work.trajectories),
        runs=tuple(work.runs),
        predictions=predictions if predictions.points else None,
        predictions_sha256=sha,
        drift=tuple(work.drift),
        kernel_table=committed().digest,
    )


def possible(reproduction: Reproduction) -> tuple[Configuration, ...]:
    """The combinations but, of several algorithms, those that cannot carry a rank's slots of the largest bucket."""
    dataset = load_dataset(reproduction.dataset, reproduction.seed)
    workload = describe(models.load(reproduction.model, dataset.input_shape, dataset.classes).replica(), "model")
    limits = {version.name: version.most_bytes for version in versions("cpu") if version.most_bytes is not None}

    def fits(one: Configuration) -> bool:
        if one.algorithm not in limits or len(reproduction.algorithms) == 1:
            return True
        plan = reproduction.plan(one)
        owners = plan_partial_sums(plan).owners
        largest = int(lower(workload, plan).bucket_size_bytes.max()) * max(map(owners.count, owners))
        return largest <= limits[one.algorithm]

    return tuple(one for one in reproduction.configurations() if fits(one))


class _Work:
    """What was trained so far."""

    def __init__(self, reproduction: Reproduction, scratch: Path, progress: Progress) -> None:
        self.reproduction, self._scratch, self._progress = reproduction, scratch, progress
        self.trajectories: list[Trajectory] = []
        self.runs: list[Run] = []
        self.basis: list[DriftInputs] = []
        self.drift: list[MeasuredDrift] = []
        self._references: dict[str, Path] = {}
        self._files = 0

    def train(self, configurations: Sequence[Configuration]) -> None:
        """Train in jobs of as many ranks as any configuration needs."""
        for some in _jobs(configurations):
            files = [None if one.promised else self._file() for one in some]
            for one, ran, file in zip(some, self.run(some, files, ()), files, strict=True):
                self.runs.append(
                    Run(configuration=one, trajectory=self._number(ran.trajectory), ranks_agree=ran.ranks_agree)
                )
                if ran.basis is not None:
                    self.basis.append(ran.basis)
                if file is not None:
                    self._drifted(one, ran.trajectory, file)

    def run(
        self, configurations: Sequence[Configuration], files: Sequence[Path | None], until: Sequence[int]
    ) -> list[RunOutcome]:
        """One job."""
        task = Task(
            reproduction=self.reproduction,
            configurations=tuple(configurations),
            files=tuple("" if file is None else str(file) for file in files),
            until=tuple(until),
        )
        what = "looking into" if until else "training"
        found = on_ranks(
            "dpsim.harness.reproduce.on_ranks:train_on_ranks",
            codec.to_builtins(task),
            devices=max(one.devices for one in configurations),
            pin=True,
            progress=lambda text: self._progress(f"{what} {text}"),
        )
        return [codec.decode(one, RunOutcome, "reproduction") for one in found]

    def look(self, wanted: Sequence[_Place]) -> dict[_Place, tuple[Path, tuple[str, ...]]]:
        """What each configuration did in a step, trained up to it once more: a file, and digests as in a trajectory."""
        found: dict[_Place, tuple[Path, tuple[str, ...]]] = {}
        for pairs in _jobs(sorted(set(wanted), key=lambda pair: pair[0].devices)):
            files = [self._file() for _ in pairs]
            ran = self.run([one for one, _ in pairs], files, [step for _, step in pairs])
            found |= {
                place: (file, one.trajectory.steps[0]) for place, file, one in zip(pairs, files, ran, strict=True)
            }
        return found

    def _file(self) -> Path:
        self._files += 1
        return self._scratch / f"{self._files}.npz"

    def _number(self, trajectory: Trajectory) -> int:
        if trajectory not in self.trajectories:
            self.trajectories.append(trajectory)
        return self.trajectories.index(trajectory)

    def _drifted(self, one: Configuration, trajectory: Trajectory, file: Path) -> None:
        """Measure the drift of a training from its reference, which is the first one of its mode."""
        if one.devices == 1:
            self._references[one.batch_norm] = file
            return
        reference = next(run for run in self.runs if run.configuration.batch_norm == one.batch_norm)
        loss = self.trajectories[reference.trajectory].losses[-1]
        with np.load(self._references[one.batch_norm]) as before, np.load(file) as after:
            parameters, statistics = _distance(before, after), _statistics(before, after)
        self.drift.append(
            MeasuredDrift(
                configuration=one,
                parameters=parameters,
                loss=relative(loss, trajectory.losses[-1]),
                statistics=statistics if one.batch_norm == "local" else None,
            )
        )
        file.unlink()


def _jobs(everything: Sequence[T]) -> Iterator[Sequence[T]]:
    for first in range(0, len(everything), _MOST_A_JOB):
        yield everything[first : first + _MOST_A_JOB]


def _distance(before: StepDump, after: StepDump) -> float:
    """|w_n - w_1| / |w_1| over all parameters."""
    names = [name for name in before if name.startswith("parameters/")]
    moved = sum(float(np.square(after[n].astype(np.float64) - before[n]).sum()) for n in names)
    size = sum(float(np.square(before[n].astype(np.float64)).sum()) for n in names)
    return float(np.sqrt(moved / size)) if size else 0.0


def _statistics(before: StepDump, after: StepDump) -> float | None:
    """Root mean square, over batches, ranks and channels, of the gap of means in deviations of a sample."""
    if "means" not in after:
        return None
    varying = before["deviation"] > 0
    gaps = (after["means"] - before["means"])[..., varying] / before["deviation"][varying]
    return float(np.sqrt(np.square(gaps).mean())) if gaps.size else None


def _predictions(
    reproduction: Reproduction, configurations: Sequence[Configuration], basis: Sequence[DriftInputs]
) -> DriftPredictions:
    """The drift of every mode that is not invariant, on every device count, from the run on one device."""
    points, batch = [], reproduction.global_batch
    for one in basis:
        counts = {c.devices for c in configurations if c.batch_norm == one.batch_norm and c.devices > 1}
        for devices in sorted(counts):
            local = one.batch_norm == "local" and one.normalises
            rounding = rounding_drift(
                spacing_updates=one.spacing_updates,
                squared_updates=one.squared_updates,
                unit=one.unit,
                parameter_rms=one.parameter_rms,
                global_batch=batch,
                devices=devices,
                wire_unit=UNITS.get(reproduction.wire_dtype or "", 0.0),
            )
            points.append(
                PredictedDrift(
                    batch_norm=one.batch_norm,
                    devices=devices,
                    parameters=None if local else rounding,
                    statistics=statistics_drift(local_batches(batch, devices), batch) if local else None,
                )
            )
    return DriftPredictions(reproduction=reproduction, predicted_at=stamp(), basis=tuple(basis), points=tuple(points))


def _explain(record: ReproduceRecord, work: _Work) -> Iterator[Divergence]:
    """Every trajectory that is not its reference: where it leaves it, and why, from both trained up to that step."""
    differing: dict[tuple[int, int], tuple[Run, Difference]] = {}
    for run in record.runs:
        reference = record.reference(run.configuration)
        where = first_difference(record.trajectories[reference], record.trajectories[run.trajectory])
        if where is not None:
            differing.setdefault((reference, run.trajectory), (run, where))
    firsts = {one.batch_norm: one for one in (run.configuration for run in record.runs) if one.devices == 1}
    pairs = [
        ((firsts[run.configuration.batch_norm], where.step), (run.configuration, where.step))
        for run, where in differing.values()
    ]
    looked = work.look([place for pair in pairs for place in pair])
    for (numbers, (_, where)), pair in zip(differing.items(), pairs, strict=True):
        both = [record.trajectories[number] for number in numbers]
        (before_file, before_steps), (after_file, after_steps) = (looked[place] for place in pair)
        again = [before_steps, after_steps] == [one.steps[where.step - 1] for one in both]
        losses = both[0].losses[where.step - 1], both[1].losses[where.step - 1]
        with np.load(before_file) as before, np.load(after_file) as after:
            found = explained(where, losses, dict(before), dict(after), again=again)
        yield Divergence(reference=numbers[0], trajectory=numbers[1], difference=found)
