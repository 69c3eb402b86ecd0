"""Tasks of the tests of DDP's reductions on ranks. Loads torch."""

from __future__ import annotations

import uuid
from typing import Any

import torch
from mpi4py import MPI
from torch import distributed
from torch.distributed import fsdp

from dpsim.comm.networks import transport
from dpsim.errors import ConfigError
from dpsim.machine import Network
from dpsim.progress import Progress
from dpsim.torch.script.probe.fsdp import check_gradients
from dpsim.torch.script.probe.in_turns.collectives import GlooReduction, Queue
from dpsim.torch.script.probe.process_group import disconnect
from dpsim.torch.script.reductions import MpiReduction

SIZES = (1, 5, 1000, 40_000)


def reduced(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[Any] | None:
    """By each way: what a rank holds after reductions of several tensors at once, twice; the spans of a queue."""
    _join(comm, argument["folder"])
    ways = {name: _by(_reduction(comm, way), comm.rank) for name, way in argument["ways"].items()}
    disconnect()
    return comm.gather(ways)


def _reduction(comm: MPI.Intracomm, way: dict[str, str]) -> Any:
    if way["overlap"] == "gloo":
        return GlooReduction(distributed.group.WORLD)
    return MpiReduction(transport(comm, Network.parse(way["network"])), way["algorithm"], way["overlap"])


def _by(reduction: Any, rank: int) -> dict[str, Any]:
    tensors = [torch.zeros(size) for size in SIZES]
    values = []
    for turn in range(2):
        for tensor in tensors:
            tensor.fill_(rank + 1 + turn)
        for future in [reduction.reduce(tensor) for tensor in tensors]:
            future.wait()
        values.append([sorted({*tensor.tolist()}) for tensor in tensors])
    queue = Queue()
    for _ in range(4):
        queue.submit(reduction.reduce(torch.ones(2000)))
    queue.finish()
    if isinstance(reduction, MpiReduction):
        reduction.close()
    return {"values": values, "spans": queue.spans}


def _join(comm: MPI.Intracomm, folder: str) -> None:
    store = distributed.FileStore(comm.bcast(f"{folder}/{uuid.uuid4()}"), comm.size)
    distributed.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)


def sharded_gradients(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[str] | None:
    """What ``check_gradients`` says, on rank 0: where FSDP averages gradients, and then where it sums them."""
    _join(comm, argument["folder"])
    said, shard = [_refused()], fsdp.fully_shard

    def summing(module: Any) -> Any:
        sharded = shard(module)
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(1.0)
        return sharded

    fsdp.fully_shard = summing
    said.append(_refused())
    fsdp.fully_shard = shard
    disconnect()
    return None if comm.rank else said


def _refused() -> str:
    try:
        check_gradients()
    except ConfigError as error:
        return str(error)
    return ""
