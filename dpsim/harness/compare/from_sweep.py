"""A sweep as a run to compare: its settings with the samples of each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dpsim import codec
from dpsim.codec import Noun
from dpsim.harness.compare.runs import MeasuredRun, MeasuredSetting, RoundSamples, SettingFields
from dpsim.harness.measurement.speed import ORDINARY
from dpsim.harness.measurement.statistics import Interval
from dpsim.harness.sweep.compare import compare
from dpsim.harness.sweep.equal_speed import at_mean_speed, run_speeds
from dpsim.harness.sweep.pairing import Pair, pair
from dpsim.records.comparison import ComparedPoint
from dpsim.records.run_comparison import ComparedRun, SettingValue
from dpsim.records.sweep import Experiment, Predictions, Results, read_predictions, read_results
from dpsim.setting import Setting

RECORD, PREDICTIONS = "results.json", "predictions.json"
_SINGLE = (
    "network",
    "model",
    "devices",
    "global_batch",
    "accumulate",
    "batch_norm",
    "leaves",
    "strategy",
    "compute_dtype",
)
_COMMUNICATION = ("layout", "fusion_rule", "fusion_threshold_bytes", "algorithm", "overlap", "wire_dtype")


def read_sweep(folder: Path, label: str) -> MeasuredRun:
    """Read the records of a sweep from its folder. Raises ``FileFormatError``."""
    predictions, results = read_predictions(folder / PREDICTIONS), read_results(folder / RECORD)
    return sweep_run(predictions, results, label, str(folder))


def sweep_run(predictions: Predictions, results: Results, label: str, path: str) -> MeasuredRun:
    """Return the run of a sweep. Raises ``FileFormatError`` where the records are damaged or do not belong together."""
    points = compare(predictions, results).points
    rounds = sorted({number for measured in results.points for number in measured.round})
    index = {number: place for place, number in enumerate(rounds)}
    samples = _samples(predictions, results, index)
    settings = {
        fields: MeasuredSetting(
            samples=of_point,
            median=Interval(median=point.measured_step_s, low=point.measured_low_s, high=point.measured_high_s),
            calls=point.samples,
            noise=point.noise,
            group=point.network,
            emulated_network=point.emulated_network,
            emulated_compute=point.emulated_compute,
            references=(str(point.devices),),
        )
        for fields, point, of_point in zip(
            _settings(points), points, (samples[point.setting] for point in points), strict=True
        )
    }
    run = ComparedRun(
        label=label,
        path=path,
        sha256=codec.digest(results),
        environment=results.environment,
        declared=_declared(results.experiment, points),
        measured_from=results.measured_from,
        measured_until=results.measured_until,
        settings=len(settings),
    )
    return MeasuredRun(
        kind="sweep",
        run=run,
        settings=settings,
        unusable={},
        references=_references(pair(predictions, results)[0], index),
        rounds=len(rounds),
    )


def _settings(points: Sequence[ComparedPoint]) -> list[SettingFields]:
    """Return the fields that name the setting of each point.

    Without communication most fields mean nothing, and one device is named by the others; unless a run has measured it
    several times. The optimizer is part of the name where it varies in the run.
    """
    varied = len({point.setting.plan.optimizer for point in points}) > 1
    short = [_fields(point, optimizer=varied, communication=point.devices > 1) for point in points]
    return [
        fields if short.count(fields) == 1 else _fields(point, optimizer=varied, communication=True)
        for fields, point in zip(short, points, strict=True)
    ]


def _fields(point: ComparedPoint, *, optimizer: bool, communication: bool) -> SettingFields:
    names = (*_SINGLE, *(_COMMUNICATION if communication else ()))
    fields: list[tuple[str, SettingValue]] = [(name, getattr(point, name)) for name in names]
    if communication and point.fusion_rule == "horovod":
        fields.append(("cycle_s", point.setting.plan.cycle_s))
    if optimizer:
        fields.append(("optimizer", _in_words(point.setting.plan.optimizer)))
    return tuple(fields)


def _samples(predictions: Predictions, results: Results, index: dict[int, int]) -> dict[Setting, RoundSamples]:
    """Return the samples of each setting as the sweep's own report uses them.

    They are the raw samples, where the machine's speed changed scaled to the mean speed of the run. ``index`` numbers
    the rounds of the run from 0.
    """
    pairs, _ = pair(predictions, results)
    return {
        each.setting: RoundSamples.of(each.samples(), [index[number] for number in each.rounds()])
        for each in at_mean_speed(pairs, run_speeds(pairs))
    }


def _references(pairs: tuple[Pair, ...], index: dict[int, int]) -> dict[str, RoundSamples]:
    """Return the times of the reference computation by the number of devices at work, with outliers cut off."""
    observed: dict[str, tuple[list[float], list[int]]] = {}
    for each in pairs:
        for run in each.runs:
            if run.reference_s:
                times, rounds = observed.setdefault(str(each.setting.plan.devices), ([], []))
                times.extend(run.reference_s)
                rounds.extend(index[number] for number in run.round)
    return {
        devices: RoundSamples.of(np.clip(times, *np.percentile(times, ORDINARY)).tolist(), rounds)
        for devices, (times, rounds) in observed.items()
    }


def _declared(experiment: Experiment, points: Sequence[ComparedPoint]) -> dict[str, str]:
    return {
        "model": ", ".join(dict.fromkeys(point.model for point in points)),
        "data set": experiment.dataset,
        "optimizer": "; ".join(dict.fromkeys(_in_words(point.setting.plan.optimizer) for point in points)),
        "seed": str(experiment.seed),
    }


def _in_words(value: Noun) -> str:
    """Return ``Sgd, learning_rate 0.01, momentum 0.9``."""
    fields = codec.to_builtins(value).items()
    return ", ".join([type(value).__name__, *(f"{name} {each}" for name, each in fields if name != "kind")])
