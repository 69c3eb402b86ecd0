"""Times one case on running ranks: every mode trains a replica of its own, and all take turns."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from dpsim import codec
from dpsim.data import load_dataset
from dpsim.experiments.reproducible_cost.cases import AGAIN, PLAIN, Case
from dpsim.experiments.turns import steps_in_turn
from dpsim.machine import Network
from dpsim.nn import build_model
from dpsim.plan import BatchNormMode, Plan
from dpsim.progress import Progress
from dpsim.runtime.trainer import Trainer

_TURN_S = 0.3
_MOST_COUNTED = 6


def measure(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, list[float]]:
    """The task: the median step of each round in seconds, by mode."""
    case = codec.decode(argument["case"], Case, "case")
    dataset = load_dataset(case.dataset)
    settings: dict[str, tuple[int, BatchNormMode]] = {PLAIN: (0, "local")}
    settings |= {mode.name: (mode.leaves, mode.batch_norm) for mode in case.modes}
    settings[AGAIN] = settings[PLAIN]
    trainers: dict[str, Trainer] = {}
    for name, (leaves, batch_norm) in settings.items():
        replica = build_model(case.model, dataset.input_shape, dataset.classes)
        plan = Plan(
            devices=comm.size,
            global_batch=case.global_batch,
            leaves=leaves,
            batch_norm=batch_norm,
        )
        trainers[name] = Trainer(replica, dataset, plan, comm, Network())
    first = trainers[PLAIN]
    first.step()
    marks = first.step().marks
    counted = comm.bcast(max(1, min(_MOST_COUNTED, int(_TURN_S / (marks.end_s - marks.begin_s)))))
    steps_s = steps_in_turn(comm, trainers, seconds=argument["seconds"], counted=counted)
    for trainer in trainers.values():
        trainer.close()
    return steps_s
