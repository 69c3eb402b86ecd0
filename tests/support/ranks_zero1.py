"""Tasks of the tests of strategy zero1: the same trainings by both strategies in one job; what differs comes back."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
from mpi4py import MPI
from ranks_resume import steps
from ranks_runtime import open_trainer

from dpsim import codec
from dpsim.data import load_dataset
from dpsim.errors import NotFiniteError
from dpsim.lowering.zero1 import agreement_bytes
from dpsim.machine import Network
from dpsim.nn import build_model
from dpsim.plan import Plan
from dpsim.progress import Progress
from dpsim.runtime import step
from dpsim.runtime.checkpoint import Checkpoint
from dpsim.runtime.describe import describe
from dpsim.runtime.emulated import EmulatedReplica
from dpsim.runtime.shard_update import shard_update
from dpsim.runtime.snapshot import restore, snapshot
from dpsim.runtime.trainer import Trainer
from dpsim.schedule import SYNCHRONISE_EVENT

STRATEGIES = ("data-parallel", "zero1")


def _of(case: dict[str, Any], strategy: str) -> dict[str, Any]:
    return case | {"plan": case["plan"] | {"strategy": strategy}}


def digests(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[dict[str, Any]]:
    """The digest of every case by both strategies, whether all ranks agree, and the bytes of optimizer state."""
    actual = []
    for case in argument["cases"]:
        outcome: dict[str, Any] = {"digests": [], "bytes": []}
        for strategy in argument.get("strategies", STRATEGIES):
            trainer = open_trainer(comm, _of(case, strategy))
            steps(trainer, argument["steps"])
            of_ranks = comm.allgather(trainer.digest())
            outcome["digests"].append(of_ranks[0] if len(set(of_ranks)) == 1 else "the ranks disagree")
            outcome["bytes"].append(comm.allgather(_allocated(trainer)))
            trainer.close()
        actual.append(outcome)
    return actual


def emulated(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[tuple[float, float]]:
    """Of each step of emulated computation: until when it lasted, and from when on the next one computes."""
    data = load_dataset(argument["dataset"])
    model = build_model(argument["model"], data.input_shape, data.classes)
    replica = EmulatedReplica(model, describe(model, "none"), seed=0, rank=comm.rank)
    plan = codec.decode(argument["plan"] | {"devices": comm.size, "strategy": "zero1"}, Plan, "the plan")
    moments: list[float] = []
    trainer = Trainer(replica, data, plan, comm, Network.parse(argument["network"]))
    with mock.patch.object(replica, "resumes_at", moments.append):
        ends = [(trainer.step().marks.end_s, moments[-1]) for _ in range(3)]
    trainer.close()
    return ends


def agreements(comm: MPI.Intracomm, argument: list[dict[str, Any]], report: Progress) -> list[tuple[int, int]]:
    """The bytes of the agreement before the update, by the schedule's sizes and of what the ranks send."""
    sizes = []
    for case in argument:
        trainer = open_trainer(comm, case)
        schedule, sums = trainer.runner.schedule, shard_update(trainer.runner.arena, trainer.runner.plan.optimizer)
        sent = sums.measure().nbytes + np.float64().nbytes
        stated = agreement_bytes(schedule.workload, schedule.plan.optimizer)
        if schedule.sharded:
            (before_update,) = np.flatnonzero((schedule.kind == SYNCHRONISE_EVENT) & (schedule.layer < 0))
            stated = int(schedule.size_bytes[before_update])
        sizes.append((stated, sent))
        trainer.close()
    return sizes


def _allocated(trainer: Trainer) -> int:
    """The bytes of the arrays that hold a rank's optimizer state, whatever they are views of."""
    return sum(own.nbytes for own in trainer.runner.arena.optimizer_state.values())


def not_finite(comm: MPI.Intracomm, argument: list[dict[str, Any]], report: Progress) -> list[dict[str, Any]]:
    """The last rank's share of the third batch has a NaN: what each rank says, and whether its parameters changed."""
    with mock.patch.object(step, "_ROOT_CAUSE_GRACE_S", 0.0):
        return [_not_finite(comm, case) for case in argument]


def _not_finite(comm: MPI.Intracomm, case: dict[str, Any]) -> dict[str, Any]:
    trainer = open_trainer(comm, case)
    steps(trainer, 2)
    before = trainer.runner.arena.parameters.copy()
    share, samples = trainer.next_share()
    if comm.rank == comm.size - 1:
        share.x[-1] = np.nan
    message = ""
    try:
        trainer.runner.run(share, samples)
    except NotFiniteError as error:
        message = str(error)
    same = np.array_equal(before, trainer.runner.arena.parameters)
    trainer.close()
    return {"messages": comm.allgather(message), "unchanged": comm.allgather(same)}


def checkpoints(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[dict[str, Any]]:
    """Every case trained to ``stop``, by each strategy on each number of ranks in ``writers``, then on by each on all.

    The digests of all that went on, and those of the checkpoints' own tensors.
    """
    actual = []
    for case in argument["cases"]:
        written: list[Checkpoint] = []
        for strategy in argument.get("strategies", STRATEGIES):
            for count in argument["writers"]:
                group = comm.Split(0 if comm.rank < count else MPI.UNDEFINED)
                checkpoint = None
                if group != MPI.COMM_NULL:
                    trainer = open_trainer(group, _of(case, strategy))
                    losses = steps(trainer, argument["stop"])
                    checkpoint = snapshot(trainer, losses, {})
                    if checkpoint is not None:
                        tensors = {name: value.copy() for name, value in checkpoint.tensors.items()}
                        checkpoint = Checkpoint(header=checkpoint.header, tensors=tensors)
                    trainer.close()
                written.append(comm.bcast(checkpoint))
        ends, same = [], []
        for checkpoint in written:
            same.append(
                all(
                    np.array_equal(value, written[0].tensors[name])
                    for name, value in checkpoint.tensors.items()
                    if not name.startswith("state/")
                )
            )
            for strategy in argument.get("strategies", STRATEGIES):
                trainer = open_trainer(comm, _of(case, strategy))
                restore(trainer, checkpoint if comm.rank == 0 else None, report)
                steps(trainer, argument["steps"])
                ends.append(trainer.digest())
                trainer.close()
        straight = open_trainer(comm, _of(case, "data-parallel"))
        steps(straight, argument["steps"])
        actual.append({"ends": ends, "same": same, "straight": straight.digest()})
        straight.close()
    return actual
