"""Tasks of the tests of DDP's reductions on ranks. Loads torch."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch import distributed
from torch.distributed import fsdp

from dpsim import codec
from dpsim.collective import Collective
from dpsim.comm.networks import transport
from dpsim.errors import ConfigError
from dpsim.machine import Network
from dpsim.progress import Progress
from dpsim.study.calibration import CalibrateConfig
from dpsim.study.rows import CalibratedCollective, Rows
from dpsim.study.runners.reductions import ReducedMemory, ShardedSteps, StreamTable, at_once
from dpsim.torch.script.in_turns import profile_in_turns
from dpsim.torch.script.probe.fsdp import check_gradients
from dpsim.torch.script.reductions import FutureProgress, GlooReduction, MpiReduction, Reduction
from dpsim.torch.script.request import ScriptRequest
from dpsim.torch.script.timed import disconnect
from dpsim.torch.script.visit import CONTROL, Turn

SIZES = (1, 5, 1000, 40_000)


def reduced(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[Any] | None:
    """By each way: what a rank holds after reductions of several tensors at once, twice; the spans of a queue."""
    _join(comm, argument["folder"])
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
    config = CalibrateConfig(algorithms=("mpi",), overlaps=(), max_bytes=1024, runtime="torch-ddp-mpi")
    link: Any = ReducedMemory(reduction)
    load: Any = LateLoad(comm.rank)
    rows = Rows()
    subject = CalibratedCollective(collective=Collective(algorithm="mpi", devices=comm.size))
    table = StreamTable(load, link, config, group=comm, subject=subject, rows=rows)
    table.visit(0, counted=True)
    times = {each.part: max(each.value) for each in rows.series()}
    if comm.rank:
        return None
    return {"time_s": times, "at_once": {size: at_once(size, config.max_bytes) for size in table.sizes}, "lag_s": LAG_S}


def profiled(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[Any] | None:
    """What rank 0 gets of the other ranks, which profile a script in its turns: (steps, pause) of each."""
    if comm.rank:
        comm.Barrier()
        group: Any = comm.Split(1, comm.rank)
        profile_in_turns(group, ScriptRequest(script=argument["script"], devices=2), argument["folder"], 0)
        return None
    with Listener(str(Path(argument["folder"]) / CONTROL), "AF_UNIX", backlog=comm.size) as listener:
        comm.Barrier()
        comm.Split(0, comm.rank)
        ranks: list[Any] = [listener.accept() for _ in range(comm.size - 1)]
        for rank in ranks:
            assert rank.recv() == 0 and rank.recv().profiled is None, "it waits at the first step"
        seen: list[Any] = []
        for steps, pause_s in argument["turns"]:
            for rank in ranks:
                rank.send(Turn(steps, pause_s))
            begin_s = time.monotonic()
            visits = [rank.recv() for rank in ranks]
            seen.append([time.monotonic() - begin_s, [codec.to_builtins(visit.profiled) for visit in visits]])
            if any(visit.ended for visit in visits):
                return [*seen, "ended"]
        for rank in ranks:
            rank.send(Turn(0))
        return seen


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


def sharded_steps(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """The seconds of both collectives at two sizes, and how many of each were made in the steps that count."""
    _join(comm, argument["folder"])
    steps = ShardedSteps(comm, distributed.group.WORLD, 4 * 65536)
    counts: dict[str, int] = {}
    forget = steps.waited.forget

    def counted() -> None:
        counts.update({kind: len(spans) for kind, spans in steps.waited.spans.items()})
        forget()

    steps.waited.forget = counted  # type: ignore[method-assign]
    seconds = {
        kind: {size: steps.seconds(size, kind) for size in (1024, 65536)} for kind in ("all-gather", "reduce-scatter")
    }
    disconnect()
    return None if comm.rank else seconds | {"counts": counts}
