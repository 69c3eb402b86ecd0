"""Reads sweeps and benchmarks of the allreduce as runs to compare: a row for each setting, by what names it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpsim import codec
from dpsim.codec import Noun
from dpsim.columns import columns_of
from dpsim.errors import FileFormatError
from dpsim.fields import Decides, fields
from dpsim.harness.load import load
from dpsim.plan import Plan
from dpsim.records.bench import BenchRecord
from dpsim.records.bench_result import BenchResult, medians_s
from dpsim.records.compared_point import ComparedPoint, OfSetting
from dpsim.records.comparison import SweepData
from dpsim.records.run_comparison import ComparedRun, Row
from dpsim.records.sweep import Results, clean_values
from dpsim.setting import FIELDS

Floats = NDArray[np.float64]
Named = tuple[tuple[str, Any], ...]
"""The fields that name a setting, as pairs of name and value."""
_KINDS = "the folder of a sweep or of bench allreduce, or the record in it (results.json, allreduce.json)"
_REFUSED = {
    "train": (
        "a result of dpsim train: it has one median step and no samples, so its noise is not known",
        "measure the setting with dpsim sweep fusion-threshold or dpsim sweep devices",
    ),
    "reproduce": (
        "a check of reproducibility: it holds bits, not times",
        "compare bits with dpsim reproduce --against",
    ),
}
_COLUMNS = FIELDS.keys() & {name for name, each in columns_of(ComparedPoint).items() if isinstance(each, OfSetting)}
"""The fields that name every setting; others, such as the optimizer, do where a run varies them."""
_OF_MESSAGES = {
    name
    for name, field in fields(Plan).items()
    if not field.decides & (Decides.SHARES | Decides.COMPUTE_TIME)
    and (field.decides & Decides.NETWORK_TIME or not field.decides & Decides.BITS)
}
"""The fields of a plan that mean nothing on one device."""
_BENCH = ("system", "algorithm", "size_bytes", "devices", "dtype", "in_place", "cached")


class RoundSamples(NamedTuple):
    """Samples in seconds, and the index of the round of each: samples of one round are not independent."""

    time_s: Floats
    round: NDArray[np.intp]


class MeasuredRun(NamedTuple):
    """A run: what it measured at each setting, and its samples there, whose ``rounds`` are numbered from 0.

    A row has the median of the samples and its interval as reports show them, and the run's A/A noise there.
    ``unusable`` maps settings that cannot be compared to the reason.
    """

    kind: Literal["sweep", "bench allreduce"]
    run: ComparedRun
    rows: dict[Named, Row]
    samples: dict[Named, RoundSamples]
    rounds: int
    unusable: dict[Named, str]


def read_runs(paths: Sequence[Path], labels: Sequence[str]) -> list[MeasuredRun]:
    """Read runs from their folders, or from the records in them. Raises ``ConfigError`` and ``FileFormatError``."""
    loaded = [load(path) for path in paths]
    for path, saved in zip(paths, loaded, strict=True):
        if saved.kind not in ("sweep", "bench"):
            reason, remedy = _REFUSED.get(saved.kind, ("no record that can be compared", ""))
            raise FileFormatError(f"{path} is {reason}", allowed=_KINDS, remedy=remedy)
    varied = varied_fields([saved.data for saved in loaded if saved.kind == "sweep"])
    return [
        sweep_run(saved.data, label, str(path if path.is_dir() else path.parent), varied)
        if saved.kind == "sweep"
        else bench_run(saved.data, label, str(path))
        for path, label, saved in zip(paths, labels, loaded, strict=True)
    ]


def varied_fields(sweeps: Sequence[SweepData]) -> set[str]:
    """Return the fields that few sweeps vary, such as the optimizer, and that one of these varies."""
    settings = [[point.setting for point in saved.comparison.points] for saved in sweeps]
    return {
        name
        for name in FIELDS.keys() - _COLUMNS - {"local_batch", "cycle_s"}
        if any(len({each.value(name) for each in of_one}) > 1 for of_one in settings)
    }


def sweep_run(saved: SweepData, label: str, path: str, varied: Collection[str]) -> MeasuredRun:
    """Return the run of a sweep, with the samples of each setting as the sweep's own report uses them.

    Settings are also named by the fields that are ``varied`` in any of the compared runs.
    """
    points, experiment = saved.comparison.points, saved.results.experiment
    index = {number: i for i, number in enumerate(sorted({n for run in saved.results.points for n in run.round}))}
    rows, samples = dict[Named, Row](), dict[Named, RoundSamples]()
    for named, point in zip(_named(points, varied), points, strict=True):
        of_rounds = [index[number] for number in clean_values(point.runs, "round")]
        samples[named] = _samples(clean_values(point.runs), of_rounds)
        rows[named] = _row(
            samples[named],
            (point.measured_step_s, point.measured_low_s, point.measured_high_s, point.samples),
            noise=point.noise,
            group=point.network,
            emulated_network=point.emulated_network,
            emulated_compute=point.emulated_compute,
        )
    declared = {
        "model": ", ".join(dict.fromkeys(point.model for point in points)),
        "data set": experiment.dataset,
        "optimizer": "; ".join(dict.fromkeys(_in_words(point.setting.plan.optimizer) for point in points)),
        "seed": str(experiment.seed),
    }
    run = _described(saved.results, label, path, declared, len(rows))
    return MeasuredRun("sweep", run, rows, samples, rounds=len(index), unusable={})


def bench_run(result: BenchResult, label: str, path: str) -> MeasuredRun:
    """Return the run of a benchmark: a setting is an algorithm of a system at a size.

    What has no times, or times of a simulator, is unusable.
    """
    record = result.record
    noise = {size.size_bytes: size.noise for size in result.sizes}
    rows, samples, unusable = dict[Named, Row](), dict[Named, RoundSamples](), dict[Named, str]()
    for point in result.points:
        named = (("backend", record.bench.backend), *((name, getattr(point, name)) for name in _BENCH))
        if point.time_s is None:
            unusable[named] = f"it has no times in {label}: its sums were wrong, or it was not timed"
        elif point.simulated:
            unusable[named] = f"{label} ran it in a simulator, whose times mean nothing"
        else:
            samples[named] = _samples(medians_s(point.series), range(len(point.series.rounds_ns)))
            rows[named] = _row(
                samples[named],
                (point.time_s, point.time_low_s, point.time_high_s, point.samples),
                noise=noise[point.size_bytes],
                group=point.system,
                emulated_network=False,
                emulated_compute=False,
            )
    declared = {each.name: "; ".join(filter(None, (each.library, each.how))) for each in record.systems}
    run = _described(record, label, path, declared, len(rows))
    return MeasuredRun("bench allreduce", run, rows, samples, result.rounds, unusable)


def _row(samples: RoundSamples, times: Sequence[Any], **values: Any) -> Row:
    names = ("time_s", "low_s", "high_s", "samples", "rounds")
    return dict(zip(names, (*times, len(np.unique(samples.round))), strict=True)) | values


def _described(
    record: Results | BenchRecord, label: str, path: str, declared: dict[str, str], settings: int
) -> ComparedRun:
    return ComparedRun(
        label=label,
        path=path,
        sha256=codec.digest(record),
        environment=record.environment,
        declared=declared,
        measured_from=record.measured_from,
        measured_until=record.measured_until,
        settings=settings,
    )


def _named(points: Sequence[ComparedPoint], varied: Collection[str]) -> list[Named]:
    """Return the fields that name the setting of each point.

    Without communication most fields mean nothing, and one device is named by the others; unless a run has measured it
    several times. Who trains is part of the name where it is not dpsim.
    """
    short = [_fields(point, varied, communication=point.devices > 1) for point in points]
    return [
        fields if short.count(fields) == 1 else _fields(point, varied, communication=True)
        for fields, point in zip(short, points, strict=True)
    ]


def _fields(point: ComparedPoint, varied: Collection[str], *, communication: bool) -> Named:
    names = {*_COLUMNS, *varied, *["cycle_s"] * (point.fusion_rule == "horovod")}
    names -= {"runtime"} if point.runtime == "dpsim" else set()
    names -= set() if communication else _OF_MESSAGES
    values = {
        name: getattr(point, name) if name in _COLUMNS else point.setting.value(name)
        for name in FIELDS
        if name in names
    }
    if "fusion_threshold_bytes" in values and point.setting.text("fusion_threshold_bytes") == "none":
        values["fusion_threshold_bytes"] = None
    return tuple((name, _in_words(value) if isinstance(value, Noun) else value) for name, value in values.items())


def _in_words(value: Noun) -> str:
    """Return ``Sgd, learning_rate 0.01, momentum 0.9``."""
    fields = codec.to_builtins(value).items()
    return ", ".join([type(value).__name__, *(f"{name} {each}" for name, each in fields if name != "kind")])


def _samples(time_s: Sequence[float], rounds: Sequence[int]) -> RoundSamples:
    return RoundSamples(np.array(time_s, np.float64), np.array(rounds, np.intp))
