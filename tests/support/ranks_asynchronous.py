"""Tasks of the tests of asynchronous training."""

from __future__ import annotations

import os
import signal
from typing import Any

from mpi4py import MPI

from dpsim import codec
from dpsim.data import load_dataset
from dpsim.nn import build_model
from dpsim.plan import Plan
from dpsim.progress import Progress
from dpsim.runtime import asynchronous
from dpsim.runtime.update_order import UpdateOrder


def _worker(comm: MPI.Intracomm, case: dict[str, Any]) -> tuple[asynchronous.Worker, Plan]:
    dataset = load_dataset(case["dataset"])
    plan = codec.decode(case["plan"] | {"devices": comm.size}, Plan, "plan")
    replica = build_model(case["model"], dataset.input_shape, dataset.classes)
    return asynchronous.Worker(replica, dataset, plan, case["workers"], 3, comm), plan


def _rate(step: int) -> float:
    return 0.05 / (1 + step)


def train(comm: MPI.Intracomm, case: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """The result and the order of a training; rank ``dies`` kills itself in its third update, or before the start."""
    worker, plan = _worker(comm, case)
    compute, updates = worker.compute, []
    processes = [*comm.allgather(os.getpid()), *comm.allgather(os.getppid())]
    if comm.rank == case.get("dies_early"):
        os.kill(os.getpid(), signal.SIGKILL)

    def dying(ticket: int) -> Any:
        updates.append(ticket)
        if comm.rank in case.get("dies", ()) and len(updates) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return compute(ticket)

    worker.compute = dying  # type: ignore[method-assign]
    trained = asynchronous.train(comm, worker, plan, case["steps"], _rate)
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
    return dict(codec.to_builtins(asynchronous.replay(comm, worker, plan, order, _rate)))
