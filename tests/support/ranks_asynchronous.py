"""Tasks of the tests of asynchronous training."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
from mpi4py import MPI

from dpsim import codec
from dpsim.data import load_dataset
from dpsim.nn import build_model
from dpsim.plan import Plan
from dpsim.progress import Progress
from dpsim.runtime.asynchronous import training
from dpsim.runtime.asynchronous.shared_updates import SharedUpdates
from dpsim.runtime.asynchronous.update_order import UpdateOrder


def _worker(comm: MPI.Intracomm, case: dict[str, Any]) -> tuple[training.Worker, Plan]:
    dataset = load_dataset(case["dataset"])
    plan = codec.decode(case["plan"] | {"devices": comm.size}, Plan, "plan")
    replica = build_model(case["model"], dataset.input_shape, dataset.classes)
    return training.Worker(replica, dataset, plan, case["workers"], 3, comm), plan


def _rate(step: int) -> float:
    return 0.05 / (1 + step)


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _Fatal(np.ndarray):
    """An array that nobody survives to write to."""

    def __setitem__(self, index: Any, value: Any) -> None:
        _end()


def train(comm: MPI.Intracomm, case: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """The result and the order of a training; ranks ``dies`` kill themselves in their third update (``where``).

    Rank ``dies_early`` kills itself before the start.
    """
    worker, plan = _worker(comm, case)
    processes = [*comm.allgather(os.getpid()), *comm.allgather(os.getppid())]
    if comm.rank == case.get("dies_early"):
        _end()

    def dying(self: SharedUpdates, ticket: int, *arguments: Any) -> None:
        write = self.cells.push

        def dying_write(*given: Any) -> float:
            apart = write(*given)
            if case["where"] == "has written":
                _end()
            self._versions = self._versions.view(_Fatal)
            return apart

        if comm.rank in case.get("dies", ()) and self._clocks[comm.rank] == 2:
            if case["where"] == "computes":
                _end()
            self.cells.push = dying_write  # type: ignore[method-assign]
        push(self, ticket, *arguments)

    push = SharedUpdates.push
    SharedUpdates.push = dying  # type: ignore[method-assign]
    try:
        trained = training.train(comm, worker, plan, case["steps"], _rate)
    finally:
        SharedUpdates.push = push  # type: ignore[method-assign]
    if trained is None:
        return None
    result, order = trained
    return {
        "result": codec.to_builtins(result),
        "order": codec.to_builtins(order),
        "by": comm.rank,
        "processes": processes,
    }


def replay(comm: MPI.Intracomm, case: dict[str, Any], report: Progress) -> dict[str, Any]:
    """The result of the replay of ``case["order"]``."""
    worker, plan = _worker(comm, case)
    order = codec.decode(case["order"], UpdateOrder, "order")
    return dict(codec.to_builtins(training.replay(comm, worker, plan, order, _rate)))
