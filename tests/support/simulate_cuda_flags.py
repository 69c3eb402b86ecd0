"""Ranks as processes, in numba's simulator, whose kernels wait for each other by flags in memory that they share.

``NUMBA_ENABLE_CUDASIM=1 python simulate_cuda_flags.py ROUNDS``: prints, as JSON, what was wrong for each rank count.
Flags and the counts of points start just below 2^32, so that they begin anew in the middle.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from typing import Any

import cuda_cases as cases
import numpy as np

from dpsim.kernels.allreduce import registry
from dpsim.kernels.allreduce.cuda.launch import flag_words

START = 2**32 - 7


def calls(rounds: int, ranks: int) -> list[tuple[registry.Version, cases.Memory]]:
    versions = registry.versions("cuda")
    chosen = []
    for number in range(rounds):
        version = versions[number % len(versions)]
        variant = ("bfloat16", "sgd")[number // len(versions) % 2] if version.name == "two-shot" else "scale"
        case = cases.Case(version.name, "float32", ranks, 1 + 37 * number % 90, (number % 2,), variant)
        chosen.append((version, cases.Memory(case, cases.shared)))
    return chosen


def run_rank(rank: int, flags: list[Any], todo: list[tuple[registry.Version, cases.Memory]]) -> None:
    """The launches of one rank, one after another, with pauses of its own."""
    sys.setswitchinterval(1e-5)  # the simulator polls its threads
    delays = random.Random(rank)
    for version, memory in todo:
        options = memory.options() | {"rank": rank, "mode": "flags", "flags": flags}
        launch = version.make(memory.arrays, memory.case.slots, **options)
        time.sleep(delays.choice((0, 0, 1e-4, 2e-3)))
        for stage in launch.stages:
            stage(0)


def wrong_at(ranks: int, rounds: int) -> list[str]:
    todo = calls(rounds, ranks)
    flags = [cases.shared(np.full(flag_words(ranks), START, np.uint32)) for _ in range(ranks)]
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            signal.alarm(25)
            run_rank(rank, flags, todo)
            os._exit(0)
        children.append(child)
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    actual = [f"rank {rank} ended with {end}" for rank, end in enumerate(ends) if end != 0]
    return actual + [f"{memory.case}: {wrong}" for _, memory in todo if (wrong := memory.wrong())]


if __name__ == "__main__":
    print(json.dumps({ranks: wrong_at(ranks, int(sys.argv[1])) for ranks in (1, 2, 3, 4)}))
