"""One rank of a system in the allreduce benchmark: asleep until its turn, then it checks or times calls.

Also a script, ``python turns.py KIND ARGUMENT``, for systems in a Python of their own: so this file needs nothing but
NumPy, and mpi4py or PyTorch. Every system is timed by the same lines of code.
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
MEMCPY = "memcpy"
"""The name under which a copy within a GPU takes its turns: as many bytes read and written as by scaling."""
SCALE = 0.5
_LEAD_NS = 3_000
_TIMEOUT_NS = 120_000_000_000
_STAMPS_PER_RANK = 8  # a cache line
_CHECKED_ELEMENTS = 4096


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One variant of a system's allreduce: ``call`` adds up ``source`` of all ranks into ``target``.

    It is in place where both are the same array. ``repeat`` 1: the second of an A/A pair.
    """

    algorithm: str
    source: Any
    target: Any
    call: Callable[..., object]
    repeat: int = 0

    @property
    def in_place(self) -> bool:
        return self.source is self.target

    def reply(self, wrong: int) -> dict[str, Any]:
        """The variant and its wrong elements, as a rank replies to a check."""
        return {"algorithm": self.algorithm, "in_place": self.in_place, "repeat": self.repeat, "wrong": wrong}


@dataclass(frozen=True, kw_only=True)
class Burst:
    """Calls of one variant in a row: ``warm_up`` that do not count, then ``calls`` that do.

    Before each fresh call every rank rewrites its buffer, as backward does, and that is not timed. A cached burst
    reuses an unmodified buffer (of zeros).
    """

    variant: int
    cached: bool
    calls: int
    warm_up: int


def bursts(variants: Sequence[Variant], seed: int, fresh: Sequence[int], cached: Sequence[int]) -> list[Burst]:
    """The bursts of a visit in random order, the same on all ranks.

    ``fresh`` and ``cached`` are (bursts, calls that count, calls before them that do not) of each variant. A repeated
    variant has no cached bursts.
    """

    def each(number: int, effort: Sequence[int], *, cached: bool) -> list[Burst]:
        count, calls, warm_up = effort
        return [Burst(variant=number, cached=cached, calls=calls, warm_up=warm_up)] * count

    order: list[Burst] = []
    for number in range(len(variants)):
        order += each(number, fresh, cached=False)
    for number, variant in enumerate(variants):
        order += [] if variant.repeat else each(number, cached, cached=True)
    random.Random(seed).shuffle(order)
    return order


def timed(
    variants: Sequence[Variant], order: Sequence[Burst], run: Callable[[Burst], Sequence[int]]
) -> dict[str, list[list[int]]]:
    """Run bursts; the nanoseconds of each call, as ``run`` returns them, by kind of burst and by variant."""
    times: dict[str, list[list[int]]] = {kind: [[] for _ in variants] for kind in ("fresh", "cached")}
    for burst in order:
        times["cached" if burst.cached else "fresh"][burst.variant].extend(run(burst))
    return times


class SystemRank(Protocol):
    """A system on one rank."""

    rank: int
    library: str

    def variants(self, count: int) -> list[Variant]:
        """Its variants of the allreduce of ``count`` elements, in the same order on every rank."""


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


class Rank:
    """Does what the benchmark asks of one rank."""

    def __init__(self, system: SystemRank, start: Start, ranks: int, itemsize: int) -> None:
        self._system, self._start, self._ranks, self._itemsize = system, start, ranks, itemsize
        self._variants: dict[int, list[Variant]] = {}

    def check(self, size_bytes: int, seed: int) -> dict[str, Any]:
        """Run every variant once on random whole numbers; reply how many elements are not the exact sum."""
        variants = self._variants[size_bytes] = self._system.variants(size_bytes // self._itemsize)
        count, rank = variants[0].source.size, self._system.rank
        own, total = np.empty(0, np.int8), np.zeros(count, np.int32)
        for other in range(self._ranks):
            numbers = np.random.default_rng([seed, other]).integers(-8, 8, count, np.int8)
            total += numbers
            own = numbers if other == rank else own
        replies = []
        for variant in variants:
            variant.target[...] = -100
            variant.source[...] = own
            self._start.wait()
            variant.call()
            expected = own * variant.target.dtype.type(SCALE) if variant.algorithm == SCALING else total
            wrong = int(np.count_nonzero(variant.target != expected))
            if not variant.in_place:
                wrong += int(np.count_nonzero(variant.source != own))
            replies.append(variant.reply(wrong))
            self._start.wait()  # nobody fills what another still reads
        return {"variants": replies}

    def visit(self, size_bytes: int, seed: int, fresh: list[int], cached: list[int]) -> dict[str, Any]:
        """Time the ``bursts`` of all variants; after each fresh one some elements of the sum are checked."""
        variants = self._variants[size_bytes]
        order, wrong = bursts(variants, seed, fresh, cached), [0] * len(variants)

        def run(burst: Burst) -> list[int]:
            times, wrong_elements = self._burst(variants[burst.variant], burst)
            wrong[burst.variant] += wrong_elements
            return times

        gc.collect()
        gc.disable()
        self._burst(variants[order[0].variant], Burst(variant=0, cached=False, calls=1, warm_up=1))  # after a sleep
        times = timed(variants, order, run)
        gc.enable()
        return times | {"wrong": wrong}

    def _burst(self, variant: Variant, burst: Burst) -> tuple[list[int], int]:
        """Nanoseconds of the calls that count, and how many of some elements of the last fresh sum are wrong."""
        call, wait, rank, source = variant.call, self._start.wait, self._system.rank, variant.source
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
        wrong = 0 if burst.cached else self._wrong(variant, value)
        wait()  # nobody fills what another still reads
        return times, wrong

    def _wrong(self, variant: Variant, value: int) -> int:
        """Wrong elements among some of the result, where every rank r has reduced r + ``value``."""
        n, rank = self._ranks, self._system.rank
        expected = SCALE * (rank + value) if variant.algorithm == SCALING else n * (n - 1) // 2 + n * value
        elements = variant.target[:: max(1, variant.target.size // _CHECKED_ELEMENTS)]
        return int(np.count_nonzero(elements != expected))


def serve(system: SystemRank, argument: Mapping[str, Any]) -> None:
    """Take part with ``system`` until the benchmark ends."""
    ranks: int = argument["ranks"]
    oversubscribed = ranks > len(argument["cores"])
    start = Start(argument["page"], system.rank, ranks, oversubscribed=oversubscribed)
    rank = Rank(system, start, ranks, np.dtype(argument["dtype"]).itemsize)
    hello = {"rank": system.rank, "library": system.library}
    obey({"check": rank.check, "visit": rank.visit}, hello, argument["socket"])


def obey(commands: Mapping[str, Callable[..., Mapping[str, Any]]], hello: Mapping[str, Any], address: str) -> None:
    """Send ``hello`` to the socket, then run the commands that come through it until it is closed.

    A command is a JSON object: ``do`` names it, and its other members are its arguments.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        with connection.makefile("rw", encoding="utf-8") as text:
            _send(text, hello)
            for line in text:
                command = json.loads(line)
                _send(text, commands[command.pop("do")](**command))


def _send(text: Any, reply: Mapping[str, Any]) -> None:
    text.write(json.dumps(reply) + "\n")
    text.flush()


class MpiRank:
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
        self._arrays = [np.zeros(argument["count"], argument["dtype"]) for _ in range(2)]
        _pin(self.rank, argument)
        self._comm.Barrier()
        _unlink_shared_files()

    def variants(self, count: int) -> list[Variant]:
        """In place, out of place, and the persistent request in place."""
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

        def persistent() -> None:
            request.Start()
            request.Wait()

        return [*variants, Variant(algorithm="mpi-persistent", source=data, target=data, call=persistent)]


class GlooRank:
    """PyTorch's gloo. It reduces in place alone: out of place a copy goes before."""

    def __init__(self, argument: Mapping[str, Any]) -> None:
        self.rank = argument["rank"]
        if argument["pinned"]:
            _pin(self.rank, argument)  # before gloo starts its threads, which inherit it
        import torch
        from torch import distributed

        torch.set_num_threads(1)
        distributed.init_process_group(
            "gloo", init_method=f"file://{argument['rendezvous']}", rank=self.rank, world_size=argument["ranks"]
        )
        self._all_reduce, self._tensor = distributed.all_reduce, torch.from_numpy
        self.library = f"gloo, PyTorch {torch.__version__}"
        self._arrays = [np.zeros(argument["count"], argument["dtype"]) for _ in range(2)]

    def variants(self, count: int) -> list[Variant]:
        """In place, and out of place."""
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
    serve(MpiRank(script_argument) if sys.argv[1] == "mpi" else GlooRank(script_argument), script_argument)
