"""One rank of a system in the allreduce benchmark: asleep until its turn, then it checks or times calls.

Also a script, ``python turns.py KIND ARGUMENT``, for systems in a Python of their own: so this file needs nothing but
NumPy, and mpi4py or PyTorch. Every system is timed by the same lines of code.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import mmap
import os
import random
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
clock = time.perf_counter_ns
"""CLOCK_MONOTONIC, which all processes of a machine share."""

SCALING = "scaling"
"""The name under which in-place scaling, the bound of every allreduce, takes its turns."""
MEMCPY = "memcpy"
"""The name under which a copy within a GPU takes its turns: as many bytes read and written as by scaling."""
SCALE = 0.5
_LEAD_NS = 3_000
_TIMEOUT_NS = 120_000_000_000
_STAMPS_PER_RANK = 8  # a cache line
_CHECKED_ELEMENTS = 4096
_SIMULATED_EFFORT = (1, 1, 0)
"""Bursts, calls and calls before them in a simulator, whose times mean nothing."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One variant of a system's allreduce: ``call`` adds up ``source`` of all ranks into ``target``.

    It is in place where both are the same array. ``repeat`` 1: the second of an A/A pair. ``numbers`` are what a system
    fills the source with and checks the target against, where it keeps them.
    """

    algorithm: str
    source: Any
    target: Any
    call: Callable[..., object]
    repeat: int = 0
    numbers: Any = None

    @property
    def in_place(self) -> bool:
        return self.source is self.target


@dataclass(frozen=True, kw_only=True)
class Burst:
    """Calls of one variant in a row: ``warm_up`` that do not count, then ``calls`` that do.

    Before each fresh call every rank rewrites its buffer, as backward does, and that is not timed. A cached burst
    reuses an unmodified buffer (of zeros).
    """

    variant: int = 0
    cached: bool = False
    calls: int = 1
    warm_up: int = 0


def bursts(variants: Sequence[Variant], seed: int, fresh: Sequence[int], cached: Sequence[int]) -> list[Burst]:
    """Return the bursts of a visit in random order, the same on all ranks.

    ``fresh`` and ``cached`` are (bursts, calls that count, calls before them that do not) of each variant. A repeated
    variant has no cached bursts.
    """
    order = [
        Burst(variant=number, cached=in_cache, calls=calls, warm_up=warm_up)
        for in_cache, (count, calls, warm_up) in ((False, fresh), (True, cached))
        for number, variant in enumerate(variants)
        for _ in range(0 if in_cache and variant.repeat else count)
    ]
    random.Random(seed).shuffle(order)
    return order


class SystemRank(ABC):
    """One rank of a system, ready from its construction on until it is closed; it keeps the variants of each size."""

    rank: int
    library: str
    simulated = False

    def __init__(self) -> None:
        self._variants: dict[int, list[Variant]] = {}

    @abstractmethod
    def check(self, size_bytes: int, seed: int) -> list[tuple[Variant, int]]:
        """Prepare a size and run its variants once; return each with the elements of this rank that were wrong.

        The variants come in the same order on every rank.
        """

    @abstractmethod
    def burst(self, variant: Variant, burst: Burst) -> tuple[list[int], int]:
        """Return the nanoseconds of the calls that count, and wrong elements after the last one of a fresh burst."""

    def close(self) -> None:  # noqa: B027  (most have nothing to give back)
        """Give back what other ranks reach. No variant may be called afterwards. Collective."""

    def prepare(self, size_bytes: int, seed: int) -> dict[str, Any]:
        """Run every variant once on random numbers; reply how many elements are not the exact sum."""
        checked = self.check(size_bytes, seed)
        self._variants[size_bytes] = [variant for variant, _ in checked]
        return {
            "variants": [
                {"algorithm": v.algorithm, "in_place": v.in_place, "repeat": v.repeat, "wrong": wrong}
                for v, wrong in checked
            ]
        }

    def visit(self, size_bytes: int, seed: int, fresh: Sequence[int], cached: Sequence[int]) -> dict[str, Any]:
        """Time the ``bursts`` of all variants; after each fresh one elements of the sum are checked."""
        variants = self._variants[size_bytes]
        if self.simulated:
            fresh = cached = _SIMULATED_EFFORT
        order, wrong = bursts(variants, seed, fresh, cached), [0] * len(variants)
        times: dict[str, list[list[int]]] = {kind: [[] for _ in variants] for kind in ("fresh", "cached")}
        gc.collect()
        gc.disable()
        self.burst(variants[order[0].variant], Burst(warm_up=1))  # after a sleep
        for burst in order:
            calls_ns, wrong_elements = self.burst(variants[burst.variant], burst)
            times["cached" if burst.cached else "fresh"][burst.variant] += calls_ns
            wrong[burst.variant] += wrong_elements
        gc.enable()
        return times | {"wrong": wrong}


def serve(system: SystemRank, argument: Mapping[str, Any]) -> None:
    """Take part with ``system`` until the benchmark ends."""
    hello = {"rank": system.rank, "library": system.library, "simulated": system.simulated}
    obey({"check": system.prepare, "visit": system.visit}, hello, argument["socket"])
    system.close()


def serve_on_ranks(comm: Any, argument: dict[str, Any], report: Callable[[str], object]) -> None:
    """Take part with the class ``module:name`` of the argument's ``system`` (a task of ``launch.on_ranks``)."""
    module, _, name = argument["system"].partition(":")
    serve(getattr(importlib.import_module(module), name)(comm, argument), argument)


def obey(commands: Mapping[str, Callable[..., Mapping[str, Any]]], hello: Mapping[str, Any], address: str) -> None:
    """Send ``hello`` to the socket, then run the commands that come through it until it is closed.

    A command is a dictionary: ``do`` names it, and its other entries are its arguments.
    """
    with Client(address, "AF_UNIX") as connection:
        connection.send(hello)
        while True:
            try:
                command = connection.recv()
            except EOFError:
                return
            connection.send(commands[command.pop("do")](**command))


class Start:
    """Lets all ranks begin at one moment: a fixed time after the last has arrived. The same for every system.

    Each rank writes when it arrived into memory that all see. With more ranks than cores there is no such moment:
    a waiting rank gives its core away, and begins once it has seen the others.
    """

    def __init__(self, path: str, rank: int, ranks: int, *, oversubscribed: bool) -> None:
        handle = os.open(path, os.O_RDWR)
        self._stamps = memoryview(mmap.mmap(handle, 8 * _STAMPS_PER_RANK * ranks)).cast("q")
        os.close(handle)
        self._own = rank * _STAMPS_PER_RANK
        self._firsts = range(0, ranks * _STAMPS_PER_RANK, _STAMPS_PER_RANK)
        self._lead_ns = 0 if oversubscribed else _LEAD_NS
        self._oversubscribed = oversubscribed
        self._moment = self._turn = 0

    def wait(self) -> None:
        """Return at the common moment. Turns use two stamps alternately, because a rank may be one turn ahead."""
        stamps, before, oversubscribed = self._stamps, self._moment, self._oversubscribed
        self._turn = turn = 1 - self._turn
        arrived = latest = clock()
        stamps[self._own + turn] = arrived
        for first in self._firsts:
            index = first + turn
            while (stamp := stamps[index]) <= before:
                if oversubscribed:
                    os.sched_yield()
                if clock() - arrived > _TIMEOUT_NS:
                    raise TimeoutError("a rank did not come to the next call within two minutes")
            latest = max(latest, stamp)
        self._moment = moment = latest + self._lead_ns
        while clock() < moment:
            pass


class HostRank(SystemRank):
    """A rank whose variants add up NumPy arrays. ``argument`` is that of ``systems.rank_argument``.

    It has two arrays of the largest size: the ``window`` to add up in place, and one for what is out of place.
    """

    def __init__(self, rank: int, library: str, argument: Mapping[str, Any], window: Array | None = None) -> None:
        super().__init__()
        self.rank, self.library, self._ranks = rank, library, argument["ranks"]
        own, other = (np.zeros(argument["count"], argument["dtype"]) for _ in range(2))
        self._arrays = (own if window is None else window, other)
        oversubscribed = self._ranks > len(argument["cores"])
        self._start = Start(argument["page"], rank, self._ranks, oversubscribed=oversubscribed)

    @abstractmethod
    def variants(self, count: int) -> list[Variant]:
        """Return the variants of the allreduce of ``count`` elements, in the same order on every rank."""

    def check(self, size_bytes: int, seed: int) -> list[tuple[Variant, int]]:
        """See ``SystemRank``: the numbers are random whole ones, and all elements are compared."""
        count = size_bytes // self._arrays[0].itemsize
        own, total = np.empty(0, np.int8), np.zeros(count, np.int32)
        for rank in range(self._ranks):
            numbers = np.random.default_rng([seed, rank]).integers(-8, 8, count, np.int8)
            total += numbers
            own = numbers if rank == self.rank else own
        return [(variant, self._wrong_sums(variant, own, total)) for variant in self.variants(count)]

    def _wrong_sums(self, variant: Variant, own: Array, total: Array) -> int:
        variant.target[...] = -100
        variant.source[...] = own
        self._start.wait()
        variant.call()
        expected = own * variant.target.dtype.type(SCALE) if variant.algorithm == SCALING else total
        wrong = int(np.count_nonzero(variant.target != expected))
        if not variant.in_place:
            wrong += int(np.count_nonzero(variant.source != own))
        self._start.wait()  # nobody fills what another still reads
        return wrong

    def burst(self, variant: Variant, burst: Burst) -> tuple[list[int], int]:
        """See ``SystemRank``: some elements of the last fresh sum are compared."""
        call, wait, rank, source = variant.call, self._start.wait, self.rank, variant.source
        times: list[int] = []
        value = 0
        if burst.cached:
            source.fill(0)
        for number in range(burst.warm_up + burst.calls):
            if not burst.cached:
                value = number % 5
                source.fill(rank + value)
            wait()
            begin = clock()
            call()
            end = clock()
            if number >= burst.warm_up:
                times.append(end - begin)
        wrong = 0 if burst.cached else self._wrong_elements(variant, value)
        wait()  # nobody fills what another still reads
        return times, wrong

    def _wrong_elements(self, variant: Variant, value: int) -> int:
        """Count the wrong ones among some elements of the result, where every rank r has reduced r + ``value``."""
        n, rank = self._ranks, self.rank
        expected = SCALE * (rank + value) if variant.algorithm == SCALING else n * (n - 1) // 2 + n * value
        elements = variant.target[:: max(1, variant.target.size // _CHECKED_ELEMENTS)]
        return int(np.count_nonzero(elements != expected))


class MpiRank(HostRank):
    """MPI's own allreduce: as a call, and as a persistent request where the library has them (MPI 4)."""

    requests: list[Any]
    """The persistent ones that were made."""

    def __init__(self, argument: Mapping[str, Any]) -> None:
        import mpi4py

        mpi4py.rc.thread_level = argument["thread_level"]
        from mpi4py import MPI

        self._mpi, self._comm, self.requests = MPI, MPI.COMM_WORLD, []
        if self._comm.size != argument["ranks"]:
            raise SystemExit(f"mpiexec was asked for {argument['ranks']} ranks, and MPI sees {self._comm.size}")
        library = " ".join(MPI.Get_library_version().replace("\0", "").split("\n")[0].split())[:60]
        super().__init__(self._comm.rank, library, argument)
        _pin(self.rank, argument)
        self._comm.Barrier()
        _unlink_shared_files()

    def variants(self, count: int) -> list[Variant]:
        """Return MPI's in place, out of place, and the persistent request in place."""
        MPI, comm = self._mpi, self._comm
        data, out = (array[:count] for array in self._arrays)
        datatype = {"float32": MPI.FLOAT, "float64": MPI.DOUBLE}[data.dtype.name]
        send, receive = ([MPI.buffer.frombuffer(array), count, datatype] for array in (data, out))
        in_place = functools.partial(comm.Allreduce, MPI.IN_PLACE, send)
        out_of_place = functools.partial(comm.Allreduce, send, receive)
        variants = [
            Variant(algorithm="mpi", source=data, target=data, call=in_place),
            Variant(algorithm="mpi", source=data, target=out, call=out_of_place),
        ]
        try:
            request = comm.Allreduce_init(MPI.IN_PLACE, send)
        except NotImplementedError:
            return variants
        self.requests.append(request)

        def persistent() -> None:
            request.Start()
            request.Wait()

        return [*variants, Variant(algorithm="mpi-persistent", source=data, target=data, call=persistent)]


class GlooRank(HostRank):
    """PyTorch's gloo. It reduces in place alone: out of place a copy goes before."""

    def __init__(self, argument: Mapping[str, Any]) -> None:
        if argument["pinned"]:
            _pin(argument["rank"], argument)  # before gloo starts its threads, which inherit it
        import torch
        from torch import distributed

        torch.set_num_threads(1)
        where = f"file://{argument['rendezvous']}"
        distributed.init_process_group("gloo", init_method=where, rank=argument["rank"], world_size=argument["ranks"])
        self._all_reduce, self._tensor = distributed.all_reduce, torch.from_numpy
        super().__init__(argument["rank"], f"gloo, PyTorch {torch.__version__}", argument)

    def variants(self, count: int) -> list[Variant]:
        """Return gloo's in place, and out of place."""
        data, out = (array[:count] for array in self._arrays)
        tensor, copy = self._tensor(data), self._tensor(out)

        def out_of_place() -> None:
            copy.copy_(tensor)
            self._all_reduce(copy)

        in_place = functools.partial(self._all_reduce, tensor)
        return [
            Variant(algorithm="gloo", source=data, target=data, call=in_place),
            Variant(algorithm="gloo", source=data, target=out, call=out_of_place),
        ]


def _unlink_shared_files() -> None:
    """Remove the names of mpich's files in /dev/shm, which all ranks have open: a killed job leaves nothing behind."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = {line.split()[-1] for line in maps if "/dev/shm/mpich_sh" in line}
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _pin(rank: int, argument: Mapping[str, Any]) -> None:
    cores: Sequence[int] = argument["cores"]
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


if __name__ == "__main__":
    script_argument = json.loads(sys.argv[2])
    serve({"mpi": MpiRank, "gloo": GlooRank}[sys.argv[1]](script_argument), script_argument)
