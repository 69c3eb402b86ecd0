"""The results of an allreduce benchmark, derived from its record alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from dpsim.harness.bench.turns import MEMCPY, SCALING
from dpsim.harness.measurement.statistics import median_interval, median_ratio
from dpsim.kernels.allreduce.registry import versions
from dpsim.kernels.allreduce.tree import slots
from dpsim.records.bench import OWN, BenchRecord, Series, System
from dpsim.records.bench_result import BenchPoint, BenchResult, BenchSize, Ratio
from dpsim.units import ITEM_BYTES

FRACTION_FROM_BYTES = 64 * 2**10
"""Below this size the time of scaling is that of calling it, and says nothing of memory."""

REFERENCES = (SCALING, MEMCPY)
"""What is timed beside the allreduces, to compare them with."""


def result(record: BenchRecord) -> BenchResult:
    """Points and sizes in ascending order of size. Variants that were wrong somewhere have a point without times."""
    bounds = {(s.size_bytes, s.cached): s for s in record.series if s.algorithm == SCALING}
    copies = {s.size_bytes: s for s in record.series if s.algorithm == MEMCPY and not s.cached}
    moved = _bytes_moved(record)
    points = []
    for series in sorted(record.series, key=lambda s: s.size_bytes):
        if series.algorithm not in REFERENCES and not series.repeat:
            one_memory = record.bench.backend == "cpu" or series.system == OWN
            bound = bounds.get((series.size_bytes, series.cached)) if one_memory else None
            bytes_moved = moved.get((series.system, series.algorithm, series.size_bytes))
            points.append(_point(record, series, bound, bytes_moved))
    return BenchResult(
        points=tuple(points),
        sizes=tuple(_size(record, size, bounds.get((size, False)), copies.get(size)) for size in record.bench.sizes()),
        rounds=max((len(series.rounds_ns) for series in record.series), default=0),
    )


def _medians_s(series: Series) -> list[float]:
    """The median of each round."""
    return [statistics.median(calls) * 1e-9 for calls in series.rounds_ns]


def _bytes_moved(record: BenchRecord) -> dict[tuple[str, str, int], float]:
    """Bytes moved by system, algorithm and size, as the registry states them for one partial sum a rank."""
    one_each = slots(range(record.bench.devices + 1))
    return {
        (OWN, version.name, size): version.bytes_moved(one_each, size)
        for version in versions(record.bench.backend)
        for size in record.bench.sizes()
    }


def _point(record: BenchRecord, series: Series, bound: Series | None, bytes_moved: float | None) -> BenchPoint:
    n, size, rounds = record.bench.devices, series.size_bytes, _medians_s(series)
    time = median_interval(rounds) if rounds else None
    calls_s = np.concatenate([np.asarray(calls) for calls in series.rounds_ns]) * 1e-9 if rounds else np.empty(0)
    algbw, system = size / time.median if time else None, _systems(record)[series.system]
    return BenchPoint(
        size_bytes=size,
        count=size // ITEM_BYTES[record.bench.dtype],
        dtype=record.bench.dtype,
        devices=n,
        system=series.system,
        peer=system.peer,
        algorithm=series.algorithm,
        default=series.default,
        in_place=series.in_place,
        cached=series.cached,
        simulated=system.simulated,
        time_s=time.median if time else None,
        time_low_s=time.low if time else None,
        time_high_s=time.high if time else None,
        p50_s=float(np.percentile(calls_s, 50)) if rounds else None,
        p99_s=float(np.percentile(calls_s, 99)) if rounds else None,
        algbw_bytes_per_s=algbw,
        busbw_bytes_per_s=None if algbw is None else algbw * 2 * (n - 1) / n,
        fraction_of_bound=_fraction(series, bound),
        wrong=series.wrong,
        samples=len(calls_s),
        bytes_moved=bytes_moved,
    )


def _fraction(series: Series, bound: Series | None) -> float | None:
    """The time of scaling over this variant's, the median over rounds; None where it means nothing."""
    if bound is None or not bound.rounds_ns or not series.rounds_ns or series.size_bytes < FRACTION_FROM_BYTES:
        return None
    pairs = zip(_medians_s(bound), _medians_s(series), strict=True)
    return statistics.median(scaling / own for scaling, own in pairs)


def _size(record: BenchRecord, size: int, bound: Series | None, copy: Series | None) -> BenchSize:
    fresh = [s for s in record.series if s.size_bytes == size and not s.cached and s.algorithm not in REFERENCES]
    own = [s for s in fresh if s.system == OWN and s.in_place]
    first = next(s for s in own if s.default and not s.repeat)
    second = next((s for s in own if s.repeat), None)
    timed = [s for s in own if s.rounds_ns and not s.repeat]
    best = min(timed, key=_median_s, default=first)
    bound_s, copy_s = (
        _median_s(of_memory) if of_memory is not None and of_memory.rounds_ns and size >= FRACTION_FROM_BYTES else None
        for of_memory in (bound, copy)
    )
    default_s = _median_s(first) if first.rounds_ns else None
    peers = _ratios(record, first, [s for s in fresh if s.system != OWN and s.rounds_ns]) if first.rounds_ns else ()
    of_mpi = {system.name for system in record.systems if system.kind == "mpi"}
    return BenchSize(
        size_bytes=size,
        bound_s=bound_s,
        bound_bytes_per_s=None if bound_s is None else 2 * record.bench.devices * size / bound_s,
        default=first.algorithm,
        default_s=default_s,
        default_fraction=_fraction(first, bound),
        best=best.algorithm,
        best_s=_median_s(best) if best.rounds_ns else None,
        noise=None
        if second is None or not first.rounds_ns or not second.rounds_ns
        else abs(_median_s(second) / _median_s(first) - 1),
        best_mpi=min((r for r in peers if r.system in of_mpi), key=lambda r: r.ratio, default=None),
        peers=peers,
        memcpy_bytes_per_s=None if copy_s is None else 2 * record.bench.devices * size / copy_s,
    )


def _median_s(series: Series) -> float:
    return statistics.median(_medians_s(series))


def _systems(record: BenchRecord) -> dict[str, System]:
    return {system.name: system for system in record.systems}


def _ratios(record: BenchRecord, own: Series, series: Sequence[Series]) -> tuple[Ratio, ...]:
    """The ratio of every peer's fastest variant to dpsim's default, fastest peer first."""
    ratios, peers = [], {name: system.peer for name, system in _systems(record).items()}
    for peer in dict.fromkeys(peers.values()):
        variants = [variant for variant in series if peers[variant.system] == peer]
        if variants:
            fastest = min(variants, key=_median_s)
            ratio = median_ratio(_medians_s(fastest), _medians_s(own))
            ratios.append(
                Ratio(
                    peer=peer,
                    system=fastest.system,
                    algorithm=fastest.algorithm,
                    in_place=fastest.in_place,
                    ratio=ratio.median,
                    low=ratio.low,
                    high=ratio.high,
                )
            )
    return tuple(sorted(ratios, key=lambda ratio: ratio.ratio))
