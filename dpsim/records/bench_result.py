"""``BenchResult``: an allreduce benchmark as flat points, and dpsim compared with its peers size by size.

``dpsim.harness.bench.result`` derives it from the record; nothing is computed in this module.
"""

from __future__ import annotations

from dpsim.codec import Noun


class BenchPoint(Noun, frozen=True):
    """One algorithm of one system at one size. Times are those of the slowest rank.

    ``time_s`` is the median over rounds of each round's median, with its 95 % interval; ``p50_s`` and ``p99_s`` are
    percentiles of all calls. ``fraction_of_bound`` = time of in-place scaling in the same rounds / ``time_s``, which is
    the bandwidth for 2 n S bytes over the bandwidth of scaling. It is ``None`` at sizes too small for it to mean
    anything. All times are ``None`` where ``wrong`` elements were not the sum. ``bytes_moved`` is what all ranks
    together read and write, where the algorithm states it. ``simulated`` marks numba's CUDA simulator; its times mean
    nothing.
    """

    size_bytes: int
    count: int
    dtype: str
    devices: int
    system: str
    peer: str
    algorithm: str
    default: bool
    in_place: bool
    cached: bool
    time_s: float | None
    time_low_s: float | None
    time_high_s: float | None
    p50_s: float | None
    p99_s: float | None
    algbw_bytes_per_s: float | None
    busbw_bytes_per_s: float | None
    fraction_of_bound: float | None
    wrong: int
    samples: int
    bytes_moved: float | None
    redop: str = "sum"
    simulated: bool = False


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
