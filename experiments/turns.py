"""Training steps of several settings timed in turn, on real ranks: what the experiments that compare steps share."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from mpi4py import MPI

from dpsim.comm.clock import now
from dpsim.runtime.trainer import Trainer

_UNCOUNTED = 2
_LEAST_ROUNDS = 6


def steps_in_turn(
    comm: MPI.Intracomm, trainers: Mapping[str, Trainer], *, seconds: float, counted: int
) -> dict[str, list[float]]:
    """Seconds of a step of each trainer, a median a round; collective, and the same on every rank.

    In a round each trainer takes a turn, in random order: two steps that do not count and ``counted`` that do. A step
    lasts from the slowest rank's end to the next one's. One more round, the first, does not count either.
    """
    found: dict[str, list[float]] = {name: [] for name in trainers}
    draw = np.random.default_rng(0)
    end_s = now() + seconds
    rounds = 0
    while rounds <= _LEAST_ROUNDS or comm.bcast(now() < end_s):
        for name in draw.permutation(list(trainers)):
            comm.Barrier()
            ends = [trainers[name].step().marks.end_s for _ in range(_UNCOUNTED + counted)]
            last = np.max(comm.allgather(ends), axis=0)
            if rounds:
                found[name].append(float(np.median(np.diff(last)[_UNCOUNTED - 1 :])))
        rounds += 1
    return found
