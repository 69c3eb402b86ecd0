"""Ranks as processes, in numba's simulator, whose kernels wait for each other by flags in memory that they share.

``NUMBA_ENABLE_CUDASIM=1 python simulate_cuda_flags.py ROUNDS``: prints, as JSON, what was wrong for each rank count.
Flags and the counts of points start just below 2^32, so that they begin anew in the middle. With ``missing`` for ROUNDS
the last rank comes only when the others have given up: prints what each rank reports, and how long it took.
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
from quick_simulator import short_turns

from dpsim.errors import CommunicationError
from dpsim.kernels.allreduce import registry
from dpsim.kernels.allreduce.cuda.launch import HEADER_WORDS, Watch, flag_words

START = 2**32 - 7
LIMIT_S = 0.5


def flags_of(ranks: int) -> list[Any]:
    words = np.full(flag_words(ranks), START, np.uint32)
    words[:HEADER_WORDS] = 0
    return [cases.shared(words) for _ in range(ranks)]


def calls(rounds: int, ranks: int) -> list[tuple[registry.Version, cases.Memory]]:
    versions = registry.versions("cuda")
    chosen = []
    for number in range(rounds):
        version = versions[number % len(versions)]
        variant = "bfloat16" if version.name == "two-shot" and number // len(versions) % 2 == 0 else "scale"
        case = cases.Case(version.name, "float32", ranks, 1 + 37 * number % 90, (number % 2,), variant)
        chosen.append((version, cases.Memory(case, cases.shared)))
    return chosen


def run_rank(rank: int, flags: list[Any], todo: list[tuple[registry.Version, cases.Memory]]) -> None:
    """The launches of one rank, one after another, with pauses of its own."""
    delays = random.Random(rank)
    for version, memory in todo:
        options = memory.options() | {"rank": rank, "mode": "flags", "flags": flags}
        launch = version.make(memory.arrays, memory.case.slots, **options)
        time.sleep(delays.choice((0, 0, 1e-4, 2e-3)))
        for stage in launch.stages:
            stage(0)


def wrong_at(ranks: int, rounds: int) -> list[str]:
    todo = calls(rounds, ranks)
    flags = flags_of(ranks)
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


def run_watched(
    version: registry.Version, memory: cases.Memory, flags: list[Any], rank: int, watch: Watch, present: Any
) -> float:
    """One allreduce of a rank, begun together with all but the last; how many seconds it took."""
    options = memory.options() | {"rank": rank, "mode": "flags", "flags": flags, "watch": watch}
    launch = version.make(memory.arrays, memory.case.slots, **options)
    present[rank] = 1
    while not present[:-1].all():
        time.sleep(1e-4)
    begin_s = time.perf_counter()
    for stage in launch.stages:
        stage(0)
    return time.perf_counter() - begin_s


def without_the_last(version: registry.Version, ranks: int) -> dict[str, Any]:
    """What each rank reports when the last one comes too late, and how many seconds the first and the last took."""
    memory = cases.Memory(cases.Case(version.name, "float32", ranks, 40), cases.shared)
    flags = flags_of(ranks)
    reports = [cases.shared(np.zeros(1, np.uint32)) for _ in range(ranks)]
    present, taken = cases.shared(np.zeros(ranks, np.uint8)), cases.shared(np.zeros(ranks))
    children = []
    for rank in range(ranks - 1):
        child = os.fork()
        if child == 0:
            signal.alarm(25)
            watch = Watch(limit_s=LIMIT_S, report=reports[rank])
            taken[rank] = run_watched(version, memory, flags, rank, watch, present)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    patient = Watch(limit_s=600.0, report=reports[-1])
    taken[-1] = run_watched(version, memory, flags, ranks - 1, patient, present)
    said = []
    for report in reports:
        try:
            Watch(limit_s=LIMIT_S, report=report).check(ranks)
        except CommunicationError as error:
            said.append(str(error))
    return {"version": version.name, "ranks": ranks, "said": said, "taken_s": taken.tolist()}


if __name__ == "__main__":
    with short_turns():
        if sys.argv[1] == "missing":
            versions = {version.name: version for version in registry.versions("cuda")}
            tried = [(name, 3) for name in versions] + [("two-shot", 2), ("ring", 4)]
            print(json.dumps([without_the_last(versions[name], ranks) for name, ranks in tried]))
        else:
            print(json.dumps({ranks: wrong_at(ranks, int(sys.argv[1])) for ranks in (1, 2, 3, 4)}))
