"""The transport of ranks with GPUs on one machine: MPI for data on the host, CUDA kernels for gradients."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from dpsim.backend import CUDA_VERSIONS
from dpsim.collective import CollectiveKind
from dpsim.comm.compression import Compression
from dpsim.comm.cuda.access import Access, find_access
from dpsim.comm.cuda.available import open_device
from dpsim.comm.cuda.compute import Compute, HostCompute
from dpsim.comm.cuda.device import Device, PeerMemory
from dpsim.comm.mpi import MpiRequest, MpiTransport
from dpsim.comm.transport import Array, CollectiveSteps, PersistentAllreduce, SteppedAllreduce, SummationOrder
from dpsim.errors import CommunicationError, ConfigError
from dpsim.kernels.allreduce import registry, tree
from dpsim.kernels.allreduce.cuda.launch import Codes, Launch, flag_words


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Memory from one ``allocate``: where gradients are produced, and as many bytes on every rank's device."""

    produced: NDArray[np.uint8]
    memory: PeerMemory

    def place(self, data: Array) -> slice | None:
        """Where ``data`` lies in the block; None if it lies elsewhere."""
        first = data.ctypes.data - self.produced.ctypes.data
        inside = first >= 0 and first + data.nbytes <= self.produced.nbytes
        return slice(first, first + data.nbytes) if inside else None


class CudaTransport(MpiTransport):
    """MPI's messages, and an allreduce of allocated memory by the CUDA kernels, in the fixed order of ``tree``.

    Its kernels run in one stream, in the order in which buckets are handed in. Data that is not in memory it allocated
    (losses, the initial state) is sent as by ``MpiTransport``. Raises ``ConfigError`` without a GPU and for ranks
    on several machines.
    """

    def __init__(self, comm: MPI.Intracomm, devices_a_node: int = 1) -> None:
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
        self._codes: list[PeerMemory] = []
        self._flags: list[PeerMemory] = []
        if self.access is not None and self.access.mode == "flags":
            self._flags.append(self._share(4 * flag_words(comm.size)))
        self._launches: dict[tuple[int, int, str], Launch] = {}

    @property
    def description(self) -> str:
        """Where gradients are computed and reduced, for people."""
        how = f", {self.access.mode} over {self.access.way} memory" if self.access is not None else ""
        return f"gradients are computed on the host and reduced on {self.device.name}{how}"

    def allocate(self, size_bytes: int) -> NDArray[np.uint8]:
        produced = self.compute.allocate(size_bytes)
        if self.access is not None:
            self._blocks.append(_Block(produced=produced, memory=self._share(size_bytes)))
        return produced

    def prepare(
        self,
        data: Array,
        algorithm: str,
        compression: Compression | None,
        order: SummationOrder | None = None,
        kind: CollectiveKind = "allreduce",
    ) -> PersistentAllreduce | None:
        """The kernels' allreduce of memory that it allocated; the first run compiles them, collectively."""
        for block in self._blocks if order is None and kind == "allreduce" else ():
            if (place := block.place(data)) is not None:
                begin = functools.partial(self._rounds, block, place, data, algorithm, compression)
                return SteppedAllreduce(self, begin)
        return None

    def close(self) -> None:
        self.device.use()
        self._stream.wait()
        self._launches.clear()
        for memory in [block.memory for block in self._blocks] + self._codes + self._flags:
            memory.close()
        for shared in (self._blocks, self._codes, self._flags):
            shared.clear()

    def _rounds(
        self, block: _Block, place: slice, data: Array, algorithm: str, compression: Compression | None
    ) -> CollectiveSteps:
        """The stages of a kernel, each once every rank has done the one before (see ``Launch``)."""
        self.device.use()
        stages = self._launch(block, place, data, algorithm, compression).stages
        bucket = block.memory.ranks[self.rank][place].view(data.dtype)
        self.compute.give(self._stream, data, bucket)
        for number, stage in enumerate(stages):
            if number:
                yield [self._stream.record()]
                yield [MpiRequest([self.comm.Ibarrier()])]
                self.device.use()
            stage(self._stream.launch)
        yield [self.compute.take(self._stream, bucket, data)]

    def _launch(
        self, block: _Block, place: slice, data: Array, algorithm: str, compression: Compression | None
    ) -> Launch:
        """The kernel for these bytes, compiled and bound to them when they are first reduced. Collective then."""
        assert self.access is not None
        key = (data.ctypes.data, data.nbytes, algorithm)
        if key not in self._launches:
            self._launches[key] = registry.find("cuda", CUDA_VERSIONS[algorithm]).make(
                [memory[place].view(data.dtype) for memory in block.memory.ranks],
                tree.slots(range(self.size + 1)),
                rank=self.rank,
                mode=self.access.mode,
                flags=[memory.view(np.uint32) for shared in self._flags for memory in shared.ranks],
                compression=None if compression is None else self._codes_of(data.size, compression),
            )
        return self._launches[key]

    def _codes_of(self, elements: int, compression: Compression) -> Codes:
        memory = self._share(2 * elements)
        self._codes.append(memory)
        return Codes(
            dtype=compression.dtype, scale=compression.scale, arrays=[array.view(np.uint16) for array in memory.ranks]
        )

    def _share(self, size_bytes: int) -> PeerMemory:
        assert self.access is not None
        memory = self.device.share(self.comm, size_bytes, self.access.way)
        if memory is None:
            raise CommunicationError(
                f"there is no room for {size_bytes} bytes that all ranks' GPUs reach",
                remedy="use a smaller model, or --backend cpu",
            )
        return memory
