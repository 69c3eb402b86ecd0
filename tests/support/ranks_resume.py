"""Tasks of the resume tests: runs with and without an interruption, in one job; what they came to comes back."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from ranks_runtime import open_trainer, padding_is_zero

from dpsim.errors import ConfigError
from dpsim.harness.train.on_ranks import train_on_ranks
from dpsim.progress import Progress
from dpsim.runtime.checkpoint import CheckpointFolder, read
from dpsim.runtime.checkpoints import resume
from dpsim.runtime.snapshot import restore, snapshot
from dpsim.runtime.trainer import Trainer


def steps(trainer: Trainer, until: int) -> list[float]:
    """Train up to a step; the mean losses of its batches."""
    losses = []
    while trainer.runner.steps < until:
        outcome = trainer.step()
        losses.append(sum(trainer.comm.allgather(outcome.sums.loss)) / outcome.global_samples)
    return losses


def interrupted(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[dict[str, Any]]:
    """Every case trained straight through, and through a file at ``stop``: whether all that can be compared is."""
    actual = []
    for case in argument["cases"]:
        report(case["name"])
        straight = open_trainer(comm, case)
        losses = steps(straight, argument["steps"])
        expected = (straight.digest(), straight.epoch)
        straight.close()

        before = open_trainer(comm, case)
        first = steps(before, case["stop"])
        before.evaluate()
        checkpoint = snapshot(before, first, {"case": case["name"]})
        own_state = len(set(comm.allgather(before.digest())))
        before.close()
        folder = Path(argument["folder"], case["name"])
        if checkpoint is not None:
            writing = CheckpointFolder(folder, 0)
            writing.write(checkpoint)
            writing.close()

        after = open_trainer(comm, case)
        kept = read(folder / f"checkpoint-{case['stop']}.safetensors") if comm.rank == 0 else None
        whole = restore(after, kept, print)
        whole += steps(after, argument["steps"])
        same = (after.digest(), after.epoch) == expected
        actual.append(
            {
                "same_on_each_rank": comm.allgather(same),
                "same_losses": comm.allgather(whole == losses),
                "padding_is_zero": padding_is_zero(after),
                "different_states": own_state,
            }
        )
        after.close()
    return actual


def restored(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any]:
    """A trainer of ``case`` put into the checkpoint ``path``, and how it goes on."""
    trainer = open_trainer(comm, argument["case"])
    restore(trainer, read(Path(argument["path"])) if comm.rank == 0 else None, print)
    state = {name: value.tolist() for name, value in trainer.replica.state().items()}
    parameters = {name: value.tolist() for name, value in trainer.runner.parameters.items()}
    alike = len(set(comm.allgather(trainer.digest()))) == 1
    step = trainer.runner.steps
    losses = steps(trainer, step + 3)
    trainer.close()
    return {"state": state, "parameters": parameters, "alike": alike, "step": step, "losses": losses}


def refused(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[str]:
    """What a trainer of each case answers to the checkpoint ``path``."""
    answers = []
    for case in argument["cases"]:
        trainer = open_trainer(comm, case)
        before = trainer.digest()
        try:
            restore(trainer, read(Path(argument["path"])), print)
        except ConfigError as error:
            answers.append(str(error) if trainer.digest() == before else "it was changed")
        trainer.close()
    return answers


def evaluated_midway(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any]:
    """Whether an evaluation in the middle changes a run, whether ranks agree on it, and the state that it uses."""
    plain, looked = open_trainer(comm, argument["case"]), open_trainer(comm, argument["case"])
    for trainer in (plain, looked):
        steps(trainer, 3)
    sums = comm.allgather(looked.evaluate())
    own = np.concatenate([value.ravel() for value in looked.replica.state().values()])
    with looked.averaged_state():
        mean = np.concatenate([value.ravel() for value in looked.replica.state().values()])
        digests = comm.allgather(looked.digest())
    everyones = comm.allgather(own)
    for trainer in (plain, looked):
        steps(trainer, 6)
    same = comm.allgather(plain.digest() == looked.digest())
    for trainer in (plain, looked):
        trainer.close()
    return {
        "same": all(same),
        "sums_agree": all(s == sums[0] for s in sums),
        "digests": len(set(digests)),
        "is_mean": bool(np.allclose(mean, np.mean(everyones, axis=0), rtol=1e-5)),
        "states": len({e.tobytes() for e in everyones}),
    }


def limited(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """A training run in which no file may exceed 2 KiB: its result, and what it reported."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))
    said: list[str] = []
    result = train_on_ranks(comm, {"config": argument}, said.append)
    return (
        None if result is None else {"digest": result["digest"], "failure": result["checkpoint_failure"], "said": said}
    )


def moved(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[list[Any]]:
    """Each round's training on one device, and handed on through files: (digest, losses) of both.

    A round's parts are (devices, plan, step of the checkpoint, steps done after it, which are lost).
    """
    actual, alone = [], {}
    for number, one in enumerate(argument["rounds"]):
        report(f"round {number}")
        name = one["case"]["name"]
        if name not in alone:
            alone[name] = _part(comm, one["case"], [1, {}, argument["steps"], 0], None)
        folder = Path(argument["folder"], str(number))
        results = [_part(comm, one["case"], part, folder) for part in one["parts"]]
        actual.append([alone[name], results[-1]])
    return actual


def _part(comm: MPI.Intracomm, case: dict[str, Any], part: list[Any], folder: Path | None) -> Any:
    """On the first ranks: go on from the newest checkpoint in ``folder``, write one, and train on for nothing."""
    devices, plan, until, more = part
    group = comm.Split(0 if comm.rank < devices else MPI.UNDEFINED, comm.rank)
    came_to = None
    if group != MPI.COMM_NULL:
        trainer = open_trainer(group, case | {"plan": case["plan"] | plan})
        if folder is not None and folder.exists():
            resume(trainer, folder)
        steps_logged(trainer, until)
        came_to = (trainer.digest(), list(trainer.log.losses))
        checkpoint = snapshot(trainer, trainer.log.losses, {})
        if checkpoint is not None and folder is not None:
            writing = CheckpointFolder(folder, trainer.runner.steps)
            writing.write(checkpoint)
            writing.close()
        steps_logged(trainer, until + more)
        trainer.close()
        group.Free()
    wait_asleep(comm)
    return comm.bcast(came_to)


def wait_asleep(comm: MPI.Intracomm) -> None:
    """A barrier that leaves the cores to the ranks that work."""
    everybody = comm.Ibarrier()
    while not everybody.Test():
        time.sleep(0.001)


def steps_logged(trainer: Trainer, until: int) -> None:
    """Train up to a step; the losses are then in the trainer's log."""
    while trainer.runner.steps < until:
        trainer.step()
    trainer.log.gather()
