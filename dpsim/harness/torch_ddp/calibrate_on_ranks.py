"""Calibrates the allreduces that DDP starts, by gloo or through a hook: with nothing else running, and beside backward.

Loads torch on the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from torch import distributed

from dpsim import codec
from dpsim.comm.clock import now
from dpsim.comm.group import first_ranks, quiet_barrier, quiet_start
from dpsim.comm.networks import transport
from dpsim.comm.progress import Progress as AllreduceProgress
from dpsim.harness.measurement.loop import StopRule, rounds
from dpsim.harness.torch_ddp.task import CalibrationTask
from dpsim.machine import Network
from dpsim.progress import Progress
from dpsim.study.calibration import TIME_S, CalibrateConfig
from dpsim.study.rows import Rows
from dpsim.study.runners.calibration import CollectiveTable, LoadedTable
from dpsim.study.runners.load import nothing
from dpsim.torch_ddp.reductions import FutureProgress, GlooReduction, MpiReduction, ReducedArray, Reduction

_LEAST_ROUNDS, _LONG_S = 5, 2.0
"""A shorter calibration has two rounds at least, which is enough to try things out."""
_NAP_S = 1e-4
_WIDTH, _LAYERS, _BATCH = 512, 6, 64
_MOST_AT_ONCE = 24
_STREAMS = 3


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

    def __init__(self, group: MPI.Intracomm, link: Any, task: CalibrationTask, load: TorchLoad, rows: Rows) -> None:
        self._load, self._reduction, self._step_bytes = load, link.reduction, task.max_bytes
        (subject,) = (each for each in task.collectives() if each.collective.devices == group.size and not each.overlap)
        super().__init__(group, link, subject, CalibrateConfig(max_bytes=task.max_bytes), rows)

    def _prepare(self) -> None:
        self._streams = {size: self._stream(size, at_once(size, self._step_bytes)) for size in self.sizes}

    def _stream(self, size: int, count: int) -> list[tuple[NDArray[np.float32], ReducedArray]]:
        """Arrays that are reduced at once."""
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


def calibrate_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """The tables of a ``CalibrationTask``; rank 0 returns them as plain values, as other calibrations do."""
    task = codec.decode(argument, CalibrationTask, "calibration")
    counts = " and ".join(map(str, task.devices))
    report(f"calibrating the allreduces of {task.runtime} on {counts} devices, network {task.network}")
    quiet_barrier(comm)
    rows = Rows()
    tables, reductions = _tables(comm, task, rows)
    least_rounds = _LEAST_ROUNDS if task.seconds >= _LONG_S else 2
    stop = StopRule(least_rounds=least_rounds, least_s=task.seconds, most_s=2 * task.seconds)
    for current in rounds(stop, suffice=lambda: True, comm=comm):
        for table in tables:
            table.visit(current.number, counted=True)
        quiet_barrier(comm)
    for table in tables:
        table.close()
    for reduction in reductions:
        reduction.close()
    if distributed.is_initialized():
        distributed.destroy_process_group()
    return {"rows": codec.to_builtins(rows.series())} if comm.rank == 0 else None


def _tables(comm: MPI.Intracomm, task: CalibrationTask, rows: Rows) -> tuple[list[CollectiveTable], list[Reduction]]:
    """The tables in which this rank takes part: idle for each number of devices, and beside backward."""
    load, network = TorchLoad(), Network.parse(task.network)
    if task.runtime == "torch-ddp-gloo":
        store = distributed.FileStore(str(Path(task.folder) / "calibration"), comm.size)
        distributed.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    tables: list[CollectiveTable] = []
    reductions: list[Reduction] = []
    for devices in task.devices:
        group = first_ranks(comm, devices)
        gloo = distributed.new_group(list(range(devices))) if task.runtime == "torch-ddp-gloo" else None
        if group is None:
            continue
        reduction: Reduction = (
            GlooReduction(gloo)
            if task.runtime == "torch-ddp-gloo"
            else MpiReduction(transport(group, network), task.algorithm, task.overlap)
        )
        reductions.append(reduction)
        link: Any = ReducedMemory(reduction)
        idle = StreamTable(group, link, task, load, rows)
        tables.append(idle)
        for subject in task.collectives():
            if subject.overlap and subject.collective.devices == devices:
                config = CalibrateConfig(max_bytes=task.max_bytes)
                tables.append(BackwardTable.beside(idle, link, subject, load, config))
    return tables, reductions
