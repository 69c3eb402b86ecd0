"""``PeerMemoryAllreduce``: kernels that reach the memory of all ranks' devices, compiled before any rank needs them.

No kernel may be compiled while another rank's kernel waits: that takes seconds. So ``compile`` compiles on this rank
and asks nobody; the first run of a kernel then learns that all ranks have compiled it (``agree``), and binds it to all
memory that has been prepared for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from mpi4py import MPI

from dpsim.algorithms import CUDA_VERSIONS
from dpsim.comm.cuda import reducer
from dpsim.comm.cuda.device import Device, DeviceArray, PeerMemory, Stream
from dpsim.comm.cuda.peer_access import Mode, PeerAccess
from dpsim.comm.cuda.reducer import Kernel, Task, agreement
from dpsim.comm.mpi import MpiRequest
from dpsim.comm.transport import CollectiveSteps
from dpsim.errors import CommunicationError, ConfigError, DpsimError, unknown
from dpsim.kernels.allreduce import registry
from dpsim.kernels.allreduce.cuda.launch import MOST_BLOCKS, Codes, Launch, Watch, flag_words
from dpsim.units import format_size

SAVED_BYTES = 256 << 10
"""What a link moves while ``two-shot`` waits for its writes into other GPUs, which ``one-shot`` does without: about
1 us, at the 300 GB/s of NVLink. By data sheets, not measured; ``make gpu-check`` times both versions at every size."""

ONE_WAVE_BYTES = MOST_BLOCKS * 512 * 16
"""What the threads of a rank hold in registers at once; beyond it ``one-shot`` waits again for every such piece."""


def one_shot_bytes(ranks: int) -> int:
    """Return the size up to which one-shot is taken: what it reads more takes no longer than what it saves.

    With n ranks and S bytes, a rank reads (n - 1) S of others in one-shot; in two-shot it reads (n - 1) / n of S and
    writes as much to others.
    """
    more = (ranks - 1) * (1 - 2 / ranks)
    return min(ONE_WAVE_BYTES, int(SAVED_BYTES / more)) if more else ONE_WAVE_BYTES


def version_of_auto(ranks: int, size_bytes: int, mode: Mode, *, sixteen_bits: bool) -> str:
    """Return the version for ``size_bytes``, the same on every rank: one-shot where it is faster, else two-shot.

    In ``split`` kernels end where ranks wait, and one-shot has one more such place. Only two-shot sends 16 bits. Both
    versions add in the fixed order, so the choice changes no bits.
    """
    if mode == "split" or sixteen_bits or size_bytes > one_shot_bytes(ranks):
        return "two-shot"
    return "one-shot"


@dataclass
class _Compiled:
    """A kernel on this rank. ``blocks``: how many can run at once here; once agreed, how many each rank starts."""

    blocks: int = 0
    error: DpsimError | None = None
    agreed: bool = False
    prepared: list[Task] = field(default_factory=list)


class PeerMemoryAllreduce:
    """A ``Reducer`` of memory that all ranks' kernels reach, and the kernels that are bound to parts of it.

    Where they wait for each other inside (``flags``), a kernel is put into the stream and the next one may follow.
    Elsewhere they stop where ranks wait for each other, and barriers of the hosts are between.
    """

    path = "peer memory"

    def __init__(
        self, comm: MPI.Intracomm, device: Device, access: PeerAccess, *, most_blocks: int, wait_limit_s: float
    ) -> None:
        self._comm, self._device, self._access, self._most_blocks = comm, device, access, most_blocks
        self.how, self.queued = f"{access.mode} over {access.mapping} memory", access.mode == "flags"
        self._blocks: list[PeerMemory] = []
        self._codes: dict[int, PeerMemory] = {}
        self._compiled: dict[Kernel, _Compiled] = {}
        self._kept: dict[Task, Launch] = {}
        self._recent: dict[Task, Launch] = {}
        self._flags: list[PeerMemory] = []
        self._watch: Watch | None = None
        if access.mode == "flags":
            self._flags.append(self._share(4 * flag_words(comm.size, most_blocks)))
            self._watch = Watch(limit_s=wait_limit_s, report=device.host_memory(4).view(np.uint32))

    def version(self, algorithm: str, size_bytes: int, *, sixteen_bits: bool) -> str:
        if algorithm == "auto":
            return version_of_auto(self._comm.size, size_bytes, self._access.mode, sixteen_bits=sixteen_bits)
        if algorithm not in CUDA_VERSIONS:
            raise unknown("CUDA kernel for the algorithm", algorithm, tuple(CUDA_VERSIONS))
        return CUDA_VERSIONS[algorithm]

    def allocate(self, size_bytes: int) -> int:
        self._blocks.append(self._share(size_bytes))
        return len(self._blocks) - 1

    def own(self, number: int) -> DeviceArray:
        return self._blocks[number].ranks[self._comm.rank]

    def compile(self, task: Task) -> None:
        compiled = self._compiled.get(task.kernel)
        if compiled is None:
            compiled = self._compiled[task.kernel] = _Compiled()
            try:
                compiled.blocks = self._make(task, 1).blocks_at_once
            except DpsimError as error:
                compiled.error = error
        if not compiled.agreed:
            compiled.prepared.append(task)

    def agree(self, task: Task) -> CollectiveSteps:
        """Wait until all ranks have compiled the task's kernel, then bind all that is prepared; before its first run.

        All ranks take the number of blocks that runs at once on each of their GPUs.
        """
        compiled = self._compiled[task.kernel]
        if not compiled.agreed:
            least = yield from agreement(self._comm, self._device, compiled.error, compiled.blocks)
            compiled.blocks, compiled.agreed = min(least, self._most_blocks), True
        for number in task.blocks if task.kernel.compression is not None else ():
            if number not in self._codes:
                self._codes[number] = self._share(self._blocks[number].ranks[0].nbytes // 2)
        ready = [each for each in compiled.prepared if self._has_codes(each)]
        self._kept |= {each: self._make(each, compiled.blocks) for each in ready}
        # the others wait until their blocks of memory are reduced for the first time
        compiled.prepared = [each for each in compiled.prepared if each not in self._kept]

    def reduce(self, task: Task, stream: Stream) -> CollectiveSteps:
        self.check()
        for number, stage in enumerate(self._launch(task).stages):
            if number:
                yield [stream.record()]
                yield [MpiRequest([self._comm.Ibarrier()])]
                self._device.use()
            stage(stream.launch)

    @property
    def bound(self) -> tuple[Launch, ...]:
        """All launches that are kept."""
        return (*self._kept.values(), *self._recent.values())

    def check(self) -> None:
        if self._watch is not None:
            self._watch.check(self._comm.size)

    def close(self) -> None:
        self._kept.clear()
        self._recent.clear()
        self._compiled.clear()
        for memory in (*self._blocks, *self._codes.values(), *self._flags):
            memory.close()
        self._blocks.clear()
        self._codes.clear()
        self._flags.clear()

    def _launch(self, task: Task) -> Launch:
        if (bound := self._kept.get(task)) is not None:
            return bound
        launch = self._recent.pop(task, None) or self._make(task, self._compiled[task.kernel].blocks)
        self._recent[task] = launch
        if len(self._recent) > reducer.MOST_RECENT:
            del self._recent[next(iter(self._recent))]
        return launch

    def _has_codes(self, task: Task) -> bool:
        return task.kernel.compression is None or all(number in self._codes for number in task.blocks)

    def _locations(self, task: Task) -> list[tuple[int, int]]:
        """Return the number of the block, and the owner, of each partial sum."""
        sums = task.kernel.sums
        return [(task.blocks[sums.of(owner).index(slot)], owner) for slot, owner in enumerate(sums.owners)]

    def _make(self, task: Task, blocks: int) -> Launch:
        dtype, size_bytes = np.dtype(task.kernel.dtype), task.stop - task.first
        arrays = [self._blocks[number].ranks[owner] for number, owner in self._locations(task)]
        arrays = [array[task.first : task.stop].view(dtype) for array in arrays]
        version = registry.find("cuda", task.kernel.version)
        if version.most_bytes is not None and size_bytes > version.most_bytes:
            raise ConfigError(
                f"a {version.name} allreduce of {format_size(size_bytes)} on GPUs",
                allowed=f"at most {format_size(version.most_bytes)}",
                remedy="lower --fusion-threshold, or leave --algorithm out",
            )
        launch: Launch = version.make(
            arrays,
            task.kernel.sums,
            rank=self._comm.rank,
            mode=self._access.mode,
            flags=[memory.view(np.uint32) for shared in self._flags for memory in shared.ranks],
            compression=self._codes_of(task, arrays),
            most_blocks=max(blocks, 1),
            watch=self._watch,
            each_sum=task.kernel.each_sum,
        )
        return launch

    def _codes_of(self, task: Task, arrays: list[DeviceArray]) -> Codes | None:
        """Return where a task's codes lie: as far into their memory as its numbers are into theirs."""
        if task.kernel.compression is None:
            return None
        dtype, scale = task.kernel.compression
        if self._has_codes(task):
            memory = (self._codes[number].ranks[owner] for number, owner in self._locations(task))
            codes = [array[task.first // 2 : task.stop // 2].view(np.uint16) for array in memory]
        else:  # only to compile: memory of the right kind, which nothing is written to
            codes = [array.view(np.uint16)[: array.size] for array in arrays]
        return Codes(dtype=dtype, scale=scale, arrays=codes)

    def _share(self, size_bytes: int) -> PeerMemory:
        memory = self._device.share(self._comm, size_bytes, self._access.mapping)
        if memory is None:
            raise CommunicationError(
                f"there is no room for {size_bytes} bytes that all ranks' GPUs reach",
                remedy="use a smaller model, or --backend cpu",
            )
        return memory
