"""Prices one step of a Plan: its time, its exposed communication, its Timeline."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpsim.codec import Noun
from dpsim.data.sharding import largest_share
from dpsim.errors import ConfigError
from dpsim.fusion_rules import FUSION_RULES
from dpsim.lowering import lower
from dpsim.machine import Machine
from dpsim.memo import remember
from dpsim.plan import Plan
from dpsim.predict.cost import compute_slowdown, nearest_line, overlapped_curve, solo_curve
from dpsim.predict.formulas import rounds
from dpsim.predict.horovod import joined
from dpsim.predict.simulate import MODES, Prices, operations_of, simulate
from dpsim.predict.speed import speeds
from dpsim.schedule import (
    BACKWARD_EVENT,
    COMPUTE_LANE,
    FORWARD_EVENT,
    LOSS_EVENT,
    OVERHEAD_EVENT,
    UPDATE_EVENT,
    Schedule,
)
from dpsim.timeline import EXPOSED_S, Timeline
from dpsim.workload import Workload

Floats = NDArray[np.float64]
RELATIVE_UNCERTAINTY = 0.03


class Prediction(Noun, frozen=True):
    """One predicted step.

    step_s = overhead + forward_s + backward_s + update_s + exposed communication, plus what the computation waits for
    the host or for Horovod's cycle. ``backward_s`` contains what communication beside it takes away.
    ``extrapolated``: outside what the workload or the machine was measured on.
    """

    step_s: float
    exposed_communication_s: float
    buckets: int
    forward_s: float
    backward_s: float
    update_s: float
    extrapolated: bool
    images_per_s: float


@dataclass(frozen=True, eq=False)
class _AtSpeed:
    """A step at one speed of the machine, which holds for ``share`` of the time: every operation's instants, the sums.

    ``schedule`` has Horovod's buckets decided; ``times`` (3, operations) are start, end and gradients ready.
    """

    share: float
    schedule: Schedule
    times: Floats
    sums: Floats
    step_s: float
    extrapolated: bool


def local_share(plan: Plan) -> float:
    """Samples the slowest device computes at once; synchronous training waits for it.

    ceil(B / n) / accumulate, or with leaves those of the device that has the most.
    """
    return largest_share(plan.global_batch, plan.devices, plan.leaves) / plan.accumulate


@dataclass(frozen=True, eq=False)
class PricedStep:
    """A schedule with the time of each operation on a machine.

    On a machine whose speed changes a time is the mean over its speeds of what the slowest rank takes.
    """

    machine: Machine
    speeds: tuple[_AtSpeed, ...]

    @property
    def step_s(self) -> float:
        return self._mean([speed.step_s for speed in self.speeds])

    @property
    def speed_steps_s(self) -> tuple[float, float]:
        """``step_s`` if the machine stayed at full speed, and if it stayed at its slow one."""
        return self.speeds[0].step_s, self.speeds[-1].step_s

    @property
    def prediction(self) -> Prediction:
        """The sums over the operations; ``buckets`` are those of the speed that holds for longest."""
        exposed_s, forward_s, backward_s, update_s = (
            self._mean([float(speed.sums[kind]) for speed in self.speeds])
            for kind in (EXPOSED_S, FORWARD_EVENT, BACKWARD_EVENT, UPDATE_EVENT)
        )
        step_s, global_batch = self.step_s, self._longest.schedule.plan.global_batch
        return Prediction(
            step_s=step_s,
            exposed_communication_s=exposed_s,
            buckets=self._longest.schedule.buckets,
            forward_s=forward_s,
            backward_s=backward_s,
            update_s=update_s,
            extrapolated=any(speed.extrapolated for speed in self.speeds),
            images_per_s=global_batch / step_s if step_s > 0 else math.inf,
        )

    def timeline(self) -> Timeline:
        """The step as events of rank 0, at the speed that holds for longest, in the order of their starts.

        A backward that stops for an allreduce is two events. What takes no time is left out where no layer does it.
        """
        schedule, (start, end, _) = self._longest.schedule, self._longest.times
        queue = schedule.gradient_collectives if schedule.plan.overlap == "inline" else np.empty(0, np.int64)
        kinds = schedule.event_kind
        events: list[tuple[float, float, int, int, int]] = []
        for i in range(len(schedule.kind)):
            lane, size = int(schedule.lane[i]), int(schedule.size_bytes[i])
            paused = queue[:0]
            if lane == COMPUTE_LANE:
                paused = queue[(start[queue] >= start[i]) & (end[queue] <= end[i]) & (end[queue] > start[queue])]
            edges = [float(start[i]), *np.column_stack([start[paused], end[paused]]).ravel().tolist(), float(end[i])]
            empty = len(paused) or kinds[i] in (OVERHEAD_EVENT, LOSS_EVENT)
            for begin, stop in zip(edges[::2], edges[1::2], strict=True):
                if stop > begin or not empty:
                    events.append((begin, stop, lane, i, size))
        events.sort(key=lambda event: event[:2])
        columns = [np.array(column) for column in zip(*events, strict=True)]
        zeros = np.zeros(len(events), np.int64)
        return Timeline(
            source="predicted",
            operations=tuple(schedule.operation_name(i) for i in range(len(schedule.kind))),
            step=zeros,
            rank=zeros,
            lane=columns[2].astype(np.int64),
            operation=columns[3].astype(np.int64),
            start_s=columns[0],
            end_s=columns[1],
            size_bytes=columns[4].astype(np.int64),
            emulated_network=self.machine.emulated_network,
            emulated_compute=schedule.workload.emulated_compute,
        )

    @property
    def _longest(self) -> _AtSpeed:
        return max(self.speeds, key=lambda speed: speed.share)

    def _mean(self, values: list[float]) -> float:
        if len(values) == 1:
            return values[0]
        return float(np.average(values, weights=[speed.share for speed in self.speeds]))


def price(schedule: Schedule, machine: Machine) -> PricedStep:
    """When each operation of a schedule starts and ends (``dpsim.predict.simulate.simulate``).

    Layer times are the Workload's at the largest local batch, times the machine's compute slowdown at this device
    count (overhead and update too). Raises ``ConfigError`` where the machine does not price the plan's allreduce.
    """
    devices = schedule.groups[0].devices
    return PricedStep(machine, tuple(_price(schedule, at, share) for share, at in speeds(machine, devices)))


def predict(workload: Workload, machine: Machine, plan: Plan) -> Prediction:
    """The predicted step of a plan: its schedule, priced (``price``)."""
    return price(scheduled(workload, machine, plan), machine).prediction


def step_times(workload: Workload, machine: Machine, plans: Iterable[Plan]) -> Floats:
    """``predict(...).step_s`` of each plan."""
    return np.array([price(scheduled(workload, machine, plan), machine).step_s for plan in plans], np.float64)


def timeline(workload: Workload, machine: Machine, plan: Plan) -> Timeline:
    """The predicted step of a plan as events (``PricedStep.timeline``), from the same numbers as ``predict``."""
    return price(scheduled(workload, machine, plan), machine).timeline()


def interval(prediction: Prediction, relative_uncertainty: float = RELATIVE_UNCERTAINTY) -> tuple[float, float]:
    """(predicted_low_s, predicted_high_s) = step (1 -+ u), u the relative uncertainty of a calibration.

    u is doubled where the prediction is extrapolated. Machine and workload files state no uncertainty.
    """
    if not (math.isfinite(relative_uncertainty) and 0 <= relative_uncertainty < 1):
        raise ConfigError(f"relative uncertainty is {relative_uncertainty}", allowed="from 0 up to 1")
    u = min(relative_uncertainty * (2 if prediction.extrapolated else 1), 1.0)
    return prediction.step_s * (1 - u), prediction.step_s * (1 + u)


def scheduled(workload: Workload, machine: Machine, plan: Plan) -> Schedule:
    """The plan's schedule, with alpha and beta from the machine where its fusion rule needs them."""
    if not FUSION_RULES.find(plan.fusion_rule).needs_costs:
        return lower(workload, plan)
    alpha_s, beta = nearest_line(machine, machine.priced(plan.collective))
    return lower(workload, plan, alpha_s=alpha_s, beta_s_per_byte=beta)


def _price(schedule: Schedule, machine: Machine, share: float) -> _AtSpeed:
    plan, workload = schedule.plan, schedule.workload
    group = schedule.groups[0]
    prices, (first_bytes, last_bytes), extrapolated = _prices(workload, machine, plan, schedule)
    mode = MODES[plan.overlap]
    if schedule.dynamic:
        schedule, operations = joined(schedule, prices, mode)
    else:
        operations = operations_of(schedule)
    times, sums, step_s = simulate(operations, prices, mode)
    if group.devices > 1 and schedule.buckets and not extrapolated:
        sizes = schedule.bucket_size_bytes[schedule.bucket_size_bytes > 0]
        extrapolated = bool(len(sizes)) and bool(sizes.min() < first_bytes or sizes.max() > last_bytes)
    return _AtSpeed(share, schedule, times, sums, float(step_s), extrapolated)


def _prices(
    workload: Workload, machine: Machine, plan: Plan, schedule: Schedule
) -> tuple[Prices, tuple[float, float], bool]:
    """What the kernel charges, the sizes that the machine's tables cover, whether the times are extrapolated.

    A device that updates its shard alone takes as large a part of the time that all parameters take.
    """
    group = schedule.groups[0]
    factor, beyond = compute_slowdown(machine, group.devices, group.layout)
    samples = local_share(plan)
    layers, announces = _layer_arrays(workload, samples, factor)
    collective = machine.priced(plan.collective)
    solo = solo_curve(machine, collective)
    overlapped, poll_s = solo, 0.0
    if group.devices > 1 and plan.overlap in ("poll", "thread"):
        overlapped, poll_s = overlapped_curve(machine, collective, plan.overlap)
    stages = rounds(collective)
    gather, update_s = solo, workload.update_s * factor
    if schedule.sharded:
        gather = solo_curve(machine, msgspec.structs.replace(collective, kind="all-gather"))
        update_s /= group.devices
    fixed = np.array((workload.times(samples).overhead_s * factor, update_s, poll_s, stages), np.float64)
    prices = Prices(layers, announces, fixed, solo.points, overlapped.points, gather.points)
    curves = (solo, overlapped, gather)
    known = max(curve.first_bytes for curve in curves), min(curve.last_bytes for curve in curves)
    return prices, known, beyond or workload.extrapolated(samples)


@remember
def _layer_arrays(workload: Workload, local_batch: float, factor: float) -> tuple[Floats, NDArray[np.bool_]]:
    times = workload.times(local_batch)
    launch = np.array([layer.launch_s for layer in workload.layers])
    rows = [times.forward_s * factor, times.backward_s * factor, times.gradient_ready_s * factor, launch]
    return np.array(rows), np.array([bool(layer.tensors) for layer in workload.layers])
