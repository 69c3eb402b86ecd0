"""One process a GPU in the allreduce benchmark: dpsim's kernels between GPUs, and NCCL by CuPy.

A sample is the host's time from a barrier to the end of the stream: what a training step waits for, launches and host
barriers included. Tasks for running ranks.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from dpsim.comm.cuda.access import Access, find_access
from dpsim.comm.cuda.available import open_device
from dpsim.comm.cuda.device import Device, DeviceArray, PeerMemory
from dpsim.errors import CommunicationError
from dpsim.harness.bench.cuda import DEFAULT, library
from dpsim.harness.bench.logical import PERIOD, bits, encoded, kind, placed
from dpsim.harness.bench.turns import obey
from dpsim.kernels.allreduce import registry, tree
from dpsim.kernels.allreduce.cuda.launch import flag_words
from dpsim.units import format_size

Run = Callable[[], None]
"""Adds up; returns when this rank's part is done."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to add what lies in a rank's ``source``; this rank's sum is then in ``target``."""

    algorithm: str
    source: DeviceArray
    target: DeviceArray
    run: Run

    @property
    def in_place(self) -> bool:
        return self.source is self.target


class Numbers:
    """What this rank hands in, and what the sum must be: whole numbers, whose sum is one in every order."""

    def __init__(self, comm: MPI.Intracomm, device: Device, size_bytes: int, dtype: str) -> None:
        self._comm, self._device, self._stream = comm, device, device.stream()
        count = size_bytes // kind(dtype).itemsize
        ranks = [_whole(rank, min(count, PERIOD), dtype) for rank in range(comm.size)]
        self._pristine = self._placed(encoded(ranks[comm.rank], dtype), count)
        self._expected = self._placed(encoded(np.sum(ranks, axis=0), dtype), count)

    def wrong(self, way: Way) -> int:
        """Elements of this rank's sum that are wrong after one run on fresh numbers. Collective."""
        self._rewrite(way)
        way.run()
        self._comm.Barrier()
        found = int(self._device.xp.count_nonzero(bits(way.target) != bits(self._expected)))
        self._comm.Barrier()  # nobody rewrites what another still looks at
        return found

    def time_s(self, way: Way, *, fresh: bool = True) -> float:
        """Seconds of one run on this rank, with its numbers written anew before it or as they are. Collective."""
        if fresh:
            self._rewrite(way)
        self._comm.Barrier()
        begin_s = time.perf_counter()
        way.run()
        return time.perf_counter() - begin_s

    def _rewrite(self, way: Way) -> None:
        self._device.copy(self._stream, self._pristine, way.source)
        self._stream.wait()
        self._comm.Barrier()

    def _placed(self, numbers: NDArray[Any], count: int) -> DeviceArray:
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

    def share(self, size_bytes: int) -> PeerMemory:
        """Memory that all ranks' kernels reach. Raises ``CommunicationError`` where there is none left."""
        memory = self._device.share(self._comm, size_bytes, self.access.way)
        if memory is None:
            raise CommunicationError(
                f"{format_size(size_bytes)} of {self.access.way} memory cannot be had", remedy="give a smaller --max"
            )
        return memory

    def ways(self, memory: PeerMemory, dtype: str, algorithms: tuple[str, ...] = ()) -> list[Way]:
        """Every version (or those named) on this memory, in place."""
        comm, mode = self._comm, self.access.mode
        arrays, slots = [array.view(kind(dtype)) for array in memory.ranks], tree.slots(range(comm.size + 1))
        words = [array.view(np.uint32) for array in self._flags.ranks] if mode == "flags" else None
        own, found = arrays[comm.rank], list[Way]()
        for known in registry.versions("cuda"):
            if known.name in (algorithms or (known.name,)) and own.nbytes <= (known.most_bytes or own.nbytes):
                stages = known.make(arrays, slots, rank=comm.rank, mode=mode, flags=words).stages
                run = functools.partial(self._run, stages)
                found.append(Way(algorithm=known.name, source=own, target=own, run=run))
        return found

    def close(self) -> None:
        """Collective. No way of it may be called any more."""
        self._flags.close()

    def _run(self, stages: tuple[Callable[[Any], None], ...]) -> None:
        for number, stage in enumerate(stages):
            if number:
                self._stream.wait()
                self._comm.Barrier()
            stage(self._stream.launch)
        self._stream.wait()


class Nccl:
    """NCCL's allreduce between the GPUs of these ranks, by CuPy: in place, and its own out of place. Collective."""

    def __init__(self, comm: MPI.Intracomm, device: Any) -> None:
        from cupy.cuda import nccl as library

        self._device, self._stream, self._library = device, device.stream(), library
        self._communicator = library.NcclCommunicator(comm.size, comm.bcast(library.get_unique_id()), comm.rank)

    def ways(self, size_bytes: int, dtype: str) -> list[Way]:
        """In place and out of place."""
        own, out = (self._device.memory(size_bytes).view(kind(dtype)) for _ in range(2))
        number = getattr(self._library, f"NCCL_{dtype.upper()}")
        return [
            Way(algorithm="nccl", source=own, target=target, run=functools.partial(self._run, own, target, number))
            for target in (own, out)
        ]

    def close(self) -> None:
        """No way of it may be called any more."""
        self._communicator.destroy()

    def _run(self, source: DeviceArray, target: DeviceArray, number: int) -> None:
        begin, end, count = source.data.ptr, target.data.ptr, source.size
        self._communicator.allReduce(begin, end, count, number, self._library.NCCL_SUM, self._stream.cupy.ptr)
        self._stream.wait()


class OneGpu:
    """Does what the benchmark asks of one rank (``turns.Rank``), with ways that ``make(size_bytes)`` prepares."""

    def __init__(self, comm: MPI.Intracomm, device: Device, dtype: str, make: Callable[[int], list[Way]]) -> None:
        self._comm, self._device, self._dtype, self._make = comm, device, dtype, make
        self._ready: dict[int, tuple[Numbers, list[Way]]] = {}

    def check(self, size_bytes: int, seed: int) -> dict[str, Any]:
        """Every way once: the wrong elements of this rank's sum."""
        self._ready[size_bytes] = Numbers(self._comm, self._device, size_bytes, self._dtype), self._make(size_bytes)
        numbers, ways = self._ready[size_bytes]
        return {
            "ways": [
                {"algorithm": way.algorithm, "in_place": way.in_place, "repeat": 0, "wrong": numbers.wrong(way)}
                for way in ways
            ]
        }

    def visit(self, size_bytes: int, seed: int, fresh: list[int], cached: list[int]) -> dict[str, Any]:
        """Time all ways in bursts in random order, as ``turns.Rank.visit`` does, and check each once more."""
        numbers, ways = self._ready[size_bytes]
        if self._device.simulated:
            fresh = cached = [1, 1, 0]  # its times mean nothing
        order = [(number, False) for number in range(len(ways)) for _ in range(fresh[0])]
        order += [(number, True) for number in range(len(ways)) for _ in range(cached[0])]
        random.Random(seed).shuffle(order)  # the same on all ranks
        times: list[tuple[list[int], list[int]]] = [([], []) for _ in ways]
        for number, is_cached in order:
            _, calls, before = cached if is_cached else fresh
            if is_cached:
                ways[number].source[...] = 0
                self._device.settle()
            taken = [numbers.time_s(ways[number], fresh=not is_cached) for _ in range(before + calls)]
            times[number][is_cached].extend(round(time_s * 1e9) for time_s in taken[before:])
            self._comm.Barrier()
        wrong = [numbers.wrong(way) for way in ways]
        return {"fresh": [t[0] for t in times], "cached": [t[1] for t in times], "wrong": wrong}


def kernels_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Callable[[str], None]) -> None:
    """The task of ``launch.on_ranks``, one rank a GPU: dpsim's kernels take part until the benchmark ends."""
    device = open_device(comm.rank)
    device.use()
    kernels = Kernels(comm, device)
    dtype, named = argument["dtype"], tuple(dict.fromkeys([*argument["algorithms"], DEFAULT]))
    memories: list[PeerMemory] = []

    def make(size_bytes: int) -> list[Way]:
        memories.append(kernels.share(size_bytes))
        return kernels.ways(memories[-1], dtype, named)

    _serve(
        comm,
        device,
        OneGpu(comm, device, dtype, make),
        f"{kernels.access.mode} over {kernels.access.way} memory",
        argument,
    )
    for memory in memories:
        memory.close()
    kernels.close()


def nccl_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Callable[[str], None]) -> None:
    """The same of NCCL."""
    device = open_device(comm.rank)
    device.use()
    nccl, dtype = Nccl(comm, device), argument["dtype"]
    one = OneGpu(comm, device, dtype, lambda size_bytes: nccl.ways(size_bytes, dtype))
    _serve(comm, device, one, "NCCL", argument)
    nccl.close()


def _serve(comm: MPI.Intracomm, device: Device, one: OneGpu, how: str, argument: dict[str, Any]) -> None:
    hello = {"rank": comm.rank, "library": f"{library(device)}; {how}", "simulated": device.simulated}
    obey({"check": one.check, "visit": one.visit}, hello, argument["socket"])
