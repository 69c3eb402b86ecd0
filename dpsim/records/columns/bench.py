"""The columns of a benchmark of the allreduce."""

from __future__ import annotations

from dpsim.columns import column, columns_of
from dpsim.records.bench_result import BenchPoint

_POINT = columns_of(BenchPoint)
POINTS = tuple(_POINT.values())
SAMPLES = (
    *(_POINT[name] for name in ("size_bytes", "dtype", "devices", "system", "peer")),
    column("algorithm", "name", "The allreduce algorithm; `scaling` is the bound, `memcpy` a copy within a GPU."),
    *(_POINT[name] for name in ("default", "in_place", "cached")),
    column("repeat", "count", "0, or 1 for the second run of the default algorithm, which shows the noise."),
    column("round", "count", "The round of the interleaved run, from 0."),
    column("step", "count", "The number of the call within its round, from 0."),
    column("time_s", "s", "The time of the call on the slowest rank."),
)
