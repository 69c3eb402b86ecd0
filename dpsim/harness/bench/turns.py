"""One rank of a system in the allreduce benchmark: asleep until its turn, then it checks or times calls.

Also a script, ``python turns.py KIND ARGUMENT``, for systems in a Python of their own: so this file needs nothing but
NumPy, and mpi4py or PyTorch. Every system is timed by the same lines here.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import mmap
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
clock = time.perf_counter_ns
"""CLOCK_MONOTONIC, which all processes of a machine share."""

SCALING = "scaling"
"""The name under which in-place scaling, the bound of every allreduce, takes its turns."""
SCALE = 0.5
_LEAD_NS = 3_000
_PATIENCE_NS = 120_000_000_000
_PLACES = 8  # a slot is a cache line
_LOOKED_AT = 4096


@dataclass(frozen=True)
class Reduction:
    """One way to add up ``source`` of all ranks into ``target`` (the same array: in place), ready to be called."""

    algorithm: str
    source: Array
    target: Array
    call: Callable[[], object]
    repeat: int = 0

    @property
    def in_place(self) -> bool:
        return self.source is self.target


class Contender(Protocol):
    """A system on one rank."""

    rank: int
    library: str

    def reductions(self, count: int) -> list[Reduction]:
        """Its ways to reduce ``count`` elements, in the same order on every rank."""


class Start:
    """Lets all ranks begin at one moment: a fixed time after the last has arrived. The same for every system.

    Each rank writes when it arrived where all see it. With more ranks than cores there is no such moment: whoever waits
    gives its core away, and begins when it has seen the others.
    """

    def __init__(self, path: str, rank: int, ranks: int, *, oversubscribed: bool) -> None:
        handle = os.open(path, os.O_RDWR)
        self._stamps = memoryview(mmap.mmap(handle, 8 * _PLACES * ranks)).cast("q")
        os.close(handle)
        self._mine, self._places = rank * _PLACES, range(0, ranks * _PLACES, _PLACES)
        self._lead_ns, self._oversubscribed, self._moment, self._turn = (
            0 if oversubscribed else _LEAD_NS,
            oversubscribed,
            0,
            0,
        )

    def wait(self) -> None:
        """Return at the common moment. Turns use two places alternately, for a rank may be one ahead of another."""
        stamps, before, oversubscribed = self._stamps, self._moment, self._oversubscribed
        self._turn = turn = 1 - self._turn
        arrived = latest = clock()
        stamps[self._mine + turn] = arrived
        for first in self._places:
            place = first + turn
            while (stamp := stamps[place]) <= before:
                if oversubscribed:
                    os.sched_yield()
                if clock() - arrived > _PATIENCE_NS:
                    raise TimeoutError("a rank did not come to the next call within two minutes")
            latest = max(latest, stamp)
        self._moment = moment = latest + self._lead_ns
        while clock() < moment:
            pass


class Rank:
    """Does what the benchmark asks of one rank."""

    def __init__(self, contender: Contender, start: Start, ranks: int, itemsize: int) -> None:
        self._contender, self._start, self._ranks, self._itemsize = contender, start, ranks, itemsize
        self._ready: dict[int, list[Reduction]] = {}

    def check(self, size_bytes: int, seed: int) -> dict[str, Any]:
        """Every way once, on whole numbers in random places: how many elements are not the exact sum."""
        ways = self._ready[size_bytes] = self._contender.reductions(size_bytes // self._itemsize)
        count, rank = ways[0].source.size, self._contender.rank
        mine, total = np.empty(0, np.int8), np.zeros(count, np.int32)
        for other in range(self._ranks):
            numbers = np.random.default_rng([seed, other]).integers(-8, 8, count, np.int8)
            total += numbers
            mine = numbers if other == rank else mine
        found = []
        for way in ways:
            way.target[...] = -100
            way.source[...] = mine
            self._start.wait()
            way.call()
            expected = mine * way.target.dtype.type(SCALE) if way.algorithm == SCALING else total
            wrong = int(np.count_nonzero(way.target != expected))
            if not way.in_place:
                wrong += int(np.count_nonzero(way.source != mine))
            found.append({"algorithm": way.algorithm, "in_place": way.in_place, "repeat": way.repeat, "wrong": wrong})
            self._start.wait()  # nobody fills what another still reads
        return {"ways": found}

    def visit(self, size_bytes: int, seed: int, fresh: list[int], cached: list[int]) -> dict[str, Any]:
        """Time all ways in bursts in random order; the nanoseconds of each call on this rank, fresh and cached.

        ``fresh`` and ``cached`` are (bursts, calls that count, calls before them that do not) of each way. Before each
        fresh call every rank rewrites its buffer, as backward does, and that is not timed; a cached burst reuses an
        unmodified one (of zeros).
        """
        ways = self._ready[size_bytes]
        order = [(number, False) for number in range(len(ways)) for _ in range(fresh[0])]
        order += [(number, True) for number in range(len(ways)) if not ways[number].repeat for _ in range(cached[0])]
        random.Random(seed).shuffle(order)
        times: list[tuple[list[int], list[int]]] = [([], []) for _ in ways]
        wrong = [0] * len(ways)
        gc.collect()
        gc.disable()
        self._fresh(ways[order[0][0]], 1, 1, [])  # after a sleep
        for number, is_cached in order:
            if is_cached:
                self._cached(ways[number], cached[1], cached[2], times[number][1])
            else:
                wrong[number] += self._fresh(ways[number], fresh[1], fresh[2], times[number][0])
        gc.enable()
        return {"fresh": [t[0] for t in times], "cached": [t[1] for t in times], "wrong": wrong}

    def _fresh(self, way: Reduction, calls: int, before: int, times: list[int]) -> int:
        """A burst; returns how many of some elements of the last result are not the sum."""
        source, call, wait, rank = way.source, way.call, self._start.wait, self._contender.rank
        value = 0
        for number in range(before + calls):
            value = number % 5
            source.fill(rank + value)
            wait()
            begin = clock()
            call()
            end = clock()
            if number >= before:
                times.append(end - begin)
        n = self._ranks
        expected = SCALE * (rank + value) if way.algorithm == SCALING else n * (n - 1) // 2 + n * value
        looked_at = way.target[:: max(1, way.target.size // _LOOKED_AT)]
        wrong = int(np.count_nonzero(looked_at != expected))
        wait()  # nobody fills what another still reads
        return wrong

    def _cached(self, way: Reduction, calls: int, before: int, times: list[int]) -> None:
        call, wait = way.call, self._start.wait
        way.source.fill(0)
        for number in range(before + calls):
            wait()
            begin = clock()
            call()
            end = clock()
            if number >= before:
                times.append(end - begin)
        wait()


def serve(contender: Contender, argument: Mapping[str, Any]) -> None:
    """Take part as ``contender`` until the benchmark ends."""
    ranks: int = argument["ranks"]
    oversubscribed = ranks > len(argument["cores"])
    start = Start(argument["page"], contender.rank, ranks, oversubscribed=oversubscribed)
    rank = Rank(contender, start, ranks, np.dtype(argument["dtype"]).itemsize)
    hello = {"rank": contender.rank, "library": contender.library}
    obey({"check": rank.check, "visit": rank.visit}, hello, argument["socket"])


def obey(able: Mapping[str, Callable[..., Mapping[str, Any]]], hello: Mapping[str, Any], address: str) -> None:
    """Say ``hello`` and do what comes through the socket, of what one is able to, until it is closed."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(address)
        with line.makefile("rw", encoding="utf-8") as text:
            _say(text, hello)
            for request in text:
                command = json.loads(request)
                _say(text, able[command.pop("do")](**command))


def _say(text: Any, reply: Mapping[str, Any]) -> None:
    text.write(json.dumps(reply) + "\n")
    text.flush()


class MpiContender:
    """MPI's own allreduce: as a call, and as a persistent request where the library has them (MPI 4)."""

    def __init__(self, argument: Mapping[str, Any]) -> None:
        import mpi4py

        mpi4py.rc.thread_level = argument["thread_level"]
        from mpi4py import MPI

        self._mpi, self._comm = MPI, MPI.COMM_WORLD
        if self._comm.size != argument["ranks"]:
            raise SystemExit(f"mpiexec was asked for {argument['ranks']} ranks, and MPI sees {self._comm.size}")
        self.rank: int = self._comm.rank
        self.library = " ".join(MPI.Get_library_version().replace("\0", "").split("\n")[0].split())[:60]
        self._most = [np.zeros(argument["most"], argument["dtype"]) for _ in range(2)]
        _pin(self.rank, argument)
        self._comm.Barrier()
        _forget_shared_files()

    def reductions(self, count: int) -> list[Reduction]:
        MPI, comm = self._mpi, self._comm
        data, out = (array[:count] for array in self._most)
        kind = {"float32": MPI.FLOAT, "float64": MPI.DOUBLE}[data.dtype.name]
        here, there = ([MPI.buffer.frombuffer(array), count, kind] for array in (data, out))
        found = [
            Reduction("mpi", data, data, functools.partial(comm.Allreduce, MPI.IN_PLACE, here)),
            Reduction("mpi", data, out, functools.partial(comm.Allreduce, here, there)),
        ]
        try:
            request = comm.Allreduce_init(MPI.IN_PLACE, here)
        except NotImplementedError:
            return found

        def persistent() -> None:
            request.Start()
            request.Wait()

        return [*found, Reduction("mpi-persistent", data, data, persistent)]


class GlooContender:
    """PyTorch's gloo. It has no out of place: a copy goes before."""

    def __init__(self, argument: Mapping[str, Any]) -> None:
        self.rank = argument["rank"]
        if argument["pinned"]:
            _pin(self.rank, argument)  # before gloo starts its threads, which inherit it
        import torch
        from torch import distributed

        torch.set_num_threads(1)
        distributed.init_process_group(
            "gloo", init_method=f"file://{argument['meeting']}", rank=self.rank, world_size=argument["ranks"]
        )
        self._all_reduce, self._tensor = distributed.all_reduce, torch.from_numpy
        self.library = f"gloo, PyTorch {torch.__version__}"
        self._most = [np.zeros(argument["most"], argument["dtype"]) for _ in range(2)]

    def reductions(self, count: int) -> list[Reduction]:
        data, out = (array[:count] for array in self._most)
        tensor, copy = self._tensor(data), self._tensor(out)

        def out_of_place() -> None:
            copy.copy_(tensor)
            self._all_reduce(copy)

        in_place = functools.partial(self._all_reduce, tensor)
        return [Reduction("gloo", data, data, in_place), Reduction("gloo", data, out, out_of_place)]


def _forget_shared_files() -> None:
    """All ranks have mpich's files in /dev/shm open: without their names nothing is left behind by a killed job."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = {line.split()[-1] for line in maps if "/dev/shm/mpich_sh" in line}
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _pin(rank: int, argument: Mapping[str, Any]) -> None:
    cores: Sequence[int] = argument["cores"]
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


if __name__ == "__main__":
    told = json.loads(sys.argv[2])
    serve(MpiContender(told) if sys.argv[1] == "mpi" else GlooContender(told), told)
