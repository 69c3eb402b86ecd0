"""The results of an allreduce benchmark, derived from its record alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpsim.kernels.allreduce.registry import versions
from dpsim.kernels.allreduce.tree import slots
from dpsim.records.bench import OWN, BenchRecord
from dpsim.records.bench_result import FRACTION_FROM_BYTES, BenchPoint, BenchResult, BenchSize, Ratio, medians_s
from dpsim.study.runners.allreduce.turns import MEMCPY, SCALING
from dpsim.study.statistics import median_interval, median_ratio

MPI = "mpi"
REFERENCES = (SCALING, MEMCPY)
"""What is timed beside the allreduces, to compare them with."""


def result(record: BenchRecord) -> BenchResult:
    """Return points and sizes in ascending order. Variants that were wrong somewhere have a point without times."""
    every = _points(record)
    fresh = [point for point in every if not point.cached]
    return BenchResult(
        record=record,
        points=tuple(p for p in every if p.algorithm not in REFERENCES and not p.series.repeat),
        sizes=tuple(_size(size, [p for p in fresh if p.size_bytes == size]) for size in record.bench.sizes()),
        rounds=max((len(series.rounds_ns) for series in record.series), default=0),
    )


def _points(record: BenchRecord) -> list[BenchPoint]:
    """Return a point of every series; bytes moved are those that the registry states for one partial sum a rank."""
    bounds = {(s.size_bytes, s.cached): s for s in record.series if s.algorithm == SCALING}
    moved = {version.name: version.bytes_moved for version in versions(record.bench.backend)}
    one_each, points = slots(range(record.bench.devices + 1)), []
    for series in sorted(record.series, key=lambda s: s.size_bytes):
        one_memory = record.bench.backend == "cpu" or series.system == OWN
        bytes_moved = moved.get(series.algorithm) if series.system == OWN else None
        time = median_interval(medians_s(series)) if series.rounds_ns else None
        points.append(
            BenchPoint(
                record=record,
                series=series,
                bound=bounds.get((series.size_bytes, series.cached)) if one_memory else None,
                time_s=time and time.median,
                time_low_s=time and time.low,
                time_high_s=time and time.high,
                bytes_moved=bytes_moved and bytes_moved(one_each, series.size_bytes),
            )
        )
    return points


def _size(size: int, fresh: Sequence[BenchPoint]) -> BenchSize:
    """Return the comparison of the points of a size whose buffers were rewritten."""
    own = [p for p in fresh if p.system == OWN and p.in_place and p.algorithm not in REFERENCES]
    first = next(p for p in own if p.default and not p.series.repeat)
    second = next((p.time_s for p in own if p.series.repeat), None)
    best = min((p for p in own if p.time_s is not None and not p.series.repeat), key=_time_s, default=first)
    bound_s, copy_s = (
        next((p.time_s for p in fresh if p.algorithm == name and size >= FRACTION_FROM_BYTES), None)
        for name in REFERENCES
    )
    timed = [p for p in fresh if p.time_s is not None and not p.series.repeat]
    peers = _ratios(first, [p for p in timed if p.system != OWN])
    line_s = first.line_s
    of_mpi = [p for p in timed if p.described.kind == "mpi" or (line_s is not None and p.algorithm == MPI)]
    if line_s is not None:
        bound_s = line_s
    return BenchSize(
        size_bytes=size,
        bound_s=bound_s,
        bound_bytes_per_s=None if bound_s is None else 2 * first.devices * size / bound_s,
        default=first.algorithm,
        default_s=first.time_s,
        default_fraction=first.fraction_of_bound,
        best=best.algorithm,
        best_s=best.time_s,
        noise=None if second is None or first.time_s is None else abs(second / first.time_s - 1),
        best_mpi=_ratio(first, of_mpi) if of_mpi and first.time_s is not None else None,
        peers=peers,
        memcpy_bytes_per_s=None if copy_s is None else 2 * first.devices * size / copy_s,
    )


def _time_s(point: BenchPoint) -> float:
    return math.inf if point.time_s is None else point.time_s


def _ratios(own: BenchPoint, others: Sequence[BenchPoint]) -> tuple[Ratio, ...]:
    """Return the ratio of every peer's fastest variant to dpsim's default, fastest peer first."""
    peers = dict.fromkeys(p.peer for p in others if own.time_s is not None)
    ratios = [_ratio(own, [p for p in others if p.peer == peer]) for peer in peers]
    return tuple(sorted(ratios, key=lambda ratio: ratio.ratio))


def _ratio(own: BenchPoint, others: Sequence[BenchPoint]) -> Ratio:
    """Return the ratio of the fastest of other points to dpsim's default."""
    fastest = min(others, key=_time_s)
    ratio = median_ratio(medians_s(fastest.series), medians_s(own.series))
    named = {name: getattr(fastest, name) for name in ("peer", "system", "algorithm", "in_place")}
    return Ratio(ratio=ratio.median, low=ratio.low, high=ratio.high, **named)
