"""Measures which allreduce is the fastest at each size: in shared memory, or by messages where ranks share none."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from mpi4py import MPI

from dpsim.collective import size_ladder
from dpsim.comm.allreduce import prepare
from dpsim.comm.clock import now
from dpsim.comm.group import compile_once, start_together
from dpsim.comm.networks import transport
from dpsim.comm.transport import Array, PersistentAllreduce, Transport
from dpsim.cost_tables import BY_MESSAGES, IN_SHARED_MEMORY
from dpsim.kernels.allreduce.cpu import STAGING_BYTES
from dpsim.machine import Network, Selection

_ROUNDS = 40
_BUDGET_S = 1.5
_LEAST_ROUNDS = 2
_CALLS, _SMALL_BYTES = 4, 2**16
_START_S = 2e-3
_LARGEST_BYTES = 4 * 2**20
_LONG_S = 0.03
"""Where the fastest takes longer, latency no longer matters, and larger arrays take what is the fastest there."""
_DOUBT = 2.0
"""After r rounds an algorithm no longer takes part whose best call takes 1 + _DOUBT / r times the fastest's median."""

_Times = Mapping[int, Mapping[str, Sequence[float]]]
"""Seconds of each call on the slowest rank, by size and algorithm."""


def select(group: MPI.Intracomm) -> Selection:
    """Measure which allreduce is the fastest at each size, for about two seconds at most. Collective.

    Where the ranks share memory that is ``one-shot`` up to some size, and then ``two-shot``; elsewhere one of
    ``BY_MESSAGES`` at each size. All ranks return the same.
    """
    link = transport(group, Network())
    if group.size == 1:
        return Selection.usual(1)
    memory = link.allocate(STAGING_BYTES).view(np.float32)
    compile_once(lambda: [link.prepare(memory, name, None) for name in IN_SHARED_MEMORY], group)
    if link.prepare(memory, "two-shot", None) is None:
        return Selection.fastest(group.size, _medians(_by_messages(group, link)))
    return _in_shared_memory(group, link, memory)


def _in_shared_memory(group: MPI.Intracomm, link: Transport, memory: Array) -> Selection:
    points = [size for size in size_ladder(STAGING_BYTES) if size <= STAGING_BYTES]
    allreduces = {
        (size, name): prepare(link, memory[: size // 4], name)
        for size, name in itertools.product(points, IN_SHARED_MEMORY)
    }
    samples: dict[tuple[str, int], list[float]] = {}
    for number in range(_ROUNDS):
        for (size, name), allreduce in allreduces.items():
            memory[: size // 4] = 1.0
            group.Barrier()
            start_s = now()
            allreduce.run()
            if number:
                samples.setdefault((name, size), []).append(now() - start_s)
    slowest = {
        key: statistics.median(max(row) for row in zip(*group.allgather(times), strict=True))
        for key, times in samples.items()
    }
    faster = itertools.takewhile(lambda size: slowest["one-shot", size] < slowest["two-shot", size], points)
    largest = group.bcast(max(faster, default=0))
    if not largest:
        return Selection(devices=group.size, algorithms=("two-shot",), below_bytes=())
    return Selection(devices=group.size, below_bytes=(largest + 1,))


def _by_messages(group: MPI.Intracomm, link: Transport) -> _Times:
    """Return the times of the algorithms, which take turns at each size. Collective; the same on all ranks.

    A size at which the fastest takes ``_LONG_S`` is the last one. Each size has an equal share of the time, and in it
    each algorithm that is nearly as fast as the fastest.
    """
    times: dict[int, dict[str, list[float]]] = {}
    runs: dict[int, dict[str, PersistentAllreduce]] = {}
    for size in size_ladder(_LARGEST_BYTES):
        runs[size] = {name: prepare(link, np.full(size // 4, 0, np.float32), name) for name in BY_MESSAGES}
        warm_ups = 2 if size <= _SMALL_BYTES else 0  # the first ones connect the ranks
        times[size] = {name: _calls(group, link, run, warm_ups + 1)[warm_ups:] for name, run in runs[size].items()}
        if min(map(statistics.median, times[size].values())) > _LONG_S:
            break
    spent_s = {size: sum(map(sum, times[size].values())) for size in times}
    for number in itertools.count(1):
        sizes = [size for size in times if number < _LEAST_ROUNDS or spent_s[size] < _BUDGET_S / len(times)]
        if not sizes:
            break
        for size in sizes:
            names = _competing(times[size], number)
            turn = number % len(names)
            for name in (*names[turn:], *names[:turn]):
                calls = _calls(group, link, runs[size][name], _CALLS if size <= _SMALL_BYTES else 1)
                times[size][name] += calls
                spent_s[size] += sum(calls) + _START_S
    return times


def _calls(group: MPI.Intracomm, link: Transport, allreduce: PersistentAllreduce, count: int) -> list[float]:
    """Return the seconds of calls in a row on the slowest rank. Collective."""
    start_together(group, asleep=bool(link.nap_s))
    own = np.empty(count)
    for number in range(count):
        start_s = now()
        allreduce.run()
        own[number] = now() - start_s
    slowest = np.empty_like(own)
    group.Allreduce(own, slowest, MPI.MAX)
    return [float(each) for each in slowest]


def _competing(times: Mapping[str, Sequence[float]], number: int) -> list[str]:
    """Return the algorithms of a size that may still be the fastest after so many rounds."""
    fastest_s = min(map(statistics.median, times.values()))
    return [name for name in times if min(times[name]) <= (1 + _DOUBT / number) * fastest_s]


def _medians(times: _Times) -> dict[int, dict[str, float]]:
    return {size: {name: statistics.median(each) for name, each in of.items()} for size, of in times.items()}
