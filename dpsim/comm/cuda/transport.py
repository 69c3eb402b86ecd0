"""The transport of ranks with GPUs on one machine: MPI for data on the host, CUDA kernels for gradients."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from dpsim.collective import CollectiveKind
from dpsim.comm.compression import Compression
from dpsim.comm.cuda.access import Access, find_access
from dpsim.comm.cuda.available import open_device
from dpsim.comm.cuda.compute import Compute, HostCompute
from dpsim.comm.cuda.device import Device, DeviceArray
from dpsim.comm.cuda.launches import Launches, Task, kernel_of
from dpsim.comm.mpi import MpiRequest, MpiTransport
from dpsim.comm.transport import (
    Array,
    CollectiveSteps,
    Enqueued,
    PersistentAllreduce,
    SteppedAllreduce,
    SummationOrder,
)
from dpsim.errors import ConfigError
from dpsim.kernels.allreduce.cuda.launch import MOST_BLOCKS

WAIT_LIMIT_S = 600.0
"""How long kernels wait for a rank before training ends with an error: ten minutes, as PyTorch's process groups do."""


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Memory from one ``allocate``: where gradients are produced, and the number of its block on the devices."""

    produced: NDArray[np.uint8]
    number: int

    def place(self, data: Array) -> slice | None:
        """Where ``data`` lies in the block; None if it lies elsewhere."""
        first = data.ctypes.data - self.produced.ctypes.data
        inside = first >= 0 and first + data.nbytes <= self.produced.nbytes
        return slice(first, first + data.nbytes) if inside else None


class CudaTransport(MpiTransport):
    """MPI's messages, and an allreduce of allocated memory by the CUDA kernels, in the fixed order of ``tree``.

    Its kernels run in one stream, in the order in which buckets are handed in. Data that is not in memory it allocated
    (losses, the initial state) is sent as by ``MpiTransport``. ``most_blocks`` bounds how much of a GPU a kernel
    occupies while it waits for other ranks, for ``wait_limit_s`` at most. Raises ``ConfigError`` without a GPU and for
    ranks on several machines.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        devices_a_node: int = 1,
        *,
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
        self.compute: Compute = HostCompute(self.device)
        self.access: Access | None = find_access(self.device, comm) if comm.size > 1 else None
        self._stream = self.device.stream()
        self._blocks: list[_Block] = []
        self.launches: Launches | None = None
        if self.access is not None:
            self.launches = Launches(comm, self.device, self.access, most_blocks=most_blocks, wait_limit_s=wait_limit_s)

    @property
    def description(self) -> str:
        """Where gradients are computed and reduced, for people."""
        how = f", {self.access.mode} over {self.access.way} memory" if self.access is not None else ""
        return f"gradients are computed on the host and reduced on {self.device.name}{how}"

    def allocate(self, size_bytes: int) -> NDArray[np.uint8]:
        produced = self.compute.allocate(size_bytes)
        if self.launches is not None:
            self._blocks.append(_Block(produced=produced, number=self.launches.allocate(size_bytes)))
        return produced

    def prepare(
        self,
        data: Array,
        algorithm: str,
        compression: Compression | None,
        order: SummationOrder | None = None,
        kind: CollectiveKind = "allreduce",
    ) -> PersistentAllreduce | None:
        """The kernels' allreduce of memory that it allocated, compiled on this rank; its first run is collective."""
        for block in self._blocks if order is None and kind == "allreduce" else ():
            if self.launches is not None and (place := block.place(data)) is not None:
                task = Task(kernel_of(data.dtype, algorithm, compression), block.number, place.start, place.stop)
                self.device.use()
                self.launches.compile(task)
                bucket = self.launches.arrays(task)[self.rank]
                return SteppedAllreduce(self, functools.partial(self._rounds, self.launches, task, bucket, data))
        return None

    def close(self) -> None:
        self.device.use()
        self._stream.wait()
        self._blocks.clear()
        if self.launches is not None:
            self.launches.close()

    def _rounds(self, launches: Launches, task: Task, bucket: DeviceArray, data: Array) -> CollectiveSteps:
        """The stages of a kernel, each once every rank has done the one before (see ``Launch``)."""
        self.device.use()
        yield from launches.agree(task)
        launches.check()
        stages = launches.launch(task).stages
        self.compute.give(self._stream, data, bucket)
        for number, stage in enumerate(stages):
            if number:
                yield [self._stream.record()]
                yield [MpiRequest([self.comm.Ibarrier()])]
                self.device.use()
            stage(self._stream.launch)
        done = self.compute.take(self._stream, bucket, data)
        # with flags the next kernel may follow at once; without them its host barriers would mix with these
        yield Enqueued([done]) if self.access is not None and self.access.mode == "flags" else [done]
        launches.check()
