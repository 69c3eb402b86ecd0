"""Tasks of the communication tests: many cases in one job, what went wrong comes back."""

from __future__ import annotations

import itertools
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from memory_transport import random_whole
from mpi4py import MPI
from numpy.typing import NDArray
from wire_reference import direct_sum, hierarchical_sum

from dpsim.algorithms import ALGORITHMS, RUNNABLE, algorithms_in
from dpsim.comm.allreduce import allreduce
from dpsim.comm.broadcast import broadcast
from dpsim.comm.compression import Compression
from dpsim.comm.networks import transport
from dpsim.comm.progress import progress
from dpsim.comm.transport import Transport
from dpsim.dtypes import SIXTEEN_BITS
from dpsim.machine import Network
from dpsim.progress import Progress

Allocate = Callable[[int], NDArray[np.uint8]]


def collectives(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any]:
    """All algorithms on fixed and random lengths; broadcasts of the same lengths."""
    link = transport(comm, Network())
    draw = np.random.default_rng(7)
    lengths = [0, 1, max(comm.size - 1, 1), comm.size + 1, 997, 4096, *draw.integers(0, 3000, 6).tolist()]
    if comm.size > 4:  # more ranks than most machines' cores: slow, so fewer lengths
        lengths = [0, 1, comm.size - 1, 997, int(draw.integers(2000))]
    cases = [(length, dtype) for length in lengths for dtype in ("float32", "float64")]
    wrong = {name: _wrong_sums(comm, link, name, cases) for name in algorithms_in(*RUNNABLE)}
    for name in algorithms_in("shared memory"):
        wrong[name] += _wrong_sums(comm, link, name, cases, link.allocate)
    for of_a_node in (k for k in range(2, comm.size + 1) if comm.size % k == 0):
        of_nodes = transport(comm, Network(), of_a_node)
        wrong["hierarchical"] += _wrong_sums(comm, of_nodes, "hierarchical", cases)
    broadcast_wrong = []
    for length, dtype in cases:
        rows = random_whole(comm.size, length, dtype, length)
        mine = rows[comm.rank].copy()
        broadcast(link, mine)
        if not all(comm.allgather(np.array_equal(mine, rows[0]))):
            broadcast_wrong.append([length, dtype])
    return {"wrong": wrong, "cases": dict.fromkeys(wrong, len(cases)), "broadcast_wrong": broadcast_wrong}


def _wrong_sums(
    comm: MPI.Intracomm, link: Transport, algorithm: str, cases: list[tuple[int, str]], allocate: Allocate | None = None
) -> list[Any]:
    """Cases in which whole numbers are not summed exactly, or random ones differ between ranks or from the sum.

    With ``allocate`` the numbers lie somewhere in the transport's own memory, which the ranks share.
    """

    def placed(row: NDArray[Any]) -> NDArray[Any]:
        if allocate is None:
            return row.copy()
        memory = allocate(row.nbytes + 3 * row.itemsize).view(row.dtype)[2 : 2 + row.size]
        assert row.size == 0 or (link.prepare(memory, "auto", None) is None) == (comm.size == 1)
        memory[...] = row
        return memory

    wrong = []
    for number, (length, dtype) in enumerate(cases):
        whole = random_whole(comm.size, length, dtype, number)
        mine = placed(whole[comm.rank])
        allreduce(link, mine, algorithm)
        exact = np.array_equal(mine, np.sum(whole, axis=0, dtype=dtype))
        random = np.random.default_rng(number)
        rows = [random.standard_normal(length).astype(dtype) for _ in range(comm.size)]
        mine = placed(rows[comm.rank])
        allreduce(link, mine, algorithm)
        tolerance = 4 * comm.size * np.finfo(dtype).eps
        near = np.allclose(mine, np.sum(rows, axis=0, dtype="float64"), rtol=0, atol=tolerance)
        bits = comm.allgather(mine.tobytes())
        if not (all(comm.allgather(exact and near)) and len(set(bits)) == 1):
            wrong.append([length, dtype])
    return wrong


def mechanisms(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any]:
    """Steps of buckets through every progress mechanism, with pauses of the computing thread; what was finished."""
    wrong: list[str] = []
    early: dict[str, list[int]] = {}
    for token in argument["networks"]:
        link = transport(comm, Network.parse(token))
        algorithms = [
            name
            for name in algorithms_in(*RUNNABLE)
            if not (link.network.emulated and ALGORITHMS[name].place != "messages")
        ]
        for overlap in ("off", "inline", "poll", "thread"):
            for algorithm in algorithms:
                case = f"{token} {overlap} {algorithm}"
                finished = _steps(comm, link, algorithm, overlap, case, wrong)
                early.setdefault(f"{token} {overlap}", []).append(finished)
    return {"wrong": wrong, "finished_in_the_pause": early}


def _steps(comm: MPI.Intracomm, link: Transport, algorithm: str, overlap: str, case: str, wrong: list[str]) -> int:
    """Three steps of six buckets; how many were done in the last step's pause, before ``finish``."""
    done: list[tuple[int, int, float, float]] = []
    mechanism = progress(link, algorithm, overlap, lambda *what: done.append(what))
    lengths = [5, 0, 1, 700, 3, 64]
    in_pause = 0
    for step in range(3):
        rows = [random_whole(comm.size, length, "float32", 10 * step + i) for i, length in enumerate(lengths)]
        data = [row[comm.rank].copy() for row in rows]
        done.clear()
        for bucket, mine in enumerate(data):
            mechanism.submit(bucket, mechanism.prepare(mine))
            if bucket == 3:
                time.sleep(0.002 * comm.rank)  # ranks compute at different speeds
            mechanism.poll()
        until = time.perf_counter() + 20.0  # a limit against hanging: it ends once all are done
        while step == 2 and time.perf_counter() < until and len(done) < len(lengths):
            time.sleep(0.0005)
            mechanism.poll()
        in_pause = len(done)
        mechanism.finish()
        names = [bucket for bucket, _, _, _ in done]
        sizes = [size for _, size, _, _ in done]
        if names != list(range(len(lengths))) or sizes != [4 * length for length in lengths]:
            wrong.append(f"{case}: step {step} finished {names} of {sizes} bytes")
        if any(begin > end for _, _, begin, end in done):
            wrong.append(f"{case}: step {step} has an end before its beginning")
        if any(done[i][3] > done[i + 1][2] for i in range(len(done) - 1)):
            wrong.append(f"{case}: step {step} reduced two buckets at once")
        if not all(np.array_equal(mine, np.sum(row, axis=0)) for mine, row in zip(data, rows, strict=True)):
            wrong.append(f"{case}: step {step} has a wrong sum")
    mechanism.close()
    return in_pause


def sixteen_bits(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any]:
    """Buckets with 16 bits on the wire, by both algorithms in every layout, under every mechanism: the wrong cases."""
    wrong: list[str] = []
    of_nodes = [k for k in range(1, comm.size + 1) if comm.size % k == 0]
    layouts = [("direct", 1), *(("hierarchical", k) for k in of_nodes)]
    cases = 0
    for (algorithm, of_a_node), overlap, wire_dtype in itertools.product(
        layouts, ("off", "inline", "poll", "thread"), SIXTEEN_BITS
    ):
        cases += 1
        codes = Compression(wire_dtype, 2.0**-6)
        link = transport(comm, Network(), of_a_node)
        mechanism = progress(link, algorithm, overlap, lambda *what: None, codes)
        buckets, expected = [], []
        for bucket, length in enumerate((5, 0, 1, 997)):
            random = np.random.default_rng(bucket)
            rows = [random.standard_normal(length).astype(np.float32) for _ in range(comm.size)]
            buckets.append(rows[comm.rank].copy())
            if comm.size == 1:
                expected.append(rows[0])
            elif algorithm == "direct":
                expected.append(direct_sum(rows, wire_dtype, codes.scale))
            else:
                expected.append(hierarchical_sum(rows, of_a_node, wire_dtype, codes.scale))
        for bucket, mine in enumerate(buckets):
            mechanism.submit(bucket, mechanism.prepare(mine))
            mechanism.poll()
        mechanism.finish()
        mechanism.close()
        right = all(np.array_equal(mine, other) for mine, other in zip(buckets, expected, strict=True))
        if not all(comm.allgather(right)):
            wrong.append(f"{algorithm} on nodes of {of_a_node}, {overlap}, {wire_dtype}")
    return {"wrong": wrong, "cases": cases}


def unshared(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, bool]:
    """Where no file may be as large as the memory asked for, each rank has its own, and the sum comes by messages."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))
    link = transport(comm, Network())
    memory = link.allocate(40_000).view(np.float32)
    memory[...] = comm.rank + 1
    own = link.prepare(memory, "two-shot", None) is None
    allreduce(link, memory, argument["algorithm"])
    return {"own": own, "right": bool((memory == comm.size * (comm.size + 1) / 2).all())}
