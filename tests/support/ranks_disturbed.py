"""Tasks for ranks that train while a process takes one of their cores."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

from mpi4py import MPI
from neighbour import busy

from dpsim.data import load_dataset
from dpsim.machine import Network
from dpsim.plan import Plan
from dpsim.progress import Progress
from dpsim.runtime.trainer import Trainer
from dpsim.study import models
from dpsim.study.disturbance import Watcher, run_queue_marks
from dpsim.study.steps import WARM_UP_STEPS, step_times_s, train

VISITS = 12


def marked(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[list[bool | None]] | None:
    """Train visits with nothing started beside them, then beside a process on this rank's core; the marks of both."""
    dataset = load_dataset("digits", 0)
    replica = models.load("mlp", dataset.input_shape, dataset.classes).replica()
    plan = Plan(devices=comm.size, global_batch=256, **argument["plan"])
    trainer = Trainer(replica, dataset, plan, comm, Network(), seed=0)
    watcher, marks = Watcher.on(comm), []
    for beside in (nullcontext(), busy(min(os.sched_getaffinity(0))) if comm.rank == 0 else nullcontext()):
        marks.append(list[bool | None]())
        with beside:
            for _ in range(VISITS):
                ends = [outcome.marks.end_s for outcome in train(trainer, watcher)]
                gathered = comm.gather((ends, watcher.seen()))
                if gathered is not None:
                    times_s = step_times_s([each for each, _ in gathered])
                    marks[-1] += run_queue_marks(
                        [seen for _, seen in gathered], dict(enumerate(times_s, WARM_UP_STEPS))
                    )
    trainer.close()
    return marks if comm.rank == 0 else None
