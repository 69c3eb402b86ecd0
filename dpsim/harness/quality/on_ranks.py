"""What the ranks of a study do: each trains its own share of the cases, alone, side by side with the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpi4py import MPI

from dpsim import codec
from dpsim.harness.quality.divergence_on_ranks import measured, of_samples
from dpsim.harness.quality.runs import path_of
from dpsim.harness.quality.task import share
from dpsim.harness.quality.training import train
from dpsim.progress import Progress
from dpsim.records.quality import DivergenceStudy, TrainingCase


def train_cases(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> None:
    """Train the cases, and save each run as soon as it is finished."""
    cases = [codec.decode(each, TrainingCase, "training") for each in argument["cases"]]
    folder, own = Path(argument["folder"]), share(cases, comm.rank, comm.size)
    for number, case in enumerate(own, start=1):
        codec.write(path_of(folder, case), train(case))
        if number % 10 == 0 or number == len(own):
            report(f"{number} of {len(own)} trainings on this core (of {comm.size})")


def spreads(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[Any]:
    """The spread of samples at every batch norm, and the divergence at the batch that scales it, for each study."""
    return _side_by_side(comm, argument, lambda study: [of_samples(study), measured(study, (study.scaled_at,), 0)])


def divergences(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[Any]:
    """The measured divergence at every batch norm and local batch, over other global batches, for each study."""
    return _side_by_side(comm, argument, lambda study: measured(study, study.local_batches, study.batches))


def _side_by_side(comm: MPI.Intracomm, argument: dict[str, Any], compute: Any) -> list[Any]:
    studies = [codec.decode(each, DivergenceStudy, "divergence study") for each in argument["studies"]]
    own = {i: codec.to_builtins(compute(studies[i])) for i in range(comm.rank, len(studies), comm.size)}
    results = {number: value for part in comm.allgather(own) for number, value in part.items()}
    return [results[number] for number in range(len(studies))]
