"""A sweep as a job array: a task measures each of its parts, and a last job joins them, compares and reports.

The folder of the sweep has ``array.json``, by which a task knows that it sees the folder of the command that submitted
it, ``array.sh``, which submits the jobs, and ``tasks/NUMBER``, where each task keeps its predictions and samples as an
interrupted sweep does. So a task that was killed goes on where it stopped.
"""

from __future__ import annotations

import functools
import socket
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import ConfigError
from dpsim.folder_lock import locked
from dpsim.harness.sweep.parts import joined_predictions, parts_of
from dpsim.harness.sweep.sweep import ARRAY, Study, check_same_machine, existing_predictions
from dpsim.launch.job_array import SCRIPT, JobArray
from dpsim.launch.job_script import program_of, refused
from dpsim.progress import Progress, no_progress
from dpsim.records.sweep import Environment, Experiment, Predictions, read_predictions
from dpsim.study.inputs import seconds_of_kind
from dpsim.study.task import Samples, samples_before

SCHEMA = "dpsim.array/1"


class Array(Noun, frozen=True):
    """The sweep that an array measures; ``id`` tells its folder from another one with the same path."""

    id: str
    experiment: Experiment
    schema: str = SCHEMA


@dataclass(frozen=True, kw_only=True)
class _TaskStudy(Study):
    """The study of a part of a sweep, which is profiled and calibrated for as long as the whole sweep would be."""

    whole: Experiment

    @property
    def preparing_s(self) -> float:
        return seconds_of_kind(self.whole.budget_s)

    def measure(self, folder: Path, progress: Progress) -> None:
        """Predict and measure into ``folder``, or go on there where a task was interrupted."""
        with locked(folder):
            predictions = self.existing(folder)
            if predictions is not None and _all_samples(folder, predictions) is not None:
                progress(f"{folder} holds all samples of this task already; nothing is measured again")
                return
            (samples,) = self.samples(predictions, self.environment(folder), folder, progress)
            codec.write(folder / "samples.json", msgspec.structs.replace(samples, complete=True))


@dataclass(frozen=True, kw_only=True)
class ArrayStudy(Study):
    """The study of a sweep whose samples are those of its tasks."""

    @classmethod
    def submitted(cls, folder: Path, array_id: str) -> ArrayStudy:
        """Return the study that a job of the array belongs to. Raises ``ConfigError`` where its folder is not here."""
        path = folder / ARRAY
        array = codec.read(path, Array, "array", SCHEMA) if path.exists() else None
        if array is None or array.id != array_id:
            raise ConfigError(
                f"the folder {folder} on the node {socket.gethostname()} is not the one that the array was submitted "
                f"with: it has {'no' if array is None else 'another'} {ARRAY}",
                allowed="a folder that all nodes share",
                remedy="give the command again with --output in a shared folder; what was measured stays where it is",
            )
        return cls.of(array.experiment)

    def existing(self, folder: Path) -> Predictions | None:
        """Return the predictions that the folder holds, if any. Raises ``ConfigError`` for another experiment."""
        path = folder / ARRAY
        if not path.exists():
            if existing_predictions(folder, self.experiment) is not None:
                raise ConfigError(
                    f"the folder {folder} holds this sweep, begun without --array",
                    allowed="a new or empty folder, or one of the same array",
                    remedy="leave --array out to finish it, or choose another folder with --output",
                )
            return None
        if codec.read(path, Array, "array", SCHEMA).experiment != self.experiment:
            raise ConfigError(
                f"the folder {folder} holds the array of another experiment",
                allowed="a new folder, or the same experiment",
                remedy="choose another folder with --output; nothing in this one was changed",
            )
        return read_predictions(path) if (path := folder / "predictions.json").exists() else None

    def environment(self, folder: Path) -> Environment:
        """Return where the tasks take the samples: where the first one did."""
        path = _task(folder, 0) / "predictions.json"
        return read_predictions(path).environment if path.exists() else super().environment(folder)

    def samples(
        self, predictions: Predictions | None, current: Environment, folder: Path, progress: Progress
    ) -> list[Samples]:
        """Return the samples of all tasks, whose predictions are written as those of the sweep.

        Raises ``ConfigError`` where some are missing.
        """
        tasks = [*self._tasks(folder)]
        if missing := [number for number, each in enumerate(tasks) if each is None]:
            texts = "; ".join(f"task {number}: {_last_line(folder, number)}" for number in missing[:4])
            raise ConfigError(
                f"{len(missing)} of {len(tasks)} tasks of {folder} have not taken all their samples ({texts}"
                f"{'; ...' if len(missing) > 4 else ''})",
                allowed="samples of all tasks",
                remedy="give the command of the sweep again: it submits these tasks, and they go on where they stopped",
            )
        measured = [each for each in tasks if each is not None]
        for number, (of_task, _) in enumerate(measured):
            check_same_machine(of_task, current, _task(folder, number))
        joined = joined_predictions(self.experiment, [each for each, _ in measured])
        codec.write_record(folder / "predictions.json", joined)
        return [each for _, each in measured]

    @functools.cached_property
    def parts(self) -> tuple[Experiment, ...]:
        """What each task measures."""
        return parts_of(self.experiment)

    def missing(self, folder: Path) -> list[int]:
        """Return the numbers of the tasks that have not taken all their samples."""
        return [number for number, each in enumerate(self._tasks(folder)) if each is None]

    def measure_task(self, number: int, folder: Path, progress: Progress) -> None:
        """Measure one part of the sweep into its folder, or go on there. Raises ``ConfigError``.

        It is refused on another kind of machine than that of a task that began before.
        """
        if number >= len(self.parts):  # PBS has no array of one task
            progress(f"task {number} has nothing to measure: the sweep has {len(self.parts)} parts")
            return
        study = _TaskStudy(experiment=self.parts[number], whole=self.experiment)
        own = _task(folder, number)
        others = (path for path in sorted((folder / "tasks").glob("*/predictions.json")) if path.parent != own)
        if (other := next(others, None)) is not None:
            check_same_machine(read_predictions(other), study.environment(own), other.parent)
        study.measure(own, progress)

    def _tasks(self, folder: Path) -> Iterator[tuple[Predictions, Samples] | None]:
        """Yield what each task predicted and measured, ``None`` for one that has not taken all its samples."""
        for number, part in enumerate(self.parts):
            of_task = _task(folder, number)
            predictions = existing_predictions(of_task, part)
            samples = None if predictions is None else _all_samples(of_task, predictions)
            yield None if predictions is None or samples is None else (predictions, samples)


def _all_samples(folder: Path, predictions: Predictions) -> Samples | None:
    """Return the samples of a task if it has taken all of them."""
    path = folder / "samples.json"
    samples = samples_before(path, predictions, no_progress) if path.exists() else None
    return samples if samples is not None and samples.complete else None


def _task(folder: Path, number: int) -> Path:
    return folder / "tasks" / str(number)


def _last_line(folder: Path, number: int) -> str:
    """Return the last line that a task printed, for a message."""
    path = folder / "tasks" / f"{number}.out"
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
    return next((" ".join(line.split()) for line in reversed(lines) if line.strip()), "it printed nothing")


def job_array(token: str, experiment: Experiment) -> JobArray:
    """Return what is asked of the scheduler that ``token`` names. Raises ``ConfigError`` for settings of several nodes.

    A task has a core for each device that computes, and at least two.
    """
    if layouts := {layout for each in experiment.settings if (layout := each.plan.layout).nodes > 1}:
        raise ConfigError(
            f"settings of several nodes (devices {', '.join(sorted(layouts))}) in an array",
            allowed="settings of one node: a task of an array runs on one",
            remedy="measure them in one job: dpsim launch slurm --devices NODESxDEVICES -- sweep ...",
        )
    real = [each.plan.devices for each in experiment.settings if not each.emulated_compute]
    return JobArray.parse(token, experiment.name, max([2, *real]))


def submit(study: ArrayStudy, jobs: JobArray, folder: Path, words: Sequence[str] = ()) -> tuple[list[int], list[str]]:
    """Submit the tasks that are missing, and the last job; returns the numbers of the tasks and the ids of both jobs.

    Raises ``CommunicationError`` where there is no scheduler or it refuses them.
    """
    program = program_of(jobs.job.scheduler)
    with locked(folder):
        study.existing(folder)
        path = folder / ARRAY
        array_id = codec.read(path, Array, "array", SCHEMA).id if path.exists() else uuid.uuid4().hex[:12]
        numbers = study.missing(folder)
        (folder / "tasks").mkdir(exist_ok=True)
        if not path.exists():
            codec.write(path, Array(id=array_id, experiment=study.experiment))
        script = folder / SCRIPT
        codec.write_text(script, jobs.script(folder, array_id, numbers or [0], words))
        done = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise refused(program, done)
    return numbers, done.stdout.split()
