"""Tasks of the tests of DDP's reductions on ranks. Loads torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch import distributed

from dpsim.comm.networks import transport
from dpsim.machine import Network
from dpsim.progress import Progress
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
