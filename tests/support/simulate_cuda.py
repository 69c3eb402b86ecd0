"""Runs the CUDA kernels in numba's simulator on many cases; prints those that were wrong, as JSON.

``NUMBA_ENABLE_CUDASIM=1 python simulate_cuda.py SHARE SHARES``: every SHARES-th case, from the SHARE-th on.
"""

from __future__ import annotations

import itertools
import json
import sys

import cuda_cases as cases
from quick_simulator import short_turns

from dpsim.kernels.allreduce import registry


def wrong_in(case: cases.Case) -> str | None:
    """What is wrong in the simulator's result of a case, if anything. Ranks apart do a stage one after another."""
    memory = cases.Memory(case, cases.shared)
    version = next(v for v in registry.versions("cuda") if v.name == case.version)
    ranks = range(len(set(case.slots.owners))) if case.apart else (None,)
    launches = [version.make(memory.arrays, case.slots, rank=r, mode="split", **memory.options()) for r in ranks]
    for stages in zip(*(launch.stages for launch in launches), strict=True):
        for stage in stages:
            stage(0)
    return memory.wrong()


def main() -> None:
    share, shares = map(int, sys.argv[1:])
    chosen = itertools.islice(cases.covering(), share, None, shares)
    results = [(str(case), wrong_in(case)) for case in chosen]
    print(json.dumps({"cases": len(results), "wrong": [result for result in results if result[1] is not None]}))


if __name__ == "__main__":
    with short_turns():
        main()
