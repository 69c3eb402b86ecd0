"""Reads sweeps and benchmarks of the allreduce as runs to compare: the samples of each setting, by what names it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import FileFormatError
from dpsim.harness.load import load
from dpsim.records.bench import BenchRecord
from dpsim.records.bench_result import BenchResult, medians_s
from dpsim.records.comparison import ComparedPoint
from dpsim.records.run_comparison import ComparedRun, SettingValue
from dpsim.records.sweep import Results
from dpsim.report.sweep.saved import SweepData
from dpsim.setting import FIELDS

Floats = NDArray[np.float64]
SettingFields = tuple[tuple[str, SettingValue], ...]
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
_SINGLE = (
    *("network", "model", "devices", "global_batch", "accumulate", "batch_norm"),
    *("leaves", "strategy", "compute_dtype"),
)
_COMMUNICATION = ["layout", "fusion_rule", "fusion_threshold_bytes", "algorithm", "overlap", "wire_dtype"]
_WHERE_VARIED = [name for name in FIELDS if name not in (*_SINGLE, *_COMMUNICATION, "local_batch")]
_BENCH = ["system", "algorithm", "size_bytes", "devices", "dtype", "in_place", "cached"]


class RoundSamples(NamedTuple):
    """Samples in seconds, and the index of the round of each: samples of one round are not independent."""

    time_s: Floats
    round: NDArray[np.intp]


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredSetting:
    """One setting of a run: its samples, their median and interval as reports show it, and the run's A/A noise there.

    ``group`` is the network of a sweep's setting, and the system of a benchmark's.
    """

    samples: RoundSamples
    time_s: float
    low_s: float
    high_s: float
    calls: int
    noise: float | None
    group: str
    emulated_network: bool = False
    emulated_compute: bool = False

    @property
    def times(self) -> dict[str, Any]:
        """The median, its interval, and the numbers of samples and rounds, under the names of a comparison."""
        rounds = len(np.unique(self.samples.round))
        interval = {"time_s": self.time_s, "low_s": self.low_s, "high_s": self.high_s}
        return interval | {"samples": self.calls, "rounds": rounds}


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredRun:
    """A run with its settings.

    Samples number the ``rounds`` of the run from 0. ``unusable`` maps settings that cannot be compared to the reason.
    """

    kind: Literal["sweep", "bench allreduce"]
    run: ComparedRun
    settings: dict[SettingFields, MeasuredSetting]
    rounds: int
    unusable: dict[SettingFields, str]


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


def varied_fields(sweeps: Sequence[SweepData]) -> tuple[str, ...]:
    """Return the fields that few sweeps vary, such as the optimizer, and that one of these varies."""
    settings = [[point.setting for point in saved.comparison.points] for saved in sweeps]
    return tuple(
        name for name in _WHERE_VARIED if any(len({each.value(name) for each in of_one}) > 1 for of_one in settings)
    )


def sweep_run(saved: SweepData, label: str, path: str, varied: Sequence[str]) -> MeasuredRun:
    """Return the run of a sweep, with the samples of each setting as the sweep's own report uses them.

    Settings are also named by the fields that are ``varied`` in any of the compared runs.
    """
    points, experiment = saved.comparison.points, saved.results.experiment
    index = {number: i for i, number in enumerate(sorted({n for run in saved.results.points for n in run.round}))}
    settings = {}
    for fields, point in zip(_named(points, varied), points, strict=True):
        rounds = {run.setting: [index[number] for number in run.round] for run in point.runs}
        settings[fields] = MeasuredSetting(
            samples=_joined([_samples(run.step_s, rounds[run.setting]) for run in point.runs]),
            time_s=point.measured_step_s,
            low_s=point.measured_low_s,
            high_s=point.measured_high_s,
            calls=point.samples,
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
    return MeasuredRun(
        kind="sweep",
        run=_described(saved.results, label, path, declared, len(settings)),
        settings=settings,
        rounds=len(index),
        unusable={},
    )


def bench_run(result: BenchResult, label: str, path: str) -> MeasuredRun:
    """Return the run of a benchmark: a setting is an algorithm of a system at a size.

    What has no times, or times of a simulator, is unusable.
    """
    record = result.record
    noise = {size.size_bytes: size.noise for size in result.sizes}
    settings: dict[SettingFields, MeasuredSetting] = {}
    unusable: dict[SettingFields, str] = {}
    for point in result.points:
        setting = (("backend", record.bench.backend), *((name, getattr(point, name)) for name in _BENCH))
        if point.time_s is None or point.time_low_s is None or point.time_high_s is None:
            unusable[setting] = f"it has no times in {label}: its sums were wrong, or it was not timed"
        elif point.simulated:
            unusable[setting] = f"{label} ran it in a simulator, whose times mean nothing"
        else:
            settings[setting] = MeasuredSetting(
                samples=_samples(medians_s(point.series), range(len(point.series.rounds_ns))),
                time_s=point.time_s,
                low_s=point.time_low_s,
                high_s=point.time_high_s,
                calls=point.samples,
                noise=noise[point.size_bytes],
                group=point.system,
            )
    declared = {each.name: "; ".join(filter(None, (each.library, each.how))) for each in record.systems}
    return MeasuredRun(
        kind="bench allreduce",
        run=_described(record, label, path, declared, len(settings)),
        settings=settings,
        rounds=result.rounds,
        unusable=unusable,
    )


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


def _named(points: Sequence[ComparedPoint], varied: Sequence[str]) -> list[SettingFields]:
    """Return the fields that name the setting of each point.

    Without communication most fields mean nothing, and one device is named by the others; unless a run has measured it
    several times. Who trains is part of the name where it is not dpsim.
    """
    short = [_fields(point, varied, communication=point.devices > 1) for point in points]
    return [
        fields if short.count(fields) == 1 else _fields(point, varied, communication=True)
        for fields, point in zip(short, points, strict=True)
    ]


def _fields(point: ComparedPoint, varied: Iterable[str], *, communication: bool) -> SettingFields:
    fields = {name: getattr(point, name) for name in (*_SINGLE, *_COMMUNICATION * communication)}
    others = ["cycle_s"] * (communication and point.fusion_rule == "horovod") + ["runtime"] * (point.runtime != "dpsim")
    others += [name for name in varied if name not in ("cycle_s", "runtime")]
    for name in others:
        value = point.setting.value(name)
        fields[name] = _in_words(value) if isinstance(value, Noun) else value
    return tuple(fields.items())


def _in_words(value: Noun) -> str:
    """Return ``Sgd, learning_rate 0.01, momentum 0.9``."""
    fields = codec.to_builtins(value).items()
    return ", ".join([type(value).__name__, *(f"{name} {each}" for name, each in fields if name != "kind")])


def _samples(time_s: Sequence[float], rounds: Sequence[int]) -> RoundSamples:
    return RoundSamples(np.array(time_s, np.float64), np.array(rounds, np.intp))


def _joined(parts: Sequence[RoundSamples]) -> RoundSamples:
    return RoundSamples(*(np.concatenate(each) for each in zip(*parts, strict=True)))
