"""The columns of a benchmark of the allreduce."""

from __future__ import annotations

from dpsim.records.columns.column import Column
from dpsim.records.columns.sweep import DEVICES

_SIZE = Column("size_bytes", "int64", "bytes", "The size of the buffer of each rank.")
_DTYPE = Column("dtype", "category", "name", "The number format of the elements.")
_SYSTEM = Column("system", "category", "name", "Who did it: `dpsim`, or a peer in one of its modes.")
_PEER = Column("peer", "category", "name", "The library of the system; its modes share this name.")
_DEFAULT = Column("default", "boolean", "yes or no", "Whether dpsim uses this algorithm by itself at this size.")
_IN_PLACE = Column("in_place", "boolean", "yes or no", "Whether the sum replaces the buffer.")
_CACHED = Column("cached", "boolean", "yes or no", "Whether the buffers were left in the cache between the calls.")

POINTS = (
    _SIZE,
    Column("count", "int64", "count", "The elements of the buffer."),
    _DTYPE,
    DEVICES,
    _SYSTEM,
    _PEER,
    Column("algorithm", "category", "name", "The allreduce algorithm."),
    _DEFAULT,
    _IN_PLACE,
    _CACHED,
    Column(
        "time_s",
        "float64",
        "s",
        "The time of a call on the slowest rank: the median over rounds of each round's median. NaN where a sum was "
        "wrong.",
    ),
    Column("time_low_s", "float64", "s", "The lower end of its 95 % interval."),
    Column("time_high_s", "float64", "s", "The upper end of its 95 % interval."),
    Column("p50_s", "float64", "s", "The median of all calls."),
    Column("p99_s", "float64", "s", "The 99th percentile of all calls."),
    Column("algbw_bytes_per_s", "float64", "bytes/s", "The algorithm bandwidth: size_bytes / time_s."),
    Column(
        "busbw_bytes_per_s",
        "float64",
        "bytes/s",
        "The bus bandwidth: algbw_bytes_per_s times 2 (devices - 1) / devices.",
    ),
    Column(
        "fraction_of_bound",
        "float64",
        "ratio",
        "The time of scaling the same bytes in place / time_s; NaN at small sizes, where it means nothing.",
    ),
    Column("wrong", "int64", "count", "The elements that were not the exact sum."),
    Column("samples", "int64", "count", "The calls that were timed."),
    Column("bytes_moved", "float64", "bytes", "What all ranks together read and write, where the algorithm states it."),
    Column("redop", "category", "name", "The reduction, which is `sum`."),
    Column("simulated", "boolean", "yes or no", "Whether it ran in a simulator of a GPU; its times then mean nothing."),
)

SAMPLES = (
    _SIZE,
    _DTYPE,
    DEVICES,
    _SYSTEM,
    _PEER,
    Column(
        "algorithm",
        "category",
        "name",
        "The allreduce algorithm; `scaling` is the bound, `memcpy` a copy within a GPU.",
    ),
    _DEFAULT,
    _IN_PLACE,
    _CACHED,
    Column("repeat", "int64", "count", "0, or 1 for the second run of the default algorithm, which shows the noise."),
    Column("round", "int64", "count", "The round of the interleaved run, from 0."),
    Column("step", "int64", "count", "The number of the call within its round, from 0."),
    Column("time_s", "float64", "s", "The time of the call on the slowest rank."),
)
