"""``BenchResult``: an allreduce benchmark as flat points, and dpsim compared with its peers size by size.

``dpsim.harness.bench.result`` derives it from the record.
"""

from __future__ import annotations

import functools
import statistics
from typing import TypeVar

import numpy as np

from dpsim.codec import Noun
from dpsim.columns import Column, Row
from dpsim.records.bench import BenchRecord, Series, System
from dpsim.units import ITEM_BYTES

FRACTION_FROM_BYTES = 64 * 2**10
"""Below this size the time of scaling is that of calling it, and says nothing of memory."""
T = TypeVar("T")


class _Column(Column["BenchPoint", T]):
    """A column of a point; without an expression it is given."""


class BenchPoint(Row):
    """One algorithm of one system at one size. Times are those of the slowest rank.

    Its sources are a ``series`` of the ``record``, and ``bound``, the series of scaling in the same memory in the same
    rounds. All times are ``None`` where ``wrong`` elements were not the sum.
    """

    record: BenchRecord
    series: Series
    bound: Series | None = None

    size_bytes = _Column("bytes", "The size of the buffer of each rank.", lambda p: p.series.size_bytes, dtype="int64")
    count = _Column("count", "The elements of the buffer.", lambda p: p.size_bytes // ITEM_BYTES[p.record.bench.dtype])
    dtype = _Column("name", "The number format of the elements.", lambda p: p.record.bench.dtype)
    devices = _Column("count", "The number of devices; each is one rank.", lambda p: p.record.bench.devices)
    system = _Column("name", "Who did it: `dpsim`, or a peer in one of its modes.", lambda p: p.series.system)
    peer = _Column("name", "The library of the system; its modes share this name.", lambda p: p.described.peer)
    algorithm = _Column("name", "The allreduce algorithm.", lambda p: p.series.algorithm)
    default = _Column(
        "yes or no", "Whether dpsim uses this algorithm by itself at this size.", lambda p: p.series.default
    )
    in_place = _Column("yes or no", "Whether the sum replaces the buffer.", lambda p: p.series.in_place)
    cached = _Column(
        "yes or no", "Whether the buffers were left in the cache between the calls.", lambda p: p.series.cached
    )
    time_s = _Column[float | None](
        "s",
        "The time of a call on the slowest rank: the median over rounds of each round's median. NaN where a sum was "
        "wrong.",
    )
    time_low_s = _Column[float | None]("s", "The lower end of its 95 % interval.")
    time_high_s = _Column[float | None]("s", "The upper end of its 95 % interval.")
    p50_s = _Column("s", "The median of all calls.", lambda p: p.percentile_s(50))
    p99_s = _Column("s", "The 99th percentile of all calls.", lambda p: p.percentile_s(99))
    algbw_bytes_per_s = _Column(
        "bytes/s",
        "The algorithm bandwidth: size_bytes / time_s.",
        lambda p: None if p.time_s is None else p.size_bytes / p.time_s,
    )
    busbw_bytes_per_s = _Column(
        "bytes/s",
        "The bus bandwidth: algbw_bytes_per_s times 2 (devices - 1) / devices.",
        lambda p: None if p.algbw_bytes_per_s is None else p.algbw_bytes_per_s * 2 * (p.devices - 1) / p.devices,
    )
    fraction_of_bound = _Column(
        "ratio",
        "The time of scaling the same bytes in place / time_s; NaN at small sizes, where it means nothing. Between "
        "hosts that of 2 (n - 1) / n of the bytes at the network's rate / time_s.",
        lambda p: _fraction(p.bound, p.series) if p.line_s is None else p.time_s and p.line_s / p.time_s,
    )
    wrong = _Column("count", "The elements that were not the exact sum.", lambda p: p.series.wrong)
    samples = _Column("count", "The calls that were timed.", lambda p: sum(map(len, p.series.rounds_ns)))
    bytes_moved = _Column[float | None](
        "bytes", "What all ranks together read and write, where the algorithm states it."
    )
    redop = _Column("name", "The reduction, which is `sum`.", lambda p: "sum")
    simulated = _Column(
        "yes or no",
        "Whether it ran in a simulator of a GPU; its times then mean nothing.",
        lambda p: p.described.simulated,
    )

    @property
    def line_s(self) -> float | None:
        """The bound between hosts (``AllreduceBench.line_s``); None on one machine."""
        return self.record.bench.line_s(self.size_bytes)

    @functools.cached_property
    def described(self) -> System:
        """The system as the record describes it."""
        return next(system for system in self.record.systems if system.name == self.system)

    def percentile_s(self, percent: float) -> float | None:
        """Return a percentile of all calls."""
        calls_ns = [call for calls in self.series.rounds_ns for call in calls]
        return float(np.percentile(np.asarray(calls_ns) * 1e-9, percent)) if calls_ns else None


def medians_s(series: Series) -> list[float]:
    """Return the median of each round."""
    return [statistics.median(calls) * 1e-9 for calls in series.rounds_ns]


def _fraction(bound: Series | None, series: Series) -> float | None:
    """Return the time of scaling over that of a series, the median over rounds; None where it means nothing."""
    if bound is None or not bound.rounds_ns or not series.rounds_ns or series.size_bytes < FRACTION_FROM_BYTES:
        return None
    return statistics.median(a / b for a, b in zip(medians_s(bound), medians_s(series), strict=True))


class Ratio(Noun, frozen=True):
    """A peer's time over that of dpsim's default algorithm in the same rounds, with its 95 % interval.

    Above 1 dpsim is faster. ``system``, ``algorithm`` and ``in_place`` name the fastest mode of the peer.
    """

    peer: str
    system: str
    algorithm: str
    in_place: bool
    ratio: float
    low: float
    high: float


class BenchSize(Noun, frozen=True):
    """One size: the bound, dpsim's default and its fastest algorithm (both in place), and the peers, fastest first.

    ``best_mpi`` counts dpsim's ``mpi`` too between hosts. ``noise`` is the relative difference of the default
    algorithm's two runs (A/A). ``memcpy_bytes_per_s`` is the bandwidth of the GPU's own copy of the same bytes, reading
    and writing; scaling should come near it.
    """

    size_bytes: int
    bound_s: float | None
    bound_bytes_per_s: float | None
    default: str
    default_s: float | None
    default_fraction: float | None
    best: str
    best_s: float | None
    noise: float | None
    best_mpi: Ratio | None
    peers: tuple[Ratio, ...]
    memcpy_bytes_per_s: float | None = None


class BenchResult(Noun, frozen=True):
    """The result of a benchmark, in ascending order of size."""

    record: BenchRecord
    points: tuple[BenchPoint, ...]
    sizes: tuple[BenchSize, ...]
    rounds: int

    @property
    def wrong(self) -> int:
        """The number of elements that were not the exact sum, over all points."""
        return sum(point.wrong for point in self.points)

    @property
    def simulated(self) -> bool:
        """Whether a point was taken in a simulator, so that its times mean nothing."""
        return any(point.simulated for point in self.points)
