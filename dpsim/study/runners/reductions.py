"""Calibrates the allreduces that DDP starts, by gloo or through a hook: with nothing else running, and beside backward.
And the collectives that FSDP waits for, by gloo.

Loads torch on the ranks.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from dpsim.comm.clock import now
from dpsim.comm.group import first_ranks, quiet_barrier, quiet_start
from dpsim.comm.networks import transport
from dpsim.comm.progress import Progress as AllreduceProgress
from dpsim.constraints import FSDP, LIBRARIES
from dpsim.launch.rank_process import pin
from dpsim.machine import Network
from dpsim.study.calibration import TIME_S, CalibrateConfig
from dpsim.study.rows import CalibratedCollective, Rows
from dpsim.study.runners.calibration import CollectiveTable, LoadedTable
from dpsim.study.runners.load import nothing
from dpsim.torch.script.probe.fsdp import WaitedCollectives, check_gradients
from dpsim.torch.script.reductions import FutureProgress, GlooReduction, MpiReduction, ReducedArray, Reduction
from dpsim.torch.script.visit import Turns, Visit

_NAP_S = 1e-4
_WIDTH, _LAYERS, _BATCH = 512, 6, 64
_MOST_AT_ONCE = 24
_STREAMS = 3
_MOST_UNITS = 4


class ReducedMemory:
    """What a calibration needs of a ``Transport``, where a ``Reduction`` does the allreduces.

    Its ranks sleep where they wait for each other (``nap_s``), as DDP does: a rank that spins delays the threads of
    gloo on its core by milliseconds.
    """

    nap_s = _NAP_S

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction

    def allocate(self, size_bytes: int) -> NDArray[Any]:
        return pytorch_memory(size_bytes)


def pytorch_memory(size_bytes: int) -> NDArray[Any]:
    """Bytes as PyTorch allocates its buckets: NumPy asks the kernel for huge pages, with which messages are faster."""
    memory: NDArray[Any] = torch.empty(size_bytes, dtype=torch.uint8).numpy()
    return memory


class StreamTable(CollectiveTable):
    """How long a ``Reduction`` takes on average where DDP starts as many at once as a step has of that size.

    gloo reduces several at a time, so that the time of one alone says little about a stream of them. Each stream
    follows a forward and a backward, and the next step follows it, as in training: gloo's thread spins on a core while
    a message waits for it that came before its rank was ready, so that when the ranks begin decides how long it takes.
    A stream begins with the last rank's.
    """

    def __init__(self, load: TorchLoad, link: Any, config: CalibrateConfig, **others: Any) -> None:
        self._load, self._reduction, self._step_bytes = load, link.reduction, config.max_bytes
        super().__init__(link=link, config=config, **others)

    def _prepare(self) -> None:
        self._streams = {size: self._stream(size, at_once(size, self._step_bytes)) for size in self.sizes}

    def _stream(self, size: int, count: int) -> list[tuple[NDArray[np.float32], ReducedArray]]:
        arrays = [pytorch_memory(size).view(np.float32) for _ in range(count)]
        return [(array, ReducedArray(self._reduction, array)) for array in arrays]

    def _visit(self, order: Sequence[int]) -> dict[str, dict[int, list[float]]]:
        """Take a few steps with each size; the first of each does not count."""
        times: dict[int, list[float]] = {}
        for size in order:
            begun_s, ended_s = self._steps(size)
            seconds = (ended_s - np.max(self.group.allgather(begun_s), axis=0)) / len(self._streams[size])
            times[size] = seconds.tolist()
        return {TIME_S: times}

    def _steps(self, size: int) -> NDArray[np.float64]:
        """When the streams of a few steps began and ended, [2, steps] in seconds."""
        spans: list[tuple[float, float]] = []
        quiet_start(self.group)
        for _ in range(1 + _STREAMS):
            self._load.run(1, nothing)
            for array, _ in self._streams[size]:
                array[...] = 1.0
            begun_s = now()
            for future in [reduced.begin() for _, reduced in self._streams[size]]:
                future.wait()
            spans.append((begun_s, now()))
        return np.transpose(spans[1:])


class ShardedSteps:
    """Steps of small models that ``fully_shard`` has sharded over ``members``, and what their collectives take.

    A unit is a square linear layer, so that its computation grows with its size. What a collective takes depends on
    what comes before it: alone, in memory that was used just before, those of 2 MiB took half as long as in training.
    """

    def __init__(self, group: MPI.Intracomm, members: Any, step_bytes: int) -> None:
        self._group, self._members, self._step_bytes = group, members, step_bytes
        self._models: dict[int, Any] = {}
        self.waited = WaitedCollectives()
        self._kept: dict[tuple[int, str], float] = {}

    def seconds(self, size: int, kind: str) -> float:
        """The mean of the collectives of a kind in a few steps with units of a size; the other kind's is kept.

        It begins with the last rank's, and ends with it.
        """
        if (size, kind) not in self._kept:
            self._take(size)
        return self._kept.pop((size, kind))

    def _take(self, size: int) -> None:
        if size not in self._models:
            self._models[size] = self._model(size)
        model, samples = self._models[size]
        quiet_start(self._group)
        for step in range(1 + _STREAMS):
            if step == 1:
                self.waited.forget()
            model(samples).sum().backward()
            for parameter in model.parameters():
                parameter.grad = None
        for kind, spans in self.waited.spans.items():
            begun_s, ended_s = np.max(self._group.allgather(spans), axis=0).T
            self._kept[size, kind] = float(np.mean(ended_s - begun_s))
        self.waited.forget()

    def _model(self, size: int) -> tuple[Any, Any]:
        width = max(round(math.sqrt(size / 4)), self._group.size)
        units = max(1, min(_MOST_UNITS, self._step_bytes // size))
        linear = functools.partial(torch.nn.Linear, width, width, bias=False)
        model = torch.nn.Sequential(*(torch.nn.Sequential(linear(), torch.nn.ReLU()) for _ in range(units)))
        mesh = DeviceMesh.from_group(self._members, "cpu")
        for unit in model:
            fully_shard(unit, mesh=mesh)
        return fully_shard(model, mesh=mesh), torch.randn(_BATCH, width)


class WaitedTable(CollectiveTable):
    """How long gloo takes for a collective that FSDP waits for, in the steps of ``ShardedSteps``; sizes are whole."""

    def __init__(self, steps: ShardedSteps, link: Any, config: CalibrateConfig, **others: Any) -> None:
        self._steps = steps
        super().__init__(link=link, config=config, **others)

    def _visit(self, order: Sequence[int]) -> dict[str, dict[int, list[float]]]:
        kind = self.subject.collective.kind
        return {TIME_S: {size: [self._steps.seconds(size, kind)] for size in order}}


class BackwardTable(LoadedTable):
    """How long a ``Reduction`` takes in such a stream beside PyTorch's backward, and how much longer that takes."""

    def _overlap(self) -> AllreduceProgress:
        link: Any = self.link
        return FutureProgress(link.reduction, self._reduced)

    def _at_once(self, size: int, idle_s: float) -> int:
        return at_once(size, self.idle.sizes[-1])


def at_once(size_bytes: int, step_bytes: int) -> int:
    """How many allreduces of a size a step with so many bytes of gradients has, up to a bound."""
    return max(1, min(_MOST_AT_ONCE, step_bytes // size_bytes))


class TorchLoad:
    """Forward and backward of a small PyTorch model, repeated; ``poll`` is called after every layer of both."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._layers = [torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)]
        self._x = torch.randn(_BATCH, _WIDTH)
        self._poll: Callable[[], None] = nothing
        for layer in self._layers:
            layer.weight.register_post_accumulate_grad_hook(lambda _: self._poll())
        self.run(5, nothing)
        self.unit_s = self.run(10, nothing) / 10

    def run(self, units: int, poll: Callable[[], None]) -> float:
        self._poll = poll
        start_s = now()
        for _ in range(units):
            activations = self._x
            for layer in self._layers:
                layer.zero_grad(set_to_none=True)
                activations = torch.relu(layer(activations))
                poll()
            activations.sum().backward()
        return now() - start_s


def calibrate_in_turns(
    group: MPI.Intracomm,
    config: CalibrateConfig,
    subjects: Sequence[CalibratedCollective],
    earlier: Rows,
    parts: int,
    folder: str,
    number: int,
) -> None:
    """Visit the tables of a calibration as a rank of ``group``, and hand over their rows, until it is enough.

    ``number`` counts what is visited in the ``folder`` of a study; a table takes ``parts`` turns for all its sizes.
    """
    pin(group)
    quiet_barrier(group)  # others may still be loading PyTorch
    if LIBRARIES.get(config.runtime) == "gloo":
        store = distributed.FileStore(str(Path(folder) / "calibration"), group.size)
        distributed.init_process_group("gloo", store=store, rank=group.rank, world_size=group.size)
    if config.runtime == FSDP:
        check_gradients()
    tables, reductions = _tables(group, config, subjects, earlier, parts)
    turns, rows = Turns(folder, number), Rows()
    for round_number in itertools.count():
        if not turns.take(Visit(rows=rows.series())).steps:
            break
        rows = Rows()
        for table in tables:
            table.rows = rows
            table.visit(round_number, counted=True)
        quiet_barrier(group)
    turns.close()
    for table in tables:
        table.close()
    for reduction in reductions:
        reduction.close()
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _tables(
    comm: MPI.Intracomm,
    config: CalibrateConfig,
    subjects: Sequence[CalibratedCollective],
    earlier: Rows,
    parts: int,
) -> tuple[list[CollectiveTable], list[Reduction]]:
    load, network, gloo = TorchLoad(), Network.parse(config.network), distributed.is_initialized()
    tables: list[CollectiveTable] = []
    reductions: list[Reduction] = []
    for devices, _ in config.layouts():
        group = first_ranks(comm, devices)
        members = distributed.new_group(list(range(devices))) if gloo else None
        if group is None:
            continue
        overlap = config.overlaps[0] if config.overlaps else "inline"
        reductions.append(
            GlooReduction(members) if gloo else MpiReduction(transport(group, network), config.algorithms[0], overlap)
        )
        link: Any = ReducedMemory(reductions[-1])
        steps = ShardedSteps(group, members, config.max_bytes) if config.runtime == FSDP else None
        for subject in subjects:
            if subject.collective.devices != devices:
                continue
            if steps is not None:
                tables.append(WaitedTable(steps, link, config, group=group, subject=subject, rows=earlier, parts=parts))
            elif not subject.overlap:
                idle = StreamTable(load, link, config, group=group, subject=subject, rows=earlier, parts=parts)
                tables.append(idle)
            else:
                tables.append(BackwardTable(idle, link, subject, load, config))
    return tables, reductions
