"""The transport of ranks with GPUs on one machine: MPI for data on the host, CUDA kernels for gradients."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mpi4py import MPI

from dpsim.collective import CollectiveKind
from dpsim.comm.clock import now
from dpsim.comm.compression import Compression
from dpsim.comm.cuda.access import Access, find_access
from dpsim.comm.cuda.available import open_device
from dpsim.comm.cuda.compute import Compute, DeviceCompute, HostCompute
from dpsim.comm.cuda.device import Device, DeviceArray
from dpsim.comm.cuda.launches import Launches, Task, kernel_of
from dpsim.comm.cuda.sums import DeviceSums, sums_of_one_rank
from dpsim.comm.mpi import MpiRequest, MpiTransport
from dpsim.comm.transport import (
    Array,
    CollectiveSteps,
    Enqueued,
    PersistentAllreduce,
    Span,
    SteppedAllreduce,
    SummationOrder,
)
from dpsim.errors import ConfigError
from dpsim.kernels.allreduce.cuda.launch import MOST_BLOCKS
from dpsim.kernels.allreduce.tree import PartialSums, slots
from dpsim.memory import Mark
from dpsim.replica import OrderedSum

WAIT_LIMIT_S = 600.0
"""How long kernels wait for a rank before training ends with an error: ten minutes, as PyTorch's process groups do."""


class _Block(NamedTuple):
    """Memory from one ``allocate``: where gradients are produced, and the number of its block on the devices."""

    produced: Array
    number: int


class _Place(NamedTuple):
    """Bytes ``first`` to ``stop - 1`` of the block of a number."""

    number: int
    first: int
    stop: int


@dataclass
class _Operands:
    """What is reduced by a task: this rank's slots where they are produced, and where kernels reduce them.

    ``complete``: the mark after which the gradients are final, if that was said before the allreduce begins.
    ``span``: where the last run was in the stream of communication.
    """

    task: Task
    produced: list[Array]
    bucket: list[DeviceArray]
    complete: Mark | None = None
    span: Span | None = None


class CudaTransport(MpiTransport):
    """MPI's messages, and an allreduce of allocated memory by the CUDA kernels, in the fixed order of ``tree``.

    Its kernels run in one stream, in the order in which buckets are handed in. Data that is not in memory it allocated
    (losses, the initial state) is sent as by ``MpiTransport``. With ``on_device`` the memory that it allocates is the
    device's, for gradients that are computed there; else it is the host's. ``most_blocks`` bounds how much of a GPU a
    kernel occupies while it waits for other ranks, for ``wait_limit_s`` at most. Raises ``ConfigError`` without a GPU
    and for ranks on several machines.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        devices_a_node: int = 1,
        *,
        on_device: bool = False,
        most_blocks: int = MOST_BLOCKS,
        wait_limit_s: float = WAIT_LIMIT_S,
    ) -> None:
        super().__init__(comm, devices_a_node)
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        number, local_ranks = node.rank, node.size
        node.Free()
        if local_ranks != comm.size:
            raise ConfigError(
                f"backend 'cuda' for {comm.size} ranks of which {local_ranks} are on this machine",
                allowed="ranks of one machine",
                remedy="use --backend cpu between machines",
            )
        self.device: Device = open_device(number)
        self.compute: Compute = DeviceCompute(self.device) if on_device else HostCompute(self.device)
        self.memory = self.compute.memory
        self.access: Access | None = find_access(self.device, comm) if comm.size > 1 else None
        self._stream = self.device.stream()
        self._wait_limit_s = wait_limit_s
        self._sums: DeviceSums | None = None
        self._blocks: list[_Block] = []
        self.launches: Launches | None = None
        if self.access is not None:
            self.launches = Launches(comm, self.device, self.access, most_blocks=most_blocks, wait_limit_s=wait_limit_s)

    @property
    def description(self) -> str:
        """Where gradients are computed and reduced, for people."""
        how = f", {self.access.mode} over {self.access.way} memory" if self.access is not None else ""
        return f"gradients are computed {self.compute.where} and reduced on {self.device.name}{how}"

    def allocate(self, size_bytes: int) -> Array:
        if self.launches is None:
            return self.compute.allocate(size_bytes, None)
        number = self.launches.allocate(size_bytes)
        produced = self.compute.allocate(size_bytes, self.launches.memory(number, self.rank))
        self._blocks.append(_Block(produced, number))
        return produced

    def prepare(
        self,
        data: Array,
        algorithm: str,
        compression: Compression | None,
        order: SummationOrder | None = None,
        kind: CollectiveKind = "allreduce",
    ) -> PersistentAllreduce | None:
        """The kernels' allreduce of memory that it allocated, compiled on this rank; its first run is collective.

        What is extra in ``order`` lies in other blocks, as far into them as the data into its own.
        """
        produced = [data, *(order.extra if order is not None else ())]
        places = [place for array in produced if (place := self._place(array)) is not None]
        if self.launches is None or kind != "allreduce" or len(places) < len(produced):
            return None
        sums = order.slots if order is not None else slots(range(self.size + 1))
        kernel = kernel_of(data.dtype, algorithm, compression, sums)
        task = Task(kernel, tuple(place.number for place in places), places[0].first, places[0].stop)
        self.device.use()
        self.launches.compile(task)
        arrays = self.launches.arrays(task)
        held = sums.of(self.rank)
        operands = _Operands(task, produced[: len(held)], [arrays[number] for number in held])

        def complete() -> None:
            operands.complete = self.memory.mark()

        rounds = functools.partial(self._rounds, self.launches, operands)
        return SteppedAllreduce(self, rounds, complete, lambda: operands.span)

    def sums_between_layers(self, sums: PartialSums, most_elements: Mapping[str, int]) -> OrderedSum | None:
        if not self.memory.deferred:
            return None
        if self.access is None:
            return sums_of_one_rank(sums)
        if self._sums is None:
            stream = self.memory.stream
            self._sums = DeviceSums(self, self.comm, self.device, self.access, stream, self._wait_limit_s)
        return self._sums.of(sums, most_elements)

    def _place(self, data: Array) -> _Place | None:
        """Where data lies in the memory that was allocated; None if it lies elsewhere."""
        for produced, number in self._blocks:
            first = self.memory.address(data) - self.memory.address(produced)
            if 0 <= first <= first + data.nbytes <= produced.nbytes:
                return _Place(number, first, first + data.nbytes)
        return None

    def close(self) -> None:
        self.device.use()
        self.device.settle()
        self._blocks.clear()
        if self._sums is not None:
            self._sums.close()
        if self.launches is not None:
            self.launches.close()

    def _rounds(self, launches: Launches, operands: _Operands) -> CollectiveSteps:
        """The stages of a kernel, each once every rank has done the one before (see ``Launch``)."""
        self.device.use()
        complete, operands.complete = operands.complete or self.memory.mark(), None
        yield from launches.agree(operands.task)
        launches.check()
        stages, asked_s = launches.launch(operands.task).stages, now()
        self.compute.give(self._stream, complete, operands.produced, operands.bucket)
        began = self._stream.record()
        for number, stage in enumerate(stages):
            if number:
                yield [self._stream.record()]
                yield [MpiRequest([self.comm.Ibarrier()])]
                self.device.use()
            stage(self._stream.launch)
        done = self.compute.take(self._stream, operands.bucket[0], operands.produced[0])
        operands.span = Span(began, done, asked_s)
        # with flags the next kernel may follow at once; without them its host barriers would mix with these
        yield Enqueued([done]) if self.access is not None and self.access.mode == "flags" else [done]
        launches.check()
