"""Tasks of the tests of the allreduce kernels on ranks that share memory."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI
from wire_reference import node_sum, rounded

from dpsim.comm.group import compile_once
from dpsim.comm.networks import transport
from dpsim.comm.shared import shared_memory
from dpsim.errors import ConfigError
from dpsim.kernels.allreduce import reference
from dpsim.kernels.allreduce.cpu import SharedGroup
from dpsim.kernels.allreduce.registry import versions
from dpsim.kernels.allreduce.tree import PartialSums, slots
from dpsim.machine import Network
from dpsim.progress import Progress

Array = np.ndarray[Any, Any]
LINE = 64


class Place:
    """Ranks that meet, and one shared array a slot, at places that are no multiple of a cache line."""

    def __init__(self, comm: MPI.Intracomm, leaves: int, elements: int, dtype: str, *, yields: bool = False) -> None:
        self.rank, self.size = comm.rank, comm.size
        self.slots: PartialSums = slots([rank * leaves // comm.size for rank in range(comm.size + 1)])
        self.group = SharedGroup(
            comm.rank,
            comm.size,
            _shared(comm, SharedGroup.control_bytes(comm.size)),
            oversubscribed=yields or comm.size > (os.cpu_count() or 1),
        )
        self.arrays = _rows(comm, len(self.slots.owners), elements, dtype, shift=np.dtype(dtype).itemsize)

    def fill(self, values: list[Array]) -> None:
        for slot in self.slots.of(self.rank):
            self.arrays[slot][...] = values[slot]

    @property
    def result(self) -> Array:
        return self.arrays[self.slots.of(self.rank)[0]]


def _shared(comm: MPI.Intracomm, size_bytes: int) -> Any:
    memory = shared_memory(comm, max(size_bytes, 1), "test")
    assert memory is not None
    return np.frombuffer(memory, np.uint8)


def _rows(comm: MPI.Intracomm, rows: int, elements: int, dtype: str, shift: int = 0) -> list[Array]:
    size = elements * np.dtype(dtype).itemsize
    pitch = -(-(size + shift) // LINE) * LINE
    memory = _shared(comm, rows * pitch)
    return [memory[row * pitch + shift : row * pitch + shift + size].view(dtype) for row in range(rows)]


def _values(place: Place, elements: int, dtype: str, seed: int) -> list[Array]:
    draw = np.random.default_rng(seed)
    return [draw.standard_normal(elements).astype(dtype) for _ in place.slots.owners]


def versions_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any]:
    """Every version, variant and dtype, with one slot a rank and with the slots of 8 leaves: the wrong cases."""
    wrong: list[str] = []
    cases = 0
    for leaves, elements, dtype in itertools.product((comm.size, 8), (0, 1, 17, 1000), ("float32", "float64")):
        place = Place(comm, leaves, elements, dtype)
        for version in versions("cpu"):
            wires = [(None, False), *itertools.product([("float16", 2.0**-3), ("bfloat16", 1.0)], (False, True))]
            for (compression, each_sum), scale in itertools.product(wires, (1.0, 0.3)):
                possible = each_sum or compression is None or "compression" in version.variants
                if not possible or (compression is not None and dtype != "float32") or (each_sum and scale != 1.0):
                    continue
                cases += 1

                how = {"scale": scale, "compression": compression, "each_sum": each_sum}
                make = functools.partial(version.make, place.group, place.arrays, place.slots, **how)
                if elements == 1:
                    compile_once(make, comm)
                made = make()
                for seed, step in enumerate((made.run, _advanced(made), made.run)):
                    values = _values(place, elements, dtype, seed)
                    if compression is not None and elements:
                        special = [1e5, -1e-7, 6.1e-5, 65520.0, 3e38, -0.0]
                        values[0][: min(6, elements)] = special[: min(6, elements)]
                    if compression is not None and each_sum:
                        values = [rounded(row, *compression) for row in values]
                    place.fill(values)
                    step()
                    expected = _expected(values, place.slots, scale, compression, each_sum=each_sum)
                    if not np.array_equal(place.result, expected):
                        case = f"{version.name} {leaves} {elements} {dtype} {compression} {each_sum} {scale}"
                        wrong.append(f"rank {comm.rank}: {case}")
    return {"wrong": list(itertools.chain(*comm.allgather(wrong))), "cases": cases}


def _expected(
    values: list[Array], of: PartialSums, scale: float, compression: tuple[str, float] | None, *, each_sum: bool
) -> Array:
    with np.errstate(over="ignore"):
        if compression is None:
            return reference.allreduce(values, of, scale)
        total = node_sum(of.tree, values, *compression)
        if not each_sum:
            total = rounded(reference.allreduce([rounded(row, *compression) for row in values], of), *compression)
        expected = total if scale == 1.0 else total * np.float32(scale)
        assert np.array_equal(expected, reference.allreduce(values, of, scale, compression, each_sum=each_sum))
        return expected


def _advanced(made: Any) -> Callable[[], None]:
    def run() -> None:
        while not made.done():
            os.sched_yield()

    return run


def stress(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, int]:
    """Rounds of random versions, sizes, payloads and pauses, for 40 s at most; how many gave a wrong sum."""
    largest = 4096
    place = Place(comm, comm.size, largest, "float32", yields=argument["yields"])
    shared = np.random.default_rng(11)  # the same draws on every rank
    own = np.random.default_rng([12, comm.rank])
    sizes = [1, 3, 16, 17, 100, 512, 1000, largest]
    made = {
        (version.name, size): version.make(place.group, [row[:size] for row in place.arrays], place.slots)
        for version in versions("cpu")
        for size in sizes
    }
    keys = list(made)
    rounds = argument["rounds"]
    order = shared.choice(len(keys), rounds, p=_mostly_small(keys))
    pauses = own.random(rounds)
    ramp = np.arange(largest, dtype=np.float32) % 31
    wrong = done = 0
    mine = place.result
    end_s = time.monotonic() + 40
    for number, choice in enumerate(order):
        if number % 1000 == 0 and comm.bcast(time.monotonic() > end_s):
            break
        done += 1
        size = keys[choice][1]
        mine[:size] = ramp[:size]
        mine[:size] += (number * (comm.rank + 1)) % 101
        if pauses[number] < 0.02:
            time.sleep(1e-5) if pauses[number] < 0.002 else os.sched_yield()
        made[keys[choice]].run()
        expected = sum((number * (rank + 1)) % 101 for rank in range(comm.size))
        wrong += not np.array_equal(mine[:size], ramp[:size] * comm.size + expected)
    return {"wrong": comm.allreduce(wrong), "rounds": done, "versions": len({name for name, _ in keys})}


def _mostly_small(keys: list[tuple[str, int]]) -> Array:
    weights = np.array([1.0 / (1 + size / 64) for _, size in keys])
    return weights / weights.sum()


def interrupted(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, bool]:
    """A rank that waits for another heeds a signal, and goes on with its allreduce after it."""
    place = Place(comm, comm.size, 100, "float32")
    made = next(v for v in versions("cpu") if v.name == "two-shot").make(place.group, place.arrays, place.slots)
    place.result[...] = comm.rank + 1
    seen = False
    if comm.rank == 0:

        def heed(number: int, frame: object) -> None:
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, heed)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        worked = threading.Event()
        threading.Thread(target=worked.set).start()
        try:
            made.run()
        except KeyboardInterrupt:
            seen = worked.is_set()
        comm.send(None, 1)
    else:
        comm.recv(source=0)
    made.run()
    right = bool((place.result == sum(range(comm.size + 1))).all())
    return {"interrupted": comm.bcast(seen), "right": all(comm.allgather(right))}


def too_large(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> str:
    link = transport(comm, Network())
    memory = link.allocate(1 << 17).view(np.float32)
    try:
        link.prepare(memory, "one-shot", None)
    except ConfigError as error:
        return str(error)
    return "it was not refused"
