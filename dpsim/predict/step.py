"""Prices one step of a Plan: its time, its exposed communication, its Timeline."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsim.codec import Noun
from dpsim.data.sharding import largest_share
from dpsim.errors import ConfigError
from dpsim.fusion_rules import FUSION_RULES
from dpsim.lowering.data_parallel import lower
from dpsim.machine import Machine
from dpsim.plan import Plan
from dpsim.predict.cost import alpha_beta, beside_curve, compute_slowdown, solo_curve
from dpsim.predict.formulas import rounds
from dpsim.predict.horovod import joined
from dpsim.predict.simulate import MODES, STEP, Operations, Prices, simulate
from dpsim.predict.speed import speeds
from dpsim.schedule import ALLREDUCE, Schedule
from dpsim.timeline import Timeline
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
class _Priced:
    """A schedule (Horovod's with its buckets decided), every operation's start, end and ready instant, and the sums."""

    schedule: Schedule
    times: Floats
    sums: Floats
    extrapolated: bool


def local_share(plan: Plan) -> float:
    """Samples the slowest device computes at once; synchronous training waits for it.

    ceil(B / n) / accumulate, or with leaves those of the device that has the most.
    """
    return largest_share(plan.global_batch, plan.devices, plan.leaves) / plan.accumulate


def predict(workload: Workload, machine: Machine, plan: Plan) -> Prediction:
    """The predicted step of a plan: the sums of ``dpsim.predict.simulate.simulate`` over the lowered schedule.

    Layer times are the Workload's at the largest local batch, times the machine's compute slowdown at this device
    count (overhead and update too). On a machine whose speed changes a time is the mean over its speeds of what the
    slowest rank takes, and ``buckets`` those of the speed that holds for longest. Raises ``ConfigError`` where the
    machine does not price the plan's allreduce.
    """
    shares, priced = _price_speeds(workload, machine, plan)
    step_s, exposed_s, forward_s, backward_s, update_s = _mean(shares, priced).tolist()
    return Prediction(
        step_s=step_s,
        exposed_communication_s=exposed_s,
        buckets=_usual(shares, priced).schedule.buckets,
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=update_s,
        extrapolated=any(each.extrapolated for each in priced),
        images_per_s=plan.global_batch / step_s if step_s > 0 else math.inf,
    )


def step_times(workload: Workload, machine: Machine, plans: Iterable[Plan]) -> Floats:
    """``predict(...).step_s`` of each plan."""
    return np.array([_mean(*_price_speeds(workload, machine, plan))[STEP] for plan in plans], np.float64)


def speed_steps_s(workload: Workload, machine: Machine, plan: Plan) -> tuple[float, float]:
    """``predict(...).step_s`` if the machine stayed at full speed, and if it stayed at its slow one."""
    _, priced = _price_speeds(workload, machine, plan)
    return float(priced[0].sums[STEP]), float(priced[-1].sums[STEP])


def timeline(workload: Workload, machine: Machine, plan: Plan) -> Timeline:
    """The predicted step as events of rank 0 (every rank does the same), from the same numbers as ``predict``.

    Under ``inline`` a backward that stops for an allreduce is two events. Events appear in start order. On a machine
    whose speed changes it is a step at the speed that holds for longest.
    """
    machine = max(speeds(machine, plan.devices), key=lambda speed: speed[0])[1]
    priced = _price(workload, machine, plan, scheduled(workload, machine, plan))
    schedule, (start, end, _) = priced.schedule, priced.times
    overhead = workload.times(local_share(plan)).overhead_s * compute_slowdown(machine, plan.devices, plan.layout)[0]
    names = ["step overhead"] + [schedule.operation_name(i) for i in range(len(schedule.kind))]
    events = [(0.0, overhead, 0, 0, 0)] if overhead > 0 else []
    queue = np.flatnonzero(schedule.kind == ALLREDUCE)
    for i in range(len(schedule.kind)):
        lane, size = int(schedule.lane[i]), int(schedule.size_bytes[i])
        paused = queue[:0]
        if plan.overlap == "inline" and schedule.kind[i] != ALLREDUCE:
            paused = queue[(start[queue] >= start[i]) & (end[queue] <= end[i]) & (end[queue] > start[queue])]
        edges = [float(start[i]), *np.column_stack([start[paused], end[paused]]).ravel().tolist(), float(end[i])]
        for begin, stop in zip(edges[::2], edges[1::2], strict=True):
            if stop > begin or not len(paused):
                events.append((begin, stop, lane, i + 1, size))
    events.sort(key=lambda event: event[:2])
    columns = [np.array(column) for column in zip(*events, strict=True)]
    zeros = np.zeros(len(events), np.int64)
    return Timeline(
        source="predicted",
        operations=tuple(names),
        step=zeros,
        rank=zeros,
        lane=columns[2].astype(np.int64),
        operation=columns[3].astype(np.int64),
        start_s=columns[0],
        end_s=columns[1],
        size_bytes=columns[4].astype(np.int64),
        emulated_network=machine.emulated_network,
    )


def interval(
    prediction: Prediction, machine: Machine, workload: Workload, relative_uncertainty: float = RELATIVE_UNCERTAINTY
) -> tuple[float, float]:
    """(predicted_low_s, predicted_high_s) = step (1 -+ u), u the relative uncertainty of a calibration.

    u is doubled where the prediction is extrapolated. Machine and workload files carry no uncertainty of their own
    yet, so u is the caller's; the two stand in the signature for the day they do.
    """
    if not (math.isfinite(relative_uncertainty) and 0 <= relative_uncertainty < 1):
        raise ConfigError(f"relative uncertainty is {relative_uncertainty}", allowed="from 0 up to 1")
    u = min(relative_uncertainty * (2 if prediction.extrapolated else 1), 1.0)
    return prediction.step_s * (1 - u), prediction.step_s * (1 + u)


def scheduled(workload: Workload, machine: Machine, plan: Plan) -> Schedule:
    """The plan's schedule, with alpha and beta from the machine where its fusion rule needs them."""
    if not FUSION_RULES.find(plan.fusion_rule).needs_costs:
        return lower(workload, plan)
    algorithm = machine.priced(plan.algorithm, plan.devices, plan.layout)
    alpha_s, beta = alpha_beta(machine, algorithm, plan.devices, plan.priced_wire_dtype, plan.layout)
    return lower(workload, plan, alpha_s=alpha_s, beta_s_per_byte=beta)


def _price_speeds(workload: Workload, machine: Machine, plan: Plan) -> tuple[list[float], list[_Priced]]:
    """The part of the time that each speed of the machine holds, and the one schedule priced at each."""
    schedule = scheduled(workload, machine, plan)
    parts = [(share, _price(workload, at, plan, schedule)) for share, at in speeds(machine, plan.devices)]
    return [share for share, _ in parts], [priced for _, priced in parts]


def _mean(shares: list[float], priced: list[_Priced]) -> Floats:
    if len(priced) == 1:
        return priced[0].sums
    mean: Floats = np.average([each.sums for each in priced], axis=0, weights=shares)
    return mean


def _usual(shares: list[float], priced: list[_Priced]) -> _Priced:
    return priced[shares.index(max(shares))]


def _price(workload: Workload, machine: Machine, plan: Plan, schedule: Schedule) -> _Priced:
    prices, (first_bytes, last_bytes), extrapolated = _prices(workload, machine, plan)
    mode = MODES[plan.overlap]
    if schedule.dynamic:
        schedule, operations = joined(schedule, prices, mode)
    else:
        held = np.zeros(len(schedule.kind), np.bool_)
        operations = Operations(schedule.kind, schedule.layer, schedule.after, schedule.size_bytes, held)
    times, sums = simulate(operations, prices, mode)
    if plan.devices > 1 and schedule.buckets and not extrapolated:
        sizes = schedule.bucket_size_bytes[schedule.bucket_size_bytes > 0]
        extrapolated = bool(len(sizes)) and bool(sizes.min() < first_bytes or sizes.max() > last_bytes)
    return _Priced(schedule, times, sums, extrapolated)


def _prices(workload: Workload, machine: Machine, plan: Plan) -> tuple[Prices, tuple[float, float], bool]:
    """What the kernel charges, the sizes that the machine's tables cover, whether the times are extrapolated."""
    factor, beyond = compute_slowdown(machine, plan.devices, plan.layout)
    share = local_share(plan)
    layers, announces = _layer_arrays(workload, share, factor)
    algorithm = machine.priced(plan.algorithm, plan.devices, plan.layout)
    solo = solo_curve(machine, algorithm, plan.devices, plan.priced_wire_dtype, plan.layout)
    beside, poll_s = solo, 0.0
    if plan.devices > 1 and plan.overlap in ("poll", "thread"):
        beside, poll_s = beside_curve(
            machine, algorithm, plan.devices, plan.overlap, plan.priced_wire_dtype, plan.layout
        )
    stages = rounds(algorithm, plan.devices, plan.layout)
    fixed = np.array(
        (workload.times(share).overhead_s * factor, workload.update_s * factor, poll_s, stages), np.float64
    )
    prices = Prices(layers, announces, fixed, solo.points, beside.points)
    known = max(solo.first_bytes, beside.first_bytes), min(solo.last_bytes, beside.last_bytes)
    return prices, known, beyond or workload.extrapolated(share)


def _layer_arrays(workload: Workload, local_batch: float, factor: float) -> tuple[Floats, NDArray[np.bool_]]:
    key = ("layer arrays", local_batch, factor)
    found = workload.memo.get(key)
    if found is None:
        times = workload.times(local_batch)
        launch = np.array([layer.launch_s for layer in workload.layers])
        rows = [times.forward_s * factor, times.backward_s * factor, times.gradient_ready_s * factor, launch]
        announces = np.array([bool(layer.tensors) for layer in workload.layers])
        found = workload.memo[key] = (np.array(rows), announces)
    result: tuple[Floats, NDArray[np.bool_]] = found
    return result
