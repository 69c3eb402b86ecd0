"""Tasks of the stall report's tests: the last rank is late in some way, and what every rank said comes back."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import threading
import time
from typing import Any

from mpi4py import MPI

from dpsim.data import load_dataset
from dpsim.machine import Network
from dpsim.nn import build_model
from dpsim.plan import Plan
from dpsim.progress import Progress
from dpsim.replica import Batch, BatchSums, StepEvents
from dpsim.runtime.trainer import Trainer

LATE_STEP, LATE_S, STALL_AFTER_S = 3, 0.8, 0.2


class LateAfterLoss:
    """The announcements of a step, the one of the loss followed by a nap."""

    def __init__(self, events: StepEvents) -> None:
        self._events = events

    def __getattr__(self, name: str) -> Any:
        return getattr(self._events, name)

    def loss_done(self) -> None:
        self._events.loss_done()
        time.sleep(LATE_S)


def stalls(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any]:
    """What the ranks wrote to stderr in each case, by rank, and the late rank's process id."""
    pids = comm.allgather(os.getpid())
    said: dict[str, list[str]] = {}
    for case in argument["cases"]:
        with contextlib.redirect_stderr(io.StringIO()) as written:
            _train(comm, case["plan"], case["how"], case.get("stall_after_s", STALL_AFTER_S), pids[-1])
        said[case["name"]] = comm.allgather(written.getvalue())
    return {"said": said, "pid": pids[-1], "files": [name for name in os.listdir("/dev/shm") if "board" in name]}


def _train(comm: MPI.Intracomm, plan: dict[str, Any], how: str, stall_after_s: float, pid: int) -> None:
    dataset = load_dataset("synthetic:4x4x1,classes=3,train=64,test=8")
    replica = build_model("mlp:6,5", dataset.input_shape, dataset.classes)
    late = comm.rank == comm.size - 1
    if how == "computing" and late:
        _be_late(replica)
    settings = Plan(devices=comm.size, global_batch=16, fusion_rule="per-tensor", **plan)
    trainer = Trainer(replica, dataset, settings, comm, Network(), stall_after_s=stall_after_s)
    for step in range(1, LATE_STEP + 2):
        if step == LATE_STEP:
            _rest(how, late, pid, first=comm.rank == 0)
        trainer.step()
    if how == "evaluating" and late:
        time.sleep(LATE_S)
    trainer.evaluate()
    time.sleep(STALL_AFTER_S)  # the watch looks once more, and says that it goes on
    trainer.close()


def _rest(how: str, late: bool, pid: int, *, first: bool) -> None:
    if how == "between" and late:
        time.sleep(LATE_S)
    if how == "stopped":
        if first:
            threading.Timer(LATE_S, os.kill, (pid, signal.SIGCONT)).start()
        if late:
            os.kill(pid, signal.SIGSTOP)


def _be_late(replica: Any) -> None:
    """From now on the replica sleeps in its third step, once the loss is computed."""
    inner = replica.forward_backward

    def forward_backward(batch: Batch, events: StepEvents) -> BatchSums:
        slow = LateAfterLoss(events) if batch.step + 1 == LATE_STEP else events
        sums: BatchSums = inner(batch, slow)
        return sums

    replica.forward_backward = forward_backward
