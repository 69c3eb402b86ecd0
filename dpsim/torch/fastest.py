"""Finds the fastest way to reduce while a script trains: the ways take turns, one for some steps, then another."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from dpsim.comm.clock import now
from dpsim.torch.node import Ranks

_SETTLING_STEPS = 4
"""Steps before the first turn: in these DDP makes its buckets anew, and memory is prepared."""
_TURNS = 3
_STEPS_A_TURN = 3
"""The first step of a turn is not counted: it ends what the way before has begun."""
_GAIN = 0.98
"""A way is taken in place of one before it in the list if its step takes at most this part of the other's."""


class Fastest:
    """The choice of the fastest way: ``way`` is that of the next step, on all ranks. Its last bucket ends a step."""

    def __init__(self, ways: Sequence[str], ranks: Ranks) -> None:
        self.way = ways[0]
        self._ranks = ranks
        self._ways = list(ways)
        self._steps = -_SETTLING_STEPS
        self._ended_s = 0.0
        self._samples: dict[str, list[float]] = {way: [] for way in ways}

    def step_ended(self) -> None:
        """Take the time of the step that has ended, and say which way the next one uses. Collective at times."""
        if len(self._ways) == 1:
            return
        ended_s = now()
        if self._steps >= 0 and self._steps % _STEPS_A_TURN:
            self._samples[self.way].append(ended_s - self._ended_s)
        self._ended_s = ended_s
        self._steps += 1
        turn = max(self._steps, 0) // _STEPS_A_TURN
        self.way = self._ways[turn % len(self._ways)]
        if turn == _TURNS * len(self._ways):
            self._decide()

    def _decide(self) -> None:
        of_ranks = self._ranks.allgather({way: statistics.median(times) for way, times in self._samples.items()})
        step_s = {way: max(medians[way] for medians in of_ranks) for way in self._ways}
        self.way = self._ways[0]
        for way in self._ways[1:]:
            if step_s[way] < _GAIN * step_s[self.way]:
                self.way = way
        self._ways = [self.way]
