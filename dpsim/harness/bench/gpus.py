"""The allreduce benchmark with one process for each GPU: dpsim's kernels between GPUs, and NCCL by CuPy.

A sample is the host's time from a barrier to the end of the stream, which a training step waits for: it includes
launches and host barriers. Tasks for running ranks.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from dpsim.comm.cuda.access import Access, find_access
from dpsim.comm.cuda.agreement import raise_on_all
from dpsim.comm.cuda.available import open_device
from dpsim.comm.cuda.device import Device, DeviceArray, PeerMemory
from dpsim.errors import CommunicationError, DpsimError
from dpsim.harness.bench.cuda import DEFAULT, SIMULATED_EFFORT, library, nanoseconds
from dpsim.harness.bench.logical import PERIOD, bits, encoded, kind, placed
from dpsim.harness.bench.turns import Burst, Variant, bursts, obey, timed
from dpsim.kernels.allreduce import registry, tree
from dpsim.kernels.allreduce.cuda.launch import Launch, Watch, flag_words
from dpsim.progress import Progress
from dpsim.units import format_size

_WAIT_LIMIT_S = 30.0
"""How long kernels wait for a rank: all begin a call at a barrier of their hosts."""


class Numbers:
    """What this rank contributes, and the sum: whole numbers, whose sum is exact in every order of addition."""

    def __init__(self, comm: MPI.Intracomm, device: Device, size_bytes: int, dtype: str) -> None:
        self._comm, self._device, self._stream = comm, device, device.stream()
        count = size_bytes // kind(dtype).itemsize
        ranks = [_whole(rank, min(count, PERIOD), dtype) for rank in range(comm.size)]
        self._pristine = self._filled(encoded(ranks[comm.rank], dtype), count)
        self._expected = self._filled(encoded(np.sum(ranks, axis=0), dtype), count)

    def wrong(self, variant: Variant) -> int:
        """Elements of this rank's sum that are wrong after one run on fresh numbers. Collective."""
        self._rewrite(variant)
        variant.call()
        self._comm.Barrier()
        wrong = int(self._device.xp.count_nonzero(bits(variant.target) != bits(self._expected)))
        self._comm.Barrier()  # nobody rewrites what another still reads
        return wrong

    def time_s(self, variant: Variant, *, fresh: bool = True) -> float:
        """Seconds of one call on this rank; its numbers are rewritten before a ``fresh`` one. Collective."""
        if fresh:
            self._rewrite(variant)
        self._comm.Barrier()
        begin_s = time.perf_counter()
        variant.call()
        return time.perf_counter() - begin_s

    def _rewrite(self, variant: Variant) -> None:
        self._device.copy(self._stream, self._pristine, variant.source)
        self._stream.wait()
        self._comm.Barrier()

    def _filled(self, numbers: NDArray[Any], count: int) -> DeviceArray:
        array = self._device.memory(count * numbers.itemsize).view(numbers.dtype)
        placed(self._device, self._stream, numbers, array)
        return array


def _whole(rank: int, count: int, dtype: str) -> NDArray[Any]:
    most = 8 if kind(dtype).itemsize == 2 else 1000  # exact in every dtype, also summed
    return np.random.default_rng(rank).integers(-most, most, count).astype(np.float64)


class Kernels:
    """dpsim's kernels between the devices of these ranks. Collective."""

    def __init__(self, comm: MPI.Intracomm, device: Device) -> None:
        self._comm, self._device, self._stream = comm, device, device.stream()
        self.access: Access = find_access(device, comm)
        self._flags = self.share(4 * flag_words(comm.size))
        self._watch = Watch(limit_s=_WAIT_LIMIT_S, report=device.host_memory(4).view(np.uint32))

    def share(self, size_bytes: int) -> PeerMemory:
        """Memory that all ranks' kernels reach. Raises ``CommunicationError`` where there is none left."""
        memory = self._device.share(self._comm, size_bytes, self.access.way)
        if memory is None:
            raise CommunicationError(
                f"{format_size(size_bytes)} of {self.access.way} memory cannot be had", remedy="give a smaller --max"
            )
        return memory

    def variants(self, memory: PeerMemory, dtype: str, algorithms: tuple[str, ...] = ()) -> list[Variant]:
        """Every version (or the named ones) on this memory, in place. Raises on all ranks what one rank meets."""
        arrays = [array.view(kind(dtype)) for array in memory.ranks]
        own, variants = arrays[self._comm.rank], list[Variant]()
        error: DpsimError | None = None
        for version in registry.versions("cuda"):
            if version.name in (algorithms or (version.name,)) and own.nbytes <= (version.most_bytes or own.nbytes):
                try:
                    call = functools.partial(self._run, self._launch(version, arrays).stages)
                except DpsimError as met:
                    error = met
                    break
                variants.append(Variant(algorithm=version.name, source=own, target=own, call=call))
        raise_on_all(self._comm, error)
        return variants

    def _launch(self, version: registry.Version, arrays: list[DeviceArray]) -> Launch:
        flags = self.access.mode == "flags"
        launch: Launch = version.make(
            arrays,
            tree.slots(range(self._comm.size + 1)),
            rank=self._comm.rank,
            mode=self.access.mode,
            flags=[array.view(np.uint32) for array in self._flags.ranks] if flags else None,
            watch=self._watch if flags else None,
        )
        return launch

    def close(self) -> None:
        """Free the memory of the flags. No variant may be called afterwards. Collective."""
        self._flags.close()

    def _run(self, stages: tuple[Callable[[Any], None], ...]) -> None:
        for number, stage in enumerate(stages):
            if number:
                self._stream.wait()
                self._comm.Barrier()
            stage(self._stream.launch)
        self._stream.wait()
        self._watch.check(self._comm.size)


class Nccl:
    """NCCL's allreduce between the GPUs of these ranks, by CuPy: in place, and its own out of place. Collective."""

    def __init__(self, comm: MPI.Intracomm, device: Any) -> None:
        from cupy.cuda import nccl as library

        self._device, self._stream, self._library = device, device.stream(), library
        self._communicator = library.NcclCommunicator(comm.size, comm.bcast(library.get_unique_id()), comm.rank)

    def variants(self, size_bytes: int, dtype: str) -> list[Variant]:
        """In place and out of place."""
        own, out = (self._device.memory(size_bytes).view(kind(dtype)) for _ in range(2))
        datatype = getattr(self._library, f"NCCL_{dtype.upper()}")
        variants = []
        for target in (own, out):
            call = functools.partial(self._run, own, target, datatype)
            variants.append(Variant(algorithm="nccl", source=own, target=target, call=call))
        return variants

    def close(self) -> None:
        """Destroy the communicator. No variant may be called afterwards."""
        self._communicator.destroy()

    def _run(self, source: DeviceArray, target: DeviceArray, datatype: int) -> None:
        begin, end, count = source.data.ptr, target.data.ptr, source.size
        self._communicator.allReduce(begin, end, count, datatype, self._library.NCCL_SUM, self._stream.cupy.ptr)
        self._stream.wait()


class GpuRank:
    """Does what the benchmark asks of one rank (``turns.Rank``), with variants that ``make(size_bytes)`` prepares."""

    def __init__(self, comm: MPI.Intracomm, device: Device, dtype: str, make: Callable[[int], list[Variant]]) -> None:
        self._comm, self._device, self._dtype, self._make = comm, device, dtype, make
        self._prepared: dict[int, tuple[Numbers, list[Variant]]] = {}

    def check(self, size_bytes: int, seed: int) -> dict[str, Any]:
        """Run every variant once; reply the wrong elements of this rank's sum."""
        numbers = Numbers(self._comm, self._device, size_bytes, self._dtype)
        variants = self._make(size_bytes)
        self._prepared[size_bytes] = numbers, variants
        return {"variants": [variant.reply(numbers.wrong(variant)) for variant in variants]}

    def visit(self, size_bytes: int, seed: int, fresh: list[int], cached: list[int]) -> dict[str, Any]:
        """Time all variants in bursts, as ``turns.Rank.visit`` does, and check each once more."""
        numbers, variants = self._prepared[size_bytes]
        if self._device.simulated:
            fresh = cached = SIMULATED_EFFORT

        def run(burst: Burst) -> list[int]:
            variant = variants[burst.variant]
            if burst.cached:
                variant.source[...] = 0
                self._device.settle()
            calls = range(burst.warm_up + burst.calls)
            times_s = [numbers.time_s(variant, fresh=not burst.cached) for _ in calls][burst.warm_up :]
            self._comm.Barrier()
            return [nanoseconds(time_s) for time_s in times_s]

        times = timed(variants, bursts(variants, seed, fresh, cached), run)
        return times | {"wrong": [numbers.wrong(variant) for variant in variants]}


def kernels_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> None:
    """The task of ``launch.on_ranks``, one rank a GPU: dpsim's kernels take part until the benchmark ends."""
    device = open_device(comm.rank)
    device.use()
    kernels = Kernels(comm, device)
    dtype, algorithms = argument["dtype"], tuple(dict.fromkeys([*argument["algorithms"], DEFAULT]))
    memories: list[PeerMemory] = []

    def make(size_bytes: int) -> list[Variant]:
        memories.append(kernels.share(size_bytes))
        return kernels.variants(memories[-1], dtype, algorithms)

    how = f"{kernels.access.mode} over {kernels.access.way} memory"
    _serve(comm, device, GpuRank(comm, device, dtype, make), how, argument)
    for memory in memories:
        memory.close()
    kernels.close()


def nccl_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> None:
    """The task of ``launch.on_ranks``, one rank a GPU: NCCL takes part until the benchmark ends."""
    device = open_device(comm.rank)
    device.use()
    nccl, dtype = Nccl(comm, device), argument["dtype"]
    rank = GpuRank(comm, device, dtype, lambda size_bytes: nccl.variants(size_bytes, dtype))
    _serve(comm, device, rank, "NCCL", argument)
    nccl.close()


def _serve(comm: MPI.Intracomm, device: Device, rank: GpuRank, how: str, argument: dict[str, Any]) -> None:
    hello = {"rank": comm.rank, "library": f"{library(device)}; {how}", "simulated": device.simulated}
    obey({"check": rank.check, "visit": rank.visit}, hello, argument["socket"])
