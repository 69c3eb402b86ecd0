"""Tasks of the kernels' tests on ranks."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from dpsim import jit, processor
from dpsim.data import load_dataset
from dpsim.kernels.cache import counts
from dpsim.kernels.vector import lanes
from dpsim.machine import Network
from dpsim.nn import build_model
from dpsim.plan import Plan
from dpsim.progress import Progress
from dpsim.runtime.trainer import Trainer


def targets(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[tuple[str, str, int]]:
    """What each rank compiles for: the processor's family, numba's name of its type, numbers in a vector register."""
    return comm.allgather((processor.family(), jit.load_numba().config.CPU_NAME, lanes("float32")))


def compiled(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[tuple[int, int]]:
    """A few steps of training: kernels compiled and kernels found compiled, on each rank."""
    dataset = load_dataset("synthetic:6x6x2,classes=3,train=40,test=10")
    replica = build_model("cnn:3,5", dataset.input_shape, dataset.classes)
    trainer = Trainer(replica, dataset, Plan(devices=comm.size, global_batch=8), comm, Network())
    before = counts.compiled + counts.read
    for _ in range(3):
        trainer.step()
    trainer.evaluate()
    trainer.close()
    return comm.allgather((counts.compiled, counts.read, counts.compiled + counts.read - before))
