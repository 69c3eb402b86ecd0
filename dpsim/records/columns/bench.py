"""The columns of a benchmark of the allreduce."""

from __future__ import annotations

from dpsim.columns import column
from dpsim.records.columns.sweep import SETTING

_SIZE = column("size_bytes", "bytes", "The size of the buffer of each rank.", "int64")
_DTYPE = column("dtype", "name", "The number format of the elements.")
_SYSTEM = column("system", "name", "Who did it: `dpsim`, or a peer in one of its modes.")
_PEER = column("peer", "name", "The library of the system; its modes share this name.")
_DEFAULT = column("default", "yes or no", "Whether dpsim uses this algorithm by itself at this size.")
_IN_PLACE = column("in_place", "yes or no", "Whether the sum replaces the buffer.")
_CACHED = column("cached", "yes or no", "Whether the buffers were left in the cache between the calls.")

POINTS = (
    _SIZE,
    column("count", "count", "The elements of the buffer."),
    _DTYPE,
    SETTING["devices"],
    _SYSTEM,
    _PEER,
    column("algorithm", "name", "The allreduce algorithm."),
    _DEFAULT,
    _IN_PLACE,
    _CACHED,
    column(
        "time_s",
        "s",
        "The time of a call on the slowest rank: the median over rounds of each round's median. NaN where a sum was "
        "wrong.",
    ),
    column("time_low_s", "s", "The lower end of its 95 % interval."),
    column("time_high_s", "s", "The upper end of its 95 % interval."),
    column("p50_s", "s", "The median of all calls."),
    column("p99_s", "s", "The 99th percentile of all calls."),
    column("algbw_bytes_per_s", "bytes/s", "The algorithm bandwidth: size_bytes / time_s."),
    column("busbw_bytes_per_s", "bytes/s", "The bus bandwidth: algbw_bytes_per_s times 2 (devices - 1) / devices."),
    column(
        "fraction_of_bound",
        "ratio",
        "The time of scaling the same bytes in place / time_s; NaN at small sizes, where it means nothing.",
    ),
    column("wrong", "count", "The elements that were not the exact sum."),
    column("samples", "count", "The calls that were timed."),
    column("bytes_moved", "bytes", "What all ranks together read and write, where the algorithm states it."),
    column("redop", "name", "The reduction, which is `sum`."),
    column("simulated", "yes or no", "Whether it ran in a simulator of a GPU; its times then mean nothing."),
)

SAMPLES = (
    _SIZE,
    _DTYPE,
    SETTING["devices"],
    _SYSTEM,
    _PEER,
    column("algorithm", "name", "The allreduce algorithm; `scaling` is the bound, `memcpy` a copy within a GPU."),
    _DEFAULT,
    _IN_PLACE,
    _CACHED,
    column("repeat", "count", "0, or 1 for the second run of the default algorithm, which shows the noise."),
    column("round", "count", "The round of the interleaved run, from 0."),
    column("step", "count", "The number of the call within its round, from 0."),
    column("time_s", "s", "The time of the call on the slowest rank."),
)
