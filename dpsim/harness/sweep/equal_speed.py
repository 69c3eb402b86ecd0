"""A sweep's samples brought to the run's mean speed: what its steps took on a machine whose speed changes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from dpsim.harness.measurement.speed import ORDINARY, Mixture, factors, mixture, slow_factor
from dpsim.harness.sweep.pairing import Pair
from dpsim.machine import Machine, Speed
from dpsim.records.comparison import SpeedRecord
from dpsim.records.sweep import MeasuredPoint, PredictedPoint, Predictions

_ENOUGH = 12


@dataclass(frozen=True, kw_only=True)
class RunSpeed:
    """The reference times of a run with so many devices at work (outliers cut off), and its two speeds."""

    reference_s: tuple[float, ...]
    mixture: Mixture


def run_speeds(pairs: Iterable[Pair]) -> dict[int, RunSpeed]:
    """The speeds of the measurement by the number of devices at work; without those that were not observed."""
    seen: dict[int, list[float]] = {}
    for pair in pairs:
        for run in pair.runs:
            seen.setdefault(pair.key.devices, []).extend(run.reference_s)
    return {
        devices: RunSpeed(
            reference_s=tuple(np.clip(times, *np.percentile(times, ORDINARY)).tolist()), mixture=mixture(times)
        )
        for devices, times in sorted(seen.items())
        if times
    }


def evened(pairs: Sequence[Pair], speeds: dict[int, RunSpeed]) -> tuple[Pair, ...]:
    """The pairs with every sample at the mean speed of the run, so that a median over them is a mean over its speeds.

    A sample is divided by how many times longer than at full speed its visit was, and multiplied by the mean of that
    over the run, which is the same for all pairs of a device count. How many times as long a pair's steps take at the
    slow speed its own samples tell, or those of all pairs of its network and device count where they are too few. On a
    steady machine nothing changes.
    """
    own = [_own_factor(pair, speeds.get(pair.key.devices)) for pair in pairs]
    known: dict[tuple[str, int], list[float]] = {}
    for pair, factor in zip(pairs, own, strict=True):
        if factor is not None:
            known.setdefault((pair.key.network, pair.key.devices), []).append(factor)
    found = []
    for pair, factor in zip(pairs, own, strict=True):
        of_run = speeds.get(pair.key.devices)
        if of_run is None or not _changed(pair, of_run):
            found.append(pair)
            continue
        others = known.get((pair.key.network, pair.key.devices), [of_run.mixture.change])
        k = factor if factor is not None else float(np.median(others))
        found.append(dataclasses.replace(pair, runs=tuple(_at_mean_speed(run, of_run, k) for run in pair.runs)))
    return tuple(found)


def _changed(pair: Pair, of_run: RunSpeed) -> bool:
    return not of_run.mixture.steady and all(run.reference_s for run in pair.runs)


def _own_factor(pair: Pair, of_run: RunSpeed | None) -> float | None:
    """How many times as long the pair's steps took at the slow speed; None where its samples do not tell."""
    if of_run is None or not _changed(pair, of_run):
        return None
    slow = of_run.mixture.slow(pair.references())
    if min(slow.sum(), (~slow).sum()) < _ENOUGH:
        return None
    return slow_factor(pair.samples(), pair.references(), of_run.mixture)


def _at_mean_speed(run: MeasuredPoint, of_run: RunSpeed, factor: float) -> MeasuredPoint:
    mean = float(np.mean(factors(of_run.reference_s, of_run.mixture, factor)))
    scale = mean / factors(run.reference_s, of_run.mixture, factor)
    return msgspec.structs.replace(
        run,
        step_s=tuple((np.array(run.step_s) * scale).tolist()),
        exposed_communication_s=tuple((np.array(run.exposed_communication_s) * scale).tolist()),
    )


def predicted_at_run_speed_s(
    predicted: PredictedPoint, machines: Sequence[Machine], speeds: dict[int, RunSpeed]
) -> float | None:
    """The mean step predicted for the speeds that the run turned out to have; ``None`` where they were not observed.

    full-speed step x mean of (reference time in the run / at full speed in the calibration)^e, with that e which gives
    the predicted step at the calibration's slow speed (1 where the calibration saw one speed).
    """
    key = predicted.key
    calibrated, of_run = calibrated_speed(machines, key.devices), speeds.get(key.devices)
    full_s, slow_s = predicted.full_speed_step_s, predicted.slow_speed_step_s
    if calibrated is None or of_run is None or full_s is None or slow_s is None:
        return None
    change = calibrated.slow_reference_s / calibrated.reference_s
    exponent = math.log(slow_s / full_s) / math.log(change) if change > 1 else 1.0
    return float(full_s * np.mean((np.array(of_run.reference_s) / calibrated.reference_s) ** exponent))


def calibrated_speed(machines: Sequence[Machine], devices: int) -> Speed | None:
    """The speed at a device count that the first of these machines knows it for."""
    return next((speed for machine in machines for speed in machine.speed if speed.devices == devices), None)


def speed_records(predictions: Predictions, speeds: dict[int, RunSpeed]) -> tuple[SpeedRecord, ...]:
    """Calibration and measurement side by side, for each number of devices whose speed both observed."""
    found = []
    for devices, of_run in speeds.items():
        calibrated = calibrated_speed(predictions.machines, devices)
        if calibrated is not None:
            usual_s = float(np.mean(of_run.reference_s))
            expected_s = calibrated.reference_s + calibrated.slow_share * (
                calibrated.slow_reference_s - calibrated.reference_s
            )
            found.append(
                SpeedRecord(
                    devices=devices,
                    calibrated_slow_factor=calibrated.slow_reference_s / calibrated.reference_s,
                    calibrated_slow_share=calibrated.slow_share,
                    measured_slow_factor=of_run.mixture.change,
                    measured_slow_share=of_run.mixture.slow_share,
                    mean_change=usual_s / expected_s - 1,
                )
            )
    return tuple(found)
