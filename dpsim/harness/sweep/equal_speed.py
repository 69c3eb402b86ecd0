"""Scales the samples of a sweep to the mean speed of the run, for machines whose speed changes."""

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
from dpsim.predict import predict
from dpsim.records.comparison import SpeedRecord
from dpsim.records.sweep import MeasuredPoint, Predictions
from dpsim.workload import Workload

_ENOUGH = 12
"""The fewest samples at either speed from which a pair's own slow factor is taken."""


@dataclass(frozen=True, kw_only=True)
class RunSpeed:
    """The reference times of a run with one number of devices at work (outliers cut off), and its two speeds."""

    reference_s: tuple[float, ...]
    mixture: Mixture


def run_speeds(pairs: Iterable[Pair]) -> dict[int, RunSpeed]:
    """Return the speeds of the measurement by the number of devices at work, where they were observed."""
    observed: dict[int, list[float]] = {}
    for pair in pairs:
        for run in pair.runs:
            observed.setdefault(pair.setting.plan.devices, []).extend(run.reference_s)
    return {
        devices: RunSpeed(
            reference_s=tuple(np.clip(times, *np.percentile(times, ORDINARY)).tolist()), mixture=mixture(times)
        )
        for devices, times in sorted(observed.items())
        if times
    }


def at_mean_speed(pairs: Sequence[Pair], speeds: dict[int, RunSpeed]) -> tuple[Pair, ...]:
    """Return the pairs with every sample scaled to the mean speed of the run.

    A sample is divided by the slowdown of its visit against full speed, and multiplied by the mean slowdown of the run,
    which is the same for all pairs of a device count; so a median over samples is a mean over speeds. The slow factor
    of a pair's steps is taken from its own samples or, where they are too few, from all pairs of its network and device
    count. On a steady machine nothing changes.
    """
    own = [_own_factor(pair, speeds.get(pair.setting.plan.devices)) for pair in pairs]
    of_group: dict[tuple[str, int], list[float]] = {}
    for pair, factor in zip(pairs, own, strict=True):
        if factor is not None:
            of_group.setdefault((pair.setting.network, pair.setting.plan.devices), []).append(factor)
    scaled = []
    for pair, factor in zip(pairs, own, strict=True):
        of_run = speeds.get(pair.setting.plan.devices)
        if of_run is None or not _changed(pair, of_run):
            scaled.append(pair)
            continue
        others = of_group.get((pair.setting.network, pair.setting.plan.devices), [of_run.mixture.change])
        slow = factor if factor is not None else float(np.median(others))
        scaled.append(dataclasses.replace(pair, runs=tuple(_scaled(run, of_run, slow) for run in pair.runs)))
    return tuple(scaled)


def _changed(pair: Pair, of_run: RunSpeed) -> bool:
    return not of_run.mixture.steady and all(run.reference_s for run in pair.runs)


def _own_factor(pair: Pair, of_run: RunSpeed | None) -> float | None:
    """Return how many times as long the pair's steps took at the slow speed; ``None`` with too few samples."""
    if of_run is None or not _changed(pair, of_run):
        return None
    slow = of_run.mixture.slow(pair.references())
    if min(slow.sum(), (~slow).sum()) < _ENOUGH:
        return None
    return slow_factor(pair.samples(), pair.references(), of_run.mixture)


def _scaled(run: MeasuredPoint, of_run: RunSpeed, factor: float) -> MeasuredPoint:
    mean = float(np.mean(factors(of_run.reference_s, of_run.mixture, factor)))
    scale = mean / factors(run.reference_s, of_run.mixture, factor)
    return msgspec.structs.replace(
        run,
        step_s=tuple((np.array(run.step_s) * scale).tolist()),
        exposed_communication_s=tuple((np.array(run.exposed_communication_s) * scale).tolist()),
    )


def predicted_at_run_speed_s(pair: Pair, machine: Machine, step_s: float) -> float | None:
    """Return ``step_s`` with the error of what is predicted for the speeds of the run; ``None`` where none are known.

    For each sample of the pair, not scaled, full-speed step x (reference time of its visit / at full speed in the
    calibration)^e is predicted, where e is such that the calibration's slow speed gives the step predicted for it (1
    where the calibration observed one speed). The error is the median over the samples of predicted / measured: each
    sample is compared with the speed of its own visit, so that a few disturbed visits do not matter.
    """
    calibrated, references = calibrated_speed([machine], pair.setting.plan.devices), pair.references()
    full_s, slow_s = pair.predicted.full_speed_step_s, pair.predicted.slow_speed_step_s
    if calibrated is None or len(references) != len(pair.samples()) or full_s is None or slow_s is None:
        return None
    change = calibrated.slow_reference_s / calibrated.reference_s
    exponent = math.log(slow_s / full_s) / math.log(change) if change > 1 else 1.0
    predicted_s = full_s * (np.array(references) / calibrated.reference_s) ** exponent
    return float(step_s * np.median(predicted_s / np.array(pair.samples())))


def predicted_at_forward_speed_s(pair: Pair, workload: Workload, machine: Machine) -> float | None:
    """Return what is predicted if all computation were slower, or faster, than predicted by as much as forward was.

    In forward nothing is communicated: its time tells the machine's speed where no reference computation was timed.
    ``None`` where it is not known.
    """
    measured_s = [seconds for run in pair.runs for seconds in run.forward_s]
    if not measured_s:
        return None
    forward_s = predict(workload, machine, pair.setting.plan).forward_s
    slower = float(np.median(measured_s)) / forward_s if forward_s > 0 else 1.0
    return predict(workload.slowed(slower), machine, pair.setting.plan).step_s


def calibrated_speed(machines: Sequence[Machine], devices: int) -> Speed | None:
    """Return the speed at a device count, from the first machine that has it."""
    return next((speed for machine in machines for speed in machine.speed if speed.devices == devices), None)


def speed_records(predictions: Predictions, speeds: dict[int, RunSpeed]) -> tuple[SpeedRecord, ...]:
    """Compare the speeds in calibration and measurement, for each number of devices observed in both."""
    records = []
    for devices, of_run in speeds.items():
        calibrated = calibrated_speed(predictions.machines, devices)
        if calibrated is not None:
            mean_s = float(np.mean(of_run.reference_s))
            expected_s = calibrated.reference_s + calibrated.slow_share * (
                calibrated.slow_reference_s - calibrated.reference_s
            )
            records.append(
                SpeedRecord(
                    devices=devices,
                    calibrated_slow_factor=calibrated.slow_reference_s / calibrated.reference_s,
                    calibrated_slow_share=calibrated.slow_share,
                    measured_slow_factor=of_run.mixture.change,
                    measured_slow_share=of_run.mixture.slow_share,
                    mean_change=mean_s / expected_s - 1,
                )
            )
    return tuple(records)
