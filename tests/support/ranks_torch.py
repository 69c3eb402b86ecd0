"""Tasks of the tests of DDP's reductions on ranks. Loads torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch import distributed

from dpsim.comm.networks import transport
from dpsim.harness.torch_ddp.calibrate_on_ranks import ReducedMemory, StreamTable, at_once
from dpsim.harness.torch_ddp.task import CalibrationTask
from dpsim.machine import Network
from dpsim.progress import Progress
from dpsim.study.rows import Rows
from dpsim.torch_ddp.reductions import FutureProgress, GlooReduction, MpiReduction, Reduction
from dpsim.torch_ddp.timed import disconnect

SIZES = (1, 5, 1000, 40_000)


def reduced(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[Any] | None:
    """By each way: what a rank holds after reductions of several tensors at once, twice; the spans of a queue."""
    store = distributed.FileStore(str(Path(argument["folder"]) / "store"), comm.size)
    distributed.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    ways = {name: _by(_reduction(comm, way), comm.rank) for name, way in argument["ways"].items()}
    disconnect()
    return comm.gather(ways)


def _reduction(comm: MPI.Intracomm, way: dict[str, str]) -> Reduction:
    if way["overlap"] == "gloo":
        return GlooReduction(distributed.group.WORLD)
    return MpiReduction(transport(comm, Network.parse(way["network"])), way["algorithm"], way["overlap"])


LAG_S = 0.1
"""How much later each rank is ready than the one before it."""


class LateLoad:
    """A computation that takes each rank longer than the one before it."""

    def __init__(self, rank: int) -> None:
        self._seconds = rank * LAG_S

    def run(self, units: int, poll: Callable[[], None]) -> float:
        time.sleep(units * self._seconds)
        return units * self._seconds


def streamed(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """The table of streams of allreduces that wait for a rank which is late."""
    reduction = MpiReduction(transport(comm, Network.parse("node")), "mpi", "inline")
    task = CalibrationTask(
        network="node",
        runtime="torch-ddp-mpi",
        algorithm="mpi",
        overlap="inline",
        devices=(comm.size,),
        max_bytes=1024,
        seconds=1.0,
        folder="",
    )
    link: Any = ReducedMemory(reduction)
    load: Any = LateLoad(comm.rank)
    rows = Rows()
    table = StreamTable(comm, link, task, load, rows)
    table.visit(0, counted=True)
    times = {each.part: max(each.value) for each in rows.series()}
    if comm.rank:
        return None
    return {"time_s": times, "at_once": {size: at_once(size, task.max_bytes) for size in table.sizes}, "lag_s": LAG_S}


def _by(reduction: Reduction, rank: int) -> dict[str, Any]:
    tensors = [torch.zeros(size) for size in SIZES]
    values = []
    for turn in range(2):
        for tensor in tensors:
            tensor.fill_(rank + 1 + turn)
        for future in [reduction.reduce(tensor) for tensor in tensors]:
            future.wait()
        values.append([sorted({*tensor.tolist()}) for tensor in tensors])
    spans: list[list[float]] = []
    queue = FutureProgress(reduction, lambda bucket, size, start_s, end_s: spans.append([size, start_s, end_s]))
    for number in range(4):
        queue.submit(number, queue.prepare(torch.ones(2000).numpy()))
    queue.finish()
    queue.close()
    return {"values": values, "spans": spans}
