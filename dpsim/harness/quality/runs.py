"""The runs of a study: saved one by one, trained once, two side by side where there are two cores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpsim import codec
from dpsim.errors import FileFormatError
from dpsim.harness.measurement.environment import cores
from dpsim.launch.jobs import on_ranks
from dpsim.progress import Progress
from dpsim.records.quality import RUN_SCHEMA, RUNS, TrainingCase, TrainingRun

Runs = dict[TrainingCase, TrainingRun]


def path_of(folder: Path, case: TrainingCase) -> Path:
    """The file of a case's run."""
    return folder / RUNS / f"{codec.digest(case)[:20]}.json"


def run_all(cases: Sequence[TrainingCase], folder: Path, progress: Progress) -> Runs:
    """The runs of the cases: those in the folder are read, the others trained and saved there one by one.

    Raises ``FileFormatError`` for a damaged run, and what a training raises; runs that are finished stay.
    """
    missing = [case for case in cases if not path_of(folder, case).exists()]
    if missing:
        progress(f"{len(missing)} trainings to do, {len(cases) - len(missing)} finished before")
        argument = {"cases": codec.to_builtins(missing), "folder": str(folder.resolve())}
        on_workers("train_cases", argument, len(missing), progress)
    return {case: _read(path_of(folder, case), case) for case in cases}


def on_workers(task: str, argument: dict[str, Any], most: int, progress: Progress) -> Any:
    """Rank 0's result of a task of ``on_ranks``, on two ranks of this machine or fewer, each on a core of its own."""
    return on_ranks(
        f"dpsim.harness.quality.on_ranks:{task}",
        argument,
        devices=max(1, min(2, cores(), most)),
        progress=progress,
        pin=True,
    )


def _read(path: Path, case: TrainingCase) -> TrainingRun:
    run = codec.read(path, TrainingRun, "training run", RUN_SCHEMA)
    if run.case != case:
        raise FileFormatError(
            f"{path} is not the run that its name says",
            allowed="the file as dpsim wrote it",
            remedy="remove it, and it is trained again",
        )
    return run
