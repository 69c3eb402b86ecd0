"""``BenchResult``: an allreduce benchmark as flat points and as what dpsim comes to beside its peers.

The harness derives it from the record (``dpsim.harness.bench.result``); nothing here computes.
"""

from __future__ import annotations

from typing import Any

from dpsim import codec
from dpsim.codec import Noun


class BenchPoint(Noun, frozen=True):
    """One way to reduce at one size. Times are the slowest rank's.

    ``time_s`` is the median over rounds of a round's median, with its 95 % interval; ``p50_s`` and ``p99_s`` are of all
    calls. ``fraction_of_bound`` is the time of in-place scaling in the same rounds over this one's: the bandwidth that
    2 n S bytes would need over that of scaling. ``None``: below the sizes at which that means anything, or nothing was
    timed since ``wrong`` elements were not the sum. ``bytes_moved`` is what the algorithm reads and writes, all ranks
    together, where that is registered. ``simulated``: numba's CUDA simulator, whose times mean nothing.
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
    """A peer's time over the default algorithm's in the same rounds (above 1: dpsim is faster), and its 95 % interval.

    ``system`` and what follows is the peer's mode that was fastest: its thread level, in or out of place.
    """

    peer: str
    system: str
    algorithm: str
    in_place: bool
    ratio: float
    low: float
    high: float


class BenchSize(Noun, frozen=True):
    """One size: the bound, the default algorithm and the best one in place, and the peers.

    ``noise`` is the difference of the default algorithm's two runs (A/A) as a part of its time.
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


class BenchResult(Noun, frozen=True):
    """What a benchmark came to."""

    points: tuple[BenchPoint, ...]
    sizes: tuple[BenchSize, ...]
    rounds: int

    @property
    def wrong(self) -> int:
        """Elements that were not the exact sum, everywhere."""
        return sum(point.wrong for point in self.points)

    @property
    def simulated(self) -> bool:
        """Whether the times mean nothing."""
        return any(point.simulated for point in self.points)


def points_json(result: BenchResult) -> list[dict[str, Any]]:
    """The flat points of ``--json``."""
    points: list[dict[str, Any]] = codec.to_builtins(result.points)
    return points


def summary_json(result: BenchResult) -> dict[str, Any]:
    """The summary of ``--json``."""
    return {
        "sizes": codec.to_builtins(result.sizes),
        "rounds": result.rounds,
        "wrong": result.wrong,
        "simulated": result.simulated,
    }
