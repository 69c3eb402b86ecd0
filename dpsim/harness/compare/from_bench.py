"""An allreduce benchmark as a run to compare: one setting for each algorithm of a system at a size."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np

from dpsim import codec
from dpsim.harness.bench.result import FRACTION_FROM_BYTES, result
from dpsim.harness.bench.turns import SCALING
from dpsim.harness.compare.runs import MeasuredRun, MeasuredSetting, RoundSamples, SettingFields
from dpsim.harness.measurement.speed import ORDINARY
from dpsim.harness.measurement.statistics import Interval
from dpsim.records import bench
from dpsim.records.bench import BenchRecord, Series
from dpsim.records.bench_result import BenchPoint
from dpsim.records.run_comparison import ComparedRun

_FIELDS = ("system", "algorithm", "size_bytes", "devices", "dtype", "in_place", "cached")
SeriesKey = tuple[str, str, int, bool, bool]


def read_bench(path: Path, label: str) -> MeasuredRun:
    """Read the record of a benchmark from its folder. Raises ``FileFormatError``."""
    return bench_run(bench.read(path / bench.RECORD), label, str(path))


def bench_run(record: BenchRecord, label: str, path: str) -> MeasuredRun:
    """Return the run of a benchmark. What has no times, or times of a simulator, is listed as unusable."""
    of_record = result(record)
    noise = {size.size_bytes: size.noise for size in of_record.sizes}
    series = {_key(each): each for each in record.series if not each.repeat}
    references = _references(record)
    settings: dict[SettingFields, MeasuredSetting] = {}
    unusable: dict[SettingFields, str] = {}
    for point in of_record.points:
        setting = (("backend", record.bench.backend), *((name, getattr(point, name)) for name in _FIELDS))
        if point.time_s is None or point.time_low_s is None or point.time_high_s is None:
            unusable[setting] = f"it has no times in {label}: its sums were wrong, or it was not timed"
        elif point.simulated:
            unusable[setting] = f"{label} ran it in a simulator, whose times mean nothing"
        else:
            settings[setting] = MeasuredSetting(
                samples=_by_round(series[_key(point)]),
                median=Interval(median=point.time_s, low=point.time_low_s, high=point.time_high_s),
                calls=point.samples,
                noise=noise[point.size_bytes],
                group=point.system,
                emulated_network=False,
                emulated_compute=False,
                references=tuple(references),
            )
    run = ComparedRun(
        label=label,
        path=path,
        sha256=codec.digest(record),
        environment=record.environment,
        declared={each.name: "; ".join(part for part in (each.library, each.how) if part) for each in record.systems},
        measured_from=record.measured_from,
        measured_until=record.measured_until,
        settings=len(settings),
    )
    return MeasuredRun(
        kind="bench allreduce",
        run=run,
        settings=settings,
        unusable=unusable,
        references=references,
        rounds=of_record.rounds,
    )


def _key(item: Series | BenchPoint) -> SeriesKey:
    return item.system, item.algorithm, item.size_bytes, item.in_place, item.cached


def _by_round(series: Series) -> RoundSamples:
    """Return the median of each round, which is what medians over rounds are taken of."""
    medians = [statistics.median(calls) * 1e-9 for calls in series.rounds_ns]
    return RoundSamples.of(medians, range(len(medians)))


def _references(record: BenchRecord) -> dict[str, RoundSamples]:
    """Return the times of scaling an array in memory, by size, with outliers cut off; small sizes say nothing of it."""
    references = {}
    for series in record.series:
        large = series.size_bytes >= FRACTION_FROM_BYTES
        if series.algorithm == SCALING and large and series.rounds_ns and not series.cached:
            samples = _by_round(series)
            clipped = np.clip(samples.time_s, *np.percentile(samples.time_s, ORDINARY))
            references[f"{series.size_bytes} B"] = RoundSamples(time_s=clipped, round=samples.round)
    return references
