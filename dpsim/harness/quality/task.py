"""Which trainings a study needs: those that are fitted, and those that are held out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dpsim.data import load_dataset
from dpsim.records.quality import GapStudy, QualityStudy, StepsStudy, TrainingCase


def cases(study: QualityStudy, *, held_out: bool) -> list[TrainingCase]:
    """The trainings to fit, with their references; or those that are held out, with the ways out. Longest first."""
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
    """A training for each seed at a local batch; ``None``: with the statistics of the global batch."""
    steps_per_epoch = -(-len(load_dataset(study.dataset).train_y) // study.global_batch)
    return [
        TrainingCase(
            model=model or study.model,
            dataset=study.dataset,
            global_batch=study.global_batch,
            local_batch=local_batch or study.global_batch,
            batch_norm="global" if local_batch is None else "leaf",
            learning_rate=study.learning_rate,
            momentum=study.momentum,
            seed=seed,
            steps=study.epochs * steps_per_epoch,
            compute_dtype=study.compute_dtype,
        )
        for seed in range(study.seeds)
    ]


def steps_cases(study: StepsStudy, global_batch: int) -> list[TrainingCase]:
    """A training to the target for each seed, at the rate of the linear rule."""
    return [
        TrainingCase(
            model=study.model,
            dataset=study.dataset,
            global_batch=global_batch,
            local_batch=global_batch,
            batch_norm="global",
            learning_rate=study.learning_rate * global_batch / study.reference_batch,
            momentum=study.momentum,
            seed=seed,
            steps=-(-study.most_samples // global_batch),
            target_loss=study.target_loss,
            compute_dtype=study.compute_dtype,
        )
        for seed in range(study.seeds)
    ]


def share(every: Sequence[TrainingCase], rank: int, ranks: int) -> Sequence[TrainingCase]:
    """The trainings of one of the ranks that work side by side."""
    return every[rank::ranks]
