"""Tasks of the tests of strategies: trainings by different strategies in one job, and what they came to."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI
from ranks_resume import steps
from ranks_runtime import open_trainer

from dpsim.progress import Progress
from dpsim.runtime.checkpoint import Checkpoint
from dpsim.runtime.snapshot import restore, snapshot
from dpsim.runtime.trainer import Trainer

DISAGREE = "the ranks disagree"


def digests(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[dict[str, Any]]:
    """The digest, the losses and the evaluation of every case, and the memory of each rank by part."""
    actual = []
    for case in argument["cases"]:
        trainer = open_trainer(comm, case)
        steps(trainer, argument["steps"] - 1)
        evaluated = trainer.evaluate()
        steps(trainer, argument["steps"])
        trainer.log.gather()
        of_ranks = comm.allgather(trainer.digest())
        arena = trainer.runner.arena
        own = (arena.parameter_bytes, arena.gradient_bytes, arena.optimizer_state_bytes)
        actual.append(
            {
                "digest": of_ranks[0] if len(set(of_ranks)) == 1 else DISAGREE,
                "losses": trainer.log.losses,
                "evaluated": [evaluated.loss, evaluated.correct, evaluated.samples],
                "bytes": comm.allgather(own),
            }
        )
        trainer.close()
    return actual


def checkpoints(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[str]:
    """A training written by each case after ``stop`` steps and ended by it and by the case before: the digests."""
    written = []
    for case in argument["cases"]:
        trainer = open_trainer(comm, case)
        checkpoint = snapshot(trainer, steps(trainer, argument["stop"]), {})
        written.append(None if checkpoint is None else _copied(checkpoint))
        trainer.close()
    cases, until = argument["cases"], argument["steps"]
    pairs = [(each, cases[number - back]) for number, each in enumerate(written) for back in (0, 1)]
    return [_ended(open_trainer(comm, case), each, until, report) for each, case in pairs]


def _ended(trainer: Trainer, checkpoint: Checkpoint | None, until: int, report: Progress) -> str:
    restore(trainer, checkpoint, report)
    steps(trainer, until)
    digest = trainer.digest()
    trainer.close()
    return digest


def _copied(checkpoint: Checkpoint) -> Checkpoint:
    tensors = {name: value.copy() for name, value in checkpoint.tensors.items()}
    return Checkpoint(header=checkpoint.header, tensors=tensors)
