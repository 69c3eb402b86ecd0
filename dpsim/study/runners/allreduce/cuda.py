"""dpsim and NCCL as systems of the allreduce benchmark on GPUs.

Logical devices share the memory of one GPU and one process, and are timed by the GPU's events. Between GPUs each has
a process: a sample is the host's time from a barrier to the end of the stream, which a training step waits for, so it
includes launches and host barriers.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import abstractmethod
from typing import Any

import numpy as np
from mpi4py import MPI

from dpsim.algorithms import CUDA_VERSIONS
from dpsim.comm.cuda.available import cupy_version, open_device
from dpsim.comm.cuda.device import Device, DeviceArray
from dpsim.comm.cuda.nccl import Nccl
from dpsim.comm.cuda.peer_access import find_access
from dpsim.comm.cuda.peer_memory import PeerMemoryAllreduce
from dpsim.comm.cuda.reducer import Kernel, Task
from dpsim.comm.transport import CollectiveSteps
from dpsim.errors import CommunicationError, ConfigError
from dpsim.kernels.allreduce.cuda.launch import MOST_BLOCKS
from dpsim.kernels.allreduce.reference import from_bfloat16
from dpsim.kernels.allreduce.registry import Version, find, versions
from dpsim.kernels.allreduce.tree import slots
from dpsim.study.environment import version as installed_version
from dpsim.study.runners.allreduce.logical import (
    HEAD_START_BYTES,
    PERIOD,
    Buffers,
    Timed,
    bits,
    buffers,
    encoded,
    kind,
    lane,
    placed,
    prepared,
)
from dpsim.study.runners.allreduce.turns import MEMCPY, SCALE, SCALING, Burst, SystemRank, Variant, clock
from dpsim.units import format_size

DEFAULT = CUDA_VERSIONS["auto"]
_SIMULATED_HEAD_START_BYTES = 4
_WAIT_LIMIT_S = 30.0
"""How long kernels wait for a rank: all begin a call at a barrier of their hosts."""


class CudaRank(SystemRank):
    """A rank with a GPU. ``argument`` names the ``dtype``, and the versions that are measured as ``algorithms``."""

    def __init__(self, comm: MPI.Intracomm, argument: dict[str, Any]) -> None:
        super().__init__()
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.comm, self.rank, self.device = comm, comm.rank, open_device(node.rank)
        node.Free()
        self.device.use()
        self.simulated, self.library = self.device.simulated, _library(self.device)
        self._dtype: str = argument["dtype"]
        self._algorithms: list[str] = argument["algorithms"]

    def check(self, size_bytes: int, seed: int) -> list[tuple[Variant, int]]:
        """See ``SystemRank``: a burst of one call, whose elements are all compared."""
        return [(variant, self.burst(variant, Burst())[1]) for variant in self.variants(size_bytes, seed)]

    @abstractmethod
    def variants(self, size_bytes: int, seed: int) -> list[Variant]:
        """Return the variants of an allreduce of this size with their numbers, in the same order on every rank."""

    def _versions(self, size_bytes: int) -> list[Version]:
        """Return the requested versions that take arrays of this size."""
        return [
            version
            for version in versions("cuda")
            if version.name in self._algorithms and size_bytes <= (version.most_bytes or size_bytes)
        ]


def _library(device: Device) -> str:
    """Return the device, and the libraries that run kernels on it."""
    cupy = "" if device.simulated else f", CuPy {cupy_version()}"
    return f"{device.name}, numba-cuda {installed_version('numba-cuda')}{cupy}"


class LogicalDevices(CudaRank):
    """All logical devices of one GPU, ``argument["ranks"]`` of them, timed by the GPU's events."""

    def __init__(self, comm: MPI.Intracomm, argument: dict[str, Any]) -> None:
        super().__init__(comm, argument)
        self._slots = slots(range(argument["ranks"] + 1))
        self._lane = lane(self.device, _SIMULATED_HEAD_START_BYTES if self.simulated else HEAD_START_BYTES)
        self._prepared = functools.partial(prepared, mode="split" if self.simulated else "one-launch")

    def variants(self, size_bytes: int, seed: int) -> list[Variant]:
        """See ``CudaRank``: scaling and a copy first. Raises ``ConfigError`` where memory does not suffice."""
        memory = self._memory(size_bytes, seed)
        whole, source = memory.whole, self.device.memory(memory.whole.nbytes)
        in_place = functools.partial(Variant, source=whole, target=whole, numbers=memory)
        out_of_place = functools.partial(Variant, source=source, target=whole, numbers=memory)
        variants = [
            in_place(algorithm=SCALING, call=self._scaling(whole)),
            out_of_place(algorithm=MEMCPY, call=functools.partial(self._copy_first, source, whole, None)),
        ]
        for version in self._versions(size_bytes):
            call = self._prepared(version, memory.ranks, self._slots)
            after_copy = functools.partial(self._copy_first, source, whole, call)
            variants += [
                in_place(algorithm=version.name, call=call),
                out_of_place(algorithm=version.name, call=after_copy),
            ]
            if version.name == DEFAULT:
                again = self._prepared(version, memory.ranks, self._slots)
                variants.append(in_place(algorithm=DEFAULT, call=again, repeat=1))
        return variants

    def _memory(self, size_bytes: int, seed: int) -> Buffers:
        count = len(self._slots.owners)
        needed, free = (4 * count + 1) * size_bytes, self.device.free_bytes()
        if needed > free:
            raise ConfigError(
                f"arrays of {format_size(size_bytes)} on {count} logical devices take {format_size(needed)}",
                allowed=f"{format_size(free)}, the memory that is free on {self.device.name}",
                remedy="give a smaller --max or fewer --devices",
            )
        return buffers(self.device, self._lane.stream, self._slots, size_bytes, self._dtype, seed)

    def _scaling(self, whole: DeviceArray) -> Timed:
        """Return x = x * s in place, as two-shot does it for one device, in the same 16-byte accesses."""
        return self._prepared(find("cuda", "two-shot"), [whole.view(kind(self._dtype))], slots([0, 1]), scale=SCALE)

    def _copy_first(self, source: DeviceArray, target: DeviceArray, run: Timed | None, stream: Any) -> None:
        """Copy, and then ``run``: the kernels add in place. ``stream`` is the lane's."""
        self.device.copy(self._lane.stream, source, target)
        if run is not None:
            run(stream)

    def burst(self, variant: Variant, burst: Burst) -> tuple[list[int], int]:
        calls, wrong = burst.warm_up + burst.calls, 0
        if burst.cached:
            variant.source[...] = 0
            self.device.settle()
            times_s = self._lane.burst(calls, variant.call)
        else:
            pristine = variant.numbers.pristine
            times_s = [self._lane.sample(pristine, variant.source, variant.call)[1] for _ in range(calls)]
            wrong = self._wrong(variant)
        # two events may be closer than their clock resolves
        return [max(1, round(time_s * 1e9)) for time_s in times_s[burst.warm_up :]], wrong

    def _wrong(self, variant: Variant) -> int:
        """Count wrong elements of the result, and what has changed in the source of a variant out of place."""
        memory: Buffers = variant.numbers
        xp = self.device.xp
        changed = 0 if variant.in_place else int(xp.count_nonzero(variant.source != memory.pristine))
        if variant.algorithm == MEMCPY:
            return changed + int(xp.count_nonzero(memory.whole != memory.pristine))
        if variant.algorithm != SCALING:
            return changed + memory.wrong(xp)
        for before, after in zip(memory.given, memory.ranks, strict=True):
            if self._dtype == "bfloat16":  # in float32, where halving it is exact
                before, after = from_bfloat16(before), from_bfloat16(after)
            changed += int(xp.count_nonzero(after != before * before.dtype.type(SCALE)))
        return changed


class GpuRank(CudaRank):
    """A rank with a GPU of its own, timed by the host's clock. Its methods are collective."""

    def __init__(self, comm: MPI.Intracomm, argument: dict[str, Any]) -> None:
        super().__init__(comm, argument)
        self._stream = self.device.stream()

    @abstractmethod
    def calls(self, size_bytes: int) -> list[Variant]:
        """Return the variants of an allreduce of this size."""

    def variants(self, size_bytes: int, seed: int) -> list[Variant]:
        """See ``CudaRank``: the numbers are whole ones, whose sum is exact in every order of addition."""
        dtype = kind(self._dtype)
        most = 8 if dtype.itemsize == 2 else 1000  # exact in every dtype, also summed
        count = min(size_bytes // dtype.itemsize, PERIOD)
        draws = (np.random.default_rng([seed, rank]) for rank in range(self.comm.size))
        ranks = [draw.integers(-most, most, count).astype(np.float64) for draw in draws]
        numbers = [self.device.memory(size_bytes).view(dtype) for _ in range(2)]
        for array, values in zip(numbers, (ranks[self.rank], np.sum(ranks, axis=0)), strict=True):
            placed(self.device, self._stream, encoded(values, self._dtype), array)
        return [dataclasses.replace(variant, numbers=numbers) for variant in self.calls(size_bytes)]

    def burst(self, variant: Variant, burst: Burst) -> tuple[list[int], int]:
        pristine, expected = variant.numbers
        times: list[int] = []
        if burst.cached:
            variant.source[...] = 0
            self.device.settle()
        for _ in range(burst.warm_up + burst.calls):
            if not burst.cached:
                self.device.copy(self._stream, pristine, variant.source)
                self._stream.wait()
            self.comm.Barrier()
            begin = clock()
            variant.call()
            times.append(clock() - begin)
        self.comm.Barrier()
        wrong = 0 if burst.cached else int(self.device.xp.count_nonzero(bits(variant.target) != bits(expected)))
        self.comm.Barrier()  # nobody rewrites what another still reads
        return times[burst.warm_up :], wrong


class KernelRank(GpuRank):
    """dpsim's kernels between the GPUs of these ranks, in place."""

    def __init__(self, comm: MPI.Intracomm, argument: dict[str, Any]) -> None:
        super().__init__(comm, argument)
        self.access = find_access(self.device, comm)
        self._reducer = PeerMemoryAllreduce(
            comm, self.device, self.access, most_blocks=MOST_BLOCKS, wait_limit_s=_WAIT_LIMIT_S
        )
        self.library += f"; {self._reducer.how}"

    def calls(self, size_bytes: int) -> list[Variant]:
        """See ``GpuRank``. Raises on all ranks what one rank meets."""
        try:
            number = self._reducer.allocate(size_bytes)
        except CommunicationError as error:
            raise CommunicationError(
                f"{format_size(size_bytes)} of {self.access.mapping} memory cannot be had",
                remedy="give a smaller --max",
            ) from error
        array = self._reducer.own(number).view(kind(self._dtype))
        sums = slots(range(self.comm.size + 1))
        tasks = {
            version.name: Task(Kernel(str(array.dtype), version.name, None, sums), (number,), 0, size_bytes)
            for version in self._versions(size_bytes)
        }
        for task in tasks.values():
            self._reducer.compile(task)
        for task in tasks.values():
            _complete(self._reducer.agree(task))
        return [
            Variant(algorithm=name, source=array, target=array, call=functools.partial(self._run, task))
            for name, task in tasks.items()
        ]

    def _run(self, task: Task) -> None:
        _complete(self._reducer.reduce(task, self._stream))
        self._stream.wait()
        self._reducer.check()

    def close(self) -> None:
        self._reducer.close()


def _complete(steps: CollectiveSteps) -> None:
    for pending in steps:
        while not all(request.done() for request in pending):
            pass


class NcclRank(GpuRank):
    """NCCL between the GPUs of these ranks: in place, and its own out of place."""

    def __init__(self, comm: MPI.Intracomm, argument: dict[str, Any]) -> None:
        super().__init__(comm, argument)
        self._nccl = Nccl(comm, self.device)
        self.library += "; NCCL"

    def calls(self, size_bytes: int) -> list[Variant]:
        own, out = (self.device.memory(size_bytes).view(kind(self._dtype)) for _ in range(2))
        return [
            Variant(algorithm="nccl", source=own, target=target, call=functools.partial(self._run, own, target))
            for target in (own, out)
        ]

    def _run(self, source: DeviceArray, target: DeviceArray) -> None:
        self._nccl.all_reduce(source, target, self._dtype, self._stream)
        self._stream.wait()

    def close(self) -> None:
        self._nccl.close()
