"""The transport of ranks with GPUs: MPI for data on the host, CUDA kernels or NCCL for gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mpi4py import MPI

from dpsim.collective import CollectiveKind
from dpsim.comm.clock import now
from dpsim.comm.compression import Compression
from dpsim.comm.cuda.available import open_device
from dpsim.comm.cuda.device import Device, DeviceArray, Event, Stream
from dpsim.comm.cuda.memory import DeviceMemory
from dpsim.comm.cuda.paths import Path, find_path, open_nccl, open_reducer
from dpsim.comm.cuda.peer_memory import PeerMemoryAllreduce
from dpsim.comm.cuda.reducer import Reducer, Task, kernel_of, own_slots
from dpsim.comm.cuda.sums import DeviceSums, sums_of_one_rank
from dpsim.comm.mpi import MpiTransport
from dpsim.comm.transport import (
    Array,
    CollectiveSteps,
    Enqueued,
    PersistentAllreduce,
    Span,
    SteppedAllreduce,
    SummationOrder,
)
from dpsim.kernels.allreduce.cuda.launch import MOST_BLOCKS
from dpsim.kernels.allreduce.tree import PartialSums, slots
from dpsim.memory import HOST, Mark, Memory
from dpsim.replica import OrderedSum

WAIT_LIMIT_S = 600.0
"""How long kernels wait for a rank before training ends with an error: ten minutes, as PyTorch's process groups do."""


class Compute(Protocol):
    """Brings a bucket to the allreduce and takes the sum from it.

    ``memory`` is where gradients are computed, and ``where`` says it for people.
    """

    memory: Memory
    where: str

    def allocate(self, size_bytes: int, reduced: DeviceArray | None) -> Array:
        """Return memory for gradients. ``reduced``: as much, in which kernels reduce them, if any do."""

    def give(self, stream: Stream, complete: Mark, produced: Sequence[Array], bucket: Sequence[DeviceArray]) -> None:
        """Let work that ``stream`` gets later find the final gradients of every slot in ``bucket``.

        ``complete`` is a mark of the memory from after these gradients were computed.
        """

    def take(self, stream: Stream, bucket: DeviceArray, produced: Array) -> Event:
        """Return the event after which the sum in ``bucket`` has reached computation."""


class HostCompute:
    """Computation on the host: each bucket is copied to the device before its allreduce, and back after it.

    Over PCIe that costs more than the allreduce itself. It is for replicas that know no other memory than the host's.
    """

    memory: Memory = HOST
    where = "on the host"

    def __init__(self, device: Device) -> None:
        self._device = device

    def allocate(self, size_bytes: int, reduced: DeviceArray | None) -> Array:
        return self._device.host_memory(size_bytes)

    def give(self, stream: Stream, complete: Mark, produced: Sequence[Array], bucket: Sequence[DeviceArray]) -> None:
        for host, array in zip(produced, bucket, strict=True):
            self._device.upload(stream, host, array)

    def take(self, stream: Stream, bucket: DeviceArray, produced: Array) -> Event:
        self._device.download(stream, bucket, produced)
        return stream.record()


class DeviceCompute:
    """Computation on the device, in the memory that kernels reduce: nothing is copied, streams follow each other."""

    def __init__(self, device: Device) -> None:
        self.memory: Memory = DeviceMemory(device)
        self.where = f"on {device.name}"

    def allocate(self, size_bytes: int, reduced: DeviceArray | None) -> Array:
        return self.memory.zeros(size_bytes) if reduced is None else reduced

    def give(self, stream: Stream, complete: Mark, produced: Sequence[Array], bucket: Sequence[DeviceArray]) -> None:
        stream.follow(complete)

    def take(self, stream: Stream, bucket: DeviceArray, produced: Array) -> Event:
        """Let the host wait for it: the stream of the computation must not, since backward goes on."""
        return stream.record()


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
    """MPI's messages, and an allreduce of allocated memory in the memory of GPUs, in the fixed order of ``tree``.

    It works in one stream, in the order in which buckets are handed in. Data that is not in memory it allocated
    (losses, the initial state) is sent as by ``MpiTransport``. With ``on_device`` the memory that it allocates is the
    device's, for gradients that are computed there; else it is the host's.

    It has one ``reducer``: for ``algorithm`` nccl NCCL's own allreduce, which keeps no order; for any other kernels,
    over the first ``path`` that works. So NCCL and kernels that wait for each other never run at the same time.
    ``most_blocks`` bounds how much of a GPU such a kernel occupies while it waits, for ``wait_limit_s`` at most. Raises
    ``ConfigError`` without a GPU.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        devices_a_node: int = 1,
        *,
        on_device: bool = False,
        algorithm: str = "auto",
        most_blocks: int = MOST_BLOCKS,
        wait_limit_s: float = WAIT_LIMIT_S,
    ) -> None:
        super().__init__(comm, devices_a_node)
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        number = node.rank
        node.Free()
        self.device: Device = open_device(number)
        self.gpus = len(set(comm.allgather(self.device.identity)))
        """The GPUs of all ranks: fewer than ranks where several share one."""
        self.compute: Compute = DeviceCompute(self.device) if on_device else HostCompute(self.device)
        self.memory = self.compute.memory
        self._stream = self.device.stream()
        self._wait_limit_s = wait_limit_s
        self._sums: DeviceSums | None = None
        self._blocks: list[tuple[Array, int]] = []
        """Where gradients are produced, and the number of the block on the devices, from each ``allocate``."""
        self._path = Path(name="host")
        self.reducer: Reducer | None = None
        if comm.size > 1 and algorithm == "nccl":
            self.reducer = open_nccl(comm, self.device)
        elif comm.size > 1:
            self._path = find_path(self.device, comm)
            self.reducer = open_reducer(
                comm, self.device, self._path, most_blocks=most_blocks, wait_limit_s=wait_limit_s
            )

    @property
    def peer_allreduce(self) -> PeerMemoryAllreduce | None:
        """The kernels that reach the memory of all ranks, where they do."""
        return self.reducer if isinstance(self.reducer, PeerMemoryAllreduce) else None

    @property
    def path(self) -> str:
        """How gradients get from GPU to GPU, as records say it; empty for one rank."""
        return self.reducer.path if self.reducer is not None else ""

    @property
    def description(self) -> str:
        """Where gradients are computed and reduced, for people."""
        how = f", {self.reducer.how}" if self.reducer is not None else ""
        why = f" ({self._path.reason})" if self._path.reason else ""
        return f"gradients are computed {self.compute.where} and reduced on {self.device.name}{how}{why}"

    def allocate(self, size_bytes: int) -> Array:
        if self.reducer is None:
            return self.compute.allocate(size_bytes, None)
        number = self.reducer.allocate(size_bytes)
        produced = self.compute.allocate(size_bytes, self.reducer.own(number))
        self._blocks.append((produced, number))
        return produced

    def prepare(
        self,
        data: Array,
        algorithm: str,
        compression: Compression | None,
        order: SummationOrder | None = None,
        kind: CollectiveKind = "allreduce",
        replicas: int = 1,
    ) -> PersistentAllreduce | None:
        """Prepare the kernels' allreduce of memory allocated here, compiled on this rank; its first run is collective.

        What is extra in ``order`` lies in other blocks, as far into them as the data into its own.
        """
        produced = [data, *(order.extra if order is not None else ())]
        locations = [location for array in produced if (location := self._location(array)) is not None]
        reducer = self.reducer
        if reducer is None or kind != "allreduce" or replicas > 1 or len(locations) < len(produced):
            return None
        sums = order.slots if order is not None else slots(range(self.size + 1))
        version = reducer.version(algorithm, data.nbytes, sixteen_bits=compression is not None)
        kernel = kernel_of(data.dtype, version, compression, sums, in_leaves=order is not None)
        _, first = locations[0]
        task = Task(kernel, tuple(number for number, _ in locations), first, first + data.nbytes)
        self.device.use()
        reducer.compile(task)
        bucket = own_slots(reducer, task, self.rank)
        operands = _Operands(task, produced[: len(bucket)], list(bucket))

        def complete() -> None:
            operands.complete = self.memory.mark()

        return SteppedAllreduce(self, lambda: self._rounds(reducer, operands), complete, lambda: operands.span)

    def sums_between_layers(self, sums: PartialSums, most_elements: Mapping[str, int]) -> OrderedSum | None:
        if not self.memory.deferred:
            return None
        if self.reducer is None:
            return sums_of_one_rank(sums)
        if self._sums is None:
            stream = self.memory.stream
            self._sums = DeviceSums(self, self.comm, self.device, self._path, stream, self._wait_limit_s)
        return self._sums.adder(sums, most_elements)

    def _location(self, data: Array) -> tuple[int, int] | None:
        """Return the number of the block in which data lies, and its first byte there; None if it lies elsewhere."""
        for produced, number in self._blocks:
            first = self.memory.address(data) - self.memory.address(produced)
            if 0 <= first <= first + data.nbytes <= produced.nbytes:
                return number, first
        return None

    def close(self) -> None:
        self.device.use()
        self.device.settle()
        self._blocks.clear()
        if self._sums is not None:
            self._sums.close()
        if self.reducer is not None:
            self.reducer.close()

    def _rounds(self, reducer: Reducer, operands: _Operands) -> CollectiveSteps:
        self.device.use()
        complete, operands.complete = operands.complete or self.memory.mark(), None
        yield from reducer.agree(operands.task)
        reducer.check()
        asked_s = now()
        self.compute.give(self._stream, complete, operands.produced, operands.bucket)
        began = self._stream.record()
        yield from reducer.reduce(operands.task, self._stream)
        done = self.compute.take(self._stream, operands.bucket[0], operands.produced[0])
        operands.span = Span(began, done, asked_s)
        # what is in the stream as a whole may be followed at once; else messages of two allreduces would mix
        yield Enqueued([done]) if reducer.queued else [done]
        reducer.check()
