"""The trainings of a study, those that are fitted and those held out: trained once, side by side, saved one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from dpsim import codec
from dpsim.data import load_dataset
from dpsim.errors import FileFormatError
from dpsim.progress import Progress
from dpsim.records.quality import RUN_SCHEMA, RUNS, GapStudy, QualityStudy, StepsStudy, TrainingCase, TrainingRun
from dpsim.study.cases import run_side_by_side

Runs = dict[TrainingCase, TrainingRun]


def cases(study: QualityStudy, *, held_out: bool) -> list[TrainingCase]:
    """Return the trainings to fit, with their references; or those held out, with the ways out. Longest first."""
    every = [case for each in study.gap for case in _gap_cases(each, held_out=held_out)]
    every += [
        case
        for each in study.steps_to_target
        for batch in (each.held_out if held_out else each.fitted)
        for case in steps_cases(each, batch)
    ]
    return sorted(dict.fromkeys(every), key=lambda case: -case.steps)


def _gap_cases(study: GapStudy, *, held_out: bool) -> Iterator[TrainingCase]:
    for batch in study.held_out if held_out else (*study.fitted, None):
        yield from gap_cases(study, batch)
    for model in study.others if held_out else ():
        yield from gap_cases(study, None, model)


def gap_cases(study: GapStudy, local_batch: int | None, model: str | None = None) -> list[TrainingCase]:
    """Return a training for each seed at a local batch; ``None``: with the statistics of the global batch."""
    steps_per_epoch = -(-len(load_dataset(study.dataset).train_y) // study.global_batch)
    return [
        study.case(
            model=model or study.model,
            local_batch=local_batch or study.global_batch,
            batch_norm="global" if local_batch is None else "leaf",
            seed=seed,
            steps=study.epochs * steps_per_epoch,
        )
        for seed in range(study.seeds)
    ]


def steps_cases(study: StepsStudy, global_batch: int) -> list[TrainingCase]:
    """Return a training to the target for each seed, at the rate of the linear rule."""
    return [
        study.case(
            global_batch=global_batch,
            local_batch=global_batch,
            batch_norm="global",
            learning_rate=study.learning_rate * global_batch / study.reference_batch,
            seed=seed,
            steps=-(-study.most_samples // global_batch),
        )
        for seed in range(study.seeds)
    ]


def path_of(folder: Path, case: TrainingCase) -> Path:
    """Return the file of a case's run."""
    return folder / RUNS / f"{codec.digest(case)[:20]}.json"


def run_all(cases: Sequence[TrainingCase], folder: Path, progress: Progress) -> Runs:
    """Return the runs of the cases: those in the folder are read, the others trained and saved there one by one.

    Raises ``FileFormatError`` for a damaged run, and what a training raises; runs that are finished stay.
    """
    missing = [case for case in cases if not path_of(folder, case).exists()]
    if missing:
        progress(f"{len(missing)} trainings to do, {len(cases) - len(missing)} finished before")
        files = [str(path_of(folder.resolve(), case)) for case in missing]
        run_side_by_side("dpsim.study.runners.fit:trainings", missing, progress, files=files)
    return {case: _read(path_of(folder, case), case) for case in cases}


def _read(path: Path, case: TrainingCase) -> TrainingRun:
    run = codec.read(path, TrainingRun, "training run", RUN_SCHEMA)
    if run.case != case:
        raise FileFormatError(
            f"{path} is not the run that its name says",
            allowed="the file as dpsim wrote it",
            remedy="remove it, and it is trained again",
        )
    return run
