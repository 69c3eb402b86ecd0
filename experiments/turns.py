"""Training steps of several settings timed in turn, on real ranks: what the experiments that compare steps share."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from mpi4py import MPI

from dpsim.harness.measurement.loop import StopRule, rounds
from dpsim.harness.measurement.steps import WARM_UP_STEPS, step_times_s
from dpsim.runtime.trainer import Trainer

_LEAST_ROUNDS = 6


def steps_in_turn(
    comm: MPI.Intracomm, trainers: Mapping[str, Trainer], *, seconds: float, counted: int
) -> dict[str, list[float]]:
    """Seconds of a step of each trainer, a median a round. Collective, with the same result on every rank.

    In each round every trainer is visited once: two steps that do not count and ``counted`` that do. A step
    lasts from the slowest rank's end to the next one's. One more round, the first, does not count.
    """
    medians_s: dict[str, list[float]] = {name: [] for name in trainers}
    for current in rounds(StopRule(least_rounds=_LEAST_ROUNDS, most_s=seconds), warm_up=1, comm=comm):
        for name in current.order(list(trainers)):
            comm.Barrier()
            ends = [trainers[name].step().marks.end_s for _ in range(WARM_UP_STEPS + counted)]
            times_s = step_times_s(comm.allgather(ends))
            if current.counted:
                medians_s[name].append(float(np.median(times_s)))
    return medians_s
