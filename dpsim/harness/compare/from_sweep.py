"""A sweep as a run to compare: its settings with the samples of each."""

from __future__ import annotations

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
from dpsim.records.run_comparison import ComparedRun
from dpsim.records.sweep import Predictions, Results, read_predictions, read_results

RECORD, PREDICTIONS = "results.json", "predictions.json"
_TRAINING = ("model", "batch_norm", "leaves", "accumulate")
_SINGLE = (*_TRAINING, "network", "devices", "global_batch")
_SEVERAL = (
    *_TRAINING,
    "strategy",
    "wire_dtype",
    "network",
    "devices",
    "layout",
    "global_batch",
    "fusion_rule",
    "fusion_threshold_bytes",
    "algorithm",
    "overlap",
)


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
        _setting(point): MeasuredSetting(
            samples=of_point,
            median=Interval(median=point.measured_step_s, low=point.measured_low_s, high=point.measured_high_s),
            calls=point.samples,
            noise=point.noise,
            group=point.network,
            emulated_network=point.emulated_network,
            emulated_compute=point.emulated_compute,
            references=(str(point.devices),),
        )
        for point, of_point in zip(points, (samples[point.setting] for point in points), strict=True)
    }
    run = ComparedRun(
        label=label,
        path=path,
        sha256=codec.digest(results),
        environment=results.environment,
        declared=_declared(results),
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


def _setting(point: ComparedPoint) -> SettingFields:
    """Return the fields that name the setting of a point. Without communication most of them mean nothing."""
    fields = _SINGLE if point.devices == 1 else _SEVERAL
    return tuple((name, getattr(point, name)) for name in fields)


def _samples(predictions: Predictions, results: Results, index: dict[int, int]) -> dict[object, RoundSamples]:
    """Return the samples of each configuration as the sweep's own report uses them, by its setting.

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


def _declared(results: Results) -> dict[str, str]:
    """Return what must be the same in runs that are compared; what varies within a sweep is in its settings."""
    settings = [point.setting for point in results.points]
    optimizers = dict.fromkeys(_in_words(setting.plan.optimizer) for setting in settings)
    return {
        "model": " and ".join(dict.fromkeys(setting.model for setting in settings)),
        "data set": results.experiment.dataset,
        "optimizer": " and ".join(optimizers),
        "seed": str(results.experiment.seed),
    }


def _in_words(value: Noun) -> str:
    """Return ``Sgd, learning_rate 0.01, momentum 0.9``."""
    fields = codec.to_builtins(value).items()
    return ", ".join([type(value).__name__, *(f"{name} {each}" for name, each in fields if name != "kind")])
