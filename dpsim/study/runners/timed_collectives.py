"""The tables of the collectives that DDP starts and FSDP waits for, from what ranks of a script's environment time.

Ranks time a collective when they are asked to (``dpsim.torch.script.probe.in_turns.collectives``); what follows from
the times of all of them is computed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsim.collective import CollectiveKind, size_ladder
from dpsim.comm.clock import now
from dpsim.constraints import FSDP
from dpsim.study.calibration import LOSS_S, TIME_S, CalibrateConfig
from dpsim.study.rows import CalibratedCollective, Rows
from dpsim.study.runners.script_processes import LEAD_S
from dpsim.torch.script.probe.in_turns.visit import Timed
from dpsim.units import ITEM_BYTES

_LEAST_LOAD_S = 1e-3
_LOAD_OVER_STREAM = 2.5
_MOST_AT_ONCE = 24
_MOST_UNITS = 4

Time = Callable[[Timed], list[Any]]
"""Returns what each rank took for what it is asked for."""


class CollectiveTimes:
    """The visits to one collective at each of its sizes. A visit takes ``parts`` turns to come through all sizes."""

    def __init__(self, subject: CalibratedCollective, sizes: Sequence[int], rows: Rows, ask: Ask, parts: int) -> None:
        self._subject, self._rows, self.ask, self._parts = subject, rows, ask, parts
        self.sizes = self._sizes(sizes)
        self.first_s: dict[int, float] = {}
        """What each size took at first: roughly known before anything counts."""
        self._visits = rows.next_visit(subject)

    def _sizes(self, sizes: Sequence[int]) -> list[int]:
        return list(sizes)

    def visit(self, number: int) -> None:
        """Time the sizes of a part, in an order that ``number`` decides. What is done first does not count."""
        part = self._visits % self._parts
        of_part = self.sizes[part :: self._parts]
        order = np.random.default_rng([number % 2**32, len(self.sizes)]).permutation(of_part).tolist()
        if not self.first_s:
            self.first_s = {size: min(self._timed(size)[TIME_S]) for size in self.sizes}
        for size in order:
            for quantity, values in self._timed(size).items():
                self._rows.add(self._subject, quantity, self._visits, values, size)
        self._visits += 1

    def _timed(self, size: int) -> dict[str, Sequence[float]]:
        """Return seconds by quantity."""
        raise NotImplementedError


class Ask:
    """Asks the ranks of a calibration for what a step of ``max_bytes`` has of the collectives of some devices."""

    def __init__(self, time: Time, devices: int, config: CalibrateConfig) -> None:
        self._time, self.devices, self._config, self._step_bytes = time, devices, config, config.max_bytes
        self._kept: dict[tuple[int, str], float] = {}

    def at_once(self, size: int, most: int = _MOST_AT_ONCE) -> int:
        """Return how many collectives of a size a step has, up to a bound."""
        return max(1, min(most, self._step_bytes // size))

    def of_ranks(self, what: str, size: int, *, units: int = 1) -> list[Any]:
        """Return what each rank took."""
        dtypes = self._config.gather_dtype, self._config.reduce_dtype
        return self._time(Timed(what, self.devices, size, now() + LEAD_S, self.at_once(size), units, *dtypes))

    def sharded_s(self, size: int, kind: CollectiveKind) -> float:
        """Return the mean of the collectives of a kind and size in a few steps of FSDP; that of the other kind is kept.

        It begins with the last rank's, and ends with it.
        """
        size = size // self._config.bytes_a_number(kind) * ITEM_BYTES["float32"]
        if (size, kind) not in self._kept:
            of_ranks = self.of_ranks("sharded", size, units=self.at_once(size, _MOST_UNITS))
            for each in of_ranks[0]:
                begun_s, ended_s = np.max([spans[each] for spans in of_ranks], axis=0).T
                self._kept[size, each] = float(np.mean(ended_s - begun_s))
        return self._kept.pop((size, kind))


class StreamTimes(CollectiveTimes):
    """How long an allreduce takes on average where DDP starts as many at once as a step has of that size.

    A stream begins with the last rank's. ``ZeroRedundancyOptimizer`` starts its broadcasts likewise.
    """

    def _timed(self, size: int) -> dict[str, Sequence[float]]:
        what = "broadcasts" if self._subject.collective.kind == "broadcast" else "stream"
        begun_s, ended_s = np.max(self.ask.of_ranks(what, size), axis=0).T
        seconds: NDArray[np.float64] = (ended_s - begun_s) / self.ask.at_once(size)
        return {TIME_S: seconds.tolist()}


class BackwardTimes(CollectiveTimes):
    """How long an allreduce takes in such a stream beside PyTorch's backward, and how much longer that takes.

    The load alone and the load with a stream alternate; every stream ends well before the load does.
    """

    def __init__(self, alone: StreamTimes, unit_s: float, *given: Any) -> None:
        self._alone, self._unit_s = alone, unit_s
        super().__init__(*given)

    def _sizes(self, sizes: Sequence[int]) -> list[int]:
        return list(sizes[::-2][::-1])  # every second size, the largest among them

    def _timed(self, size: int) -> dict[str, Sequence[float]]:
        count = self.ask.at_once(size)
        stream_s = max(count * self._alone.first_s[size], _LEAST_LOAD_S)
        units = math.ceil(_LOAD_OVER_STREAM * stream_s / self._unit_s)
        plain_s = self.ask.of_ranks("load", size, units=units)
        loaded_s, spans = zip(*self.ask.of_ranks("beside", size, units=units), strict=True)
        begun_s, ended_s = np.moveaxis(np.array(spans), -1, 0)  # [ranks, count] each
        taken_s = (ended_s - begun_s.max(axis=0)).sum(axis=1)
        return {
            TIME_S: [float(taken_s.max()) / count],
            LOSS_S: [float(np.mean(np.subtract(loaded_s, plain_s))) / count],
        }


class ShardedTimes(CollectiveTimes):
    """How long gloo takes for a collective that FSDP waits for, in steps of its own; an allreduce is of a shard."""

    def _timed(self, size: int) -> dict[str, Sequence[float]]:
        collective = self._subject.collective
        share = self.ask.devices // collective.devices if collective.kind == "allreduce" else 1
        return {TIME_S: [self.ask.sharded_s(size * share, collective.kind)]}


def tables_of(
    config: CalibrateConfig,
    subjects: Sequence[CalibratedCollective],
    rows: Rows,
    time: Time,
    unit_s: float,
    parts: int,
) -> list[CollectiveTimes]:
    """Return the tables of a calibration; ``unit_s`` is what a unit of the load takes by itself."""
    asks, tables = dict[int, Ask](), list[CollectiveTimes]()
    for subject in subjects:
        devices = config.ranks_of(subject.collective)
        ask = asks.setdefault(devices, Ask(time, devices, config))
        item_bytes = config.bytes_a_number(subject.collective.kind)
        sizes = [size // ITEM_BYTES["float32"] * item_bytes for size in config.sizes_bytes]
        sizes = sizes or size_ladder(config.max_bytes)
        if config.runtime == FSDP and subject.collective.kind == "allreduce":
            sizes = [size // (devices // subject.collective.devices) for size in sizes]
        given = subject, sizes, rows, ask, parts
        if config.runtime == FSDP:
            tables.append(ShardedTimes(*given))
        elif not subject.overlap:
            tables.append(alone := StreamTimes(*given))
        else:
            tables.append(BackwardTimes(alone, unit_s, *given))
    return tables
