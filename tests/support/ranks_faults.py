"""A rank that ends in the middle of something, for the tests of faults."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from dpsim.data import load_dataset
from dpsim.machine import Network
from dpsim.nn import build_model
from dpsim.plan import Plan
from dpsim.progress import Progress
from dpsim.runtime.trainer import Trainer


def killed(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> None:
    """Train, then evaluate; the last rank kills itself before, amid or after the training steps."""
    phase, last = argument["phase"], comm.rank == comm.size - 1
    if phase == "start" and last:
        os.kill(os.getpid(), signal.SIGKILL)
    dataset = load_dataset("synthetic:4x4x1,classes=3,train=64,test=8")
    replica = build_model("mlp:6,5", dataset.input_shape, dataset.classes)
    plan = Plan(devices=comm.size, global_batch=16, fusion_rule="per-tensor", overlap=argument["overlap"])
    trainer = Trainer(replica, dataset, plan, comm, Network(), stall_after_s=60.0)
    inner = replica.forward_backward
    for step in range(50):
        if phase == "training" and last and step == 3:
            replica.forward_backward = lambda batch, _: inner(batch, _Killer())  # type: ignore[method-assign]
        trainer.step()
    if phase == "evaluation" and last:
        os.kill(os.getpid(), signal.SIGKILL)
    trainer.evaluate()
    comm.Barrier()


class _Killer:
    """Kills its process at the first gradient that is final, in the middle of backward."""

    def __getattr__(self, _: str) -> Callable[[int], None]:
        return lambda *_: None

    def gradients_ready(self, layer: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
