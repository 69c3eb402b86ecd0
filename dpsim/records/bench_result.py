"""``BenchResult``: an allreduce benchmark as flat points, and dpsim compared with its peers size by size.

``dpsim.harness.bench.result`` derives it from the record; nothing is computed in this module.
"""

from __future__ import annotations

from typing import Annotated

from dpsim.codec import Noun
from dpsim.columns import Column


class BenchPoint(Noun, frozen=True):
    """One algorithm of one system at one size. Times are those of the slowest rank.

    All times are ``None`` where ``wrong`` elements were not the sum. ``fraction_of_bound`` is the bandwidth for 2 n S
    bytes over the bandwidth of scaling in the same rounds.
    """

    size_bytes: Annotated[int, Column("bytes", "The size of the buffer of each rank.", dtype="int64")]
    count: Annotated[int, Column("count", "The elements of the buffer.")]
    dtype: Annotated[str, Column("name", "The number format of the elements.")]
    devices: Annotated[int, Column("count", "The number of devices; each is one rank.")]
    system: Annotated[str, Column("name", "Who did it: `dpsim`, or a peer in one of its modes.")]
    peer: Annotated[str, Column("name", "The library of the system; its modes share this name.")]
    algorithm: Annotated[str, Column("name", "The allreduce algorithm.")]
    default: Annotated[bool, Column("yes or no", "Whether dpsim uses this algorithm by itself at this size.")]
    in_place: Annotated[bool, Column("yes or no", "Whether the sum replaces the buffer.")]
    cached: Annotated[bool, Column("yes or no", "Whether the buffers were left in the cache between the calls.")]
    time_s: Annotated[
        float | None,
        Column(
            "s",
            "The time of a call on the slowest rank: the median over rounds of each round's "
            "median. NaN where a sum was wrong.",
        ),
    ]
    time_low_s: Annotated[float | None, Column("s", "The lower end of its 95 % interval.")]
    time_high_s: Annotated[float | None, Column("s", "The upper end of its 95 % interval.")]
    p50_s: Annotated[float | None, Column("s", "The median of all calls.")]
    p99_s: Annotated[float | None, Column("s", "The 99th percentile of all calls.")]
    algbw_bytes_per_s: Annotated[float | None, Column("bytes/s", "The algorithm bandwidth: size_bytes / time_s.")]
    busbw_bytes_per_s: Annotated[
        float | None, Column("bytes/s", "The bus bandwidth: algbw_bytes_per_s times 2 (devices - 1) / devices.")
    ]
    fraction_of_bound: Annotated[
        float | None,
        Column(
            "ratio", "The time of scaling the same bytes in place / time_s; NaN at small sizes, where it means nothing."
        ),
    ]
    wrong: Annotated[int, Column("count", "The elements that were not the exact sum.")]
    samples: Annotated[int, Column("count", "The calls that were timed.")]
    bytes_moved: Annotated[
        float | None, Column("bytes", "What all ranks together read and write, where the algorithm states it.")
    ]
    redop: Annotated[str, Column("name", "The reduction, which is `sum`.")] = "sum"
    simulated: Annotated[
        bool, Column("yes or no", "Whether it ran in a simulator of a GPU; its times then mean nothing.")
    ] = False


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
    """One size: the bound, dpsim's default and its fastest algorithm (both in place), and the peers.

    ``noise`` is the relative difference of the default algorithm's two runs (A/A). ``memcpy_bytes_per_s`` is the
    bandwidth of the GPU's own copy of the same bytes, reading and writing; scaling should come near it.
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
