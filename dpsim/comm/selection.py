"""Measures which allreduce in shared memory is the fastest at each size."""

from __future__ import annotations

import itertools
import statistics

import numpy as np
from mpi4py import MPI

from dpsim.collective import size_ladder
from dpsim.comm.allreduce import prepare
from dpsim.comm.clock import now
from dpsim.comm.group import compile_once
from dpsim.comm.networks import transport
from dpsim.kernels.allreduce.cpu import STAGING_BYTES
from dpsim.machine import Network, Selection

_ROUNDS = 40


def select(group: MPI.Intracomm) -> Selection | None:
    """Measure up to which size ``one-shot`` is faster than ``two-shot``, in a fraction of a second. Collective.

    None where the ranks share no memory.
    """
    link = transport(group, Network())
    points = [size for size in size_ladder(STAGING_BYTES) if size <= STAGING_BYTES]
    names = ("one-shot", "two-shot")
    memory = link.allocate(STAGING_BYTES).view(np.float32)
    compile_once(lambda: [link.prepare(memory, name, None) for name in names], group)
    if link.prepare(memory, "two-shot", None) is None:
        return None
    allreduces = {
        (size, name): prepare(link, memory[: size // 4], name) for size, name in itertools.product(points, names)
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
