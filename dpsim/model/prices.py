"""What the simulation of a step charges: computation, collectives and overlap."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpsim.algorithms import ALGORITHMS
from dpsim.collective import Collective
from dpsim.comm.message_steps import BY_DIRECT_EXCHANGE, transmission
from dpsim.data.sharding import device_leaves, largest_share
from dpsim.kernels.allreduce.tree import slots
from dpsim.machine import Machine
from dpsim.memo import remember
from dpsim.model.cost import added_s, compute_slowdown, copy_curve, idle_curve, overlapped_curve, sums_curve, whole
from dpsim.model.curve import Curve, at
from dpsim.model.formulas import rounds
from dpsim.model.messages import NO_MESSAGES, messages_of
from dpsim.model.simulate import Prices
from dpsim.model.slowest import expected_slowest
from dpsim.plan import Plan
from dpsim.schedule import Schedule
from dpsim.strategy import own_blocks
from dpsim.workload import Workload

Floats = NDArray[np.float64]


class Factors(NamedTuple):
    """What parts of the prices are multiplied by: 1 for a prediction, others to see what an error of one does.

    ``compute`` scales computation and the host's launches, ``network`` collectives with nothing else running,
    ``overlapped`` those during computation, ``loss`` the compute time that these take away, ``overhead`` what the host
    adds to each collective, ``fixed_share`` the machine's part of layer times that no batch changes.
    """

    compute: float = 1.0
    network: float = 1.0
    overlapped: float = 1.0
    loss: float = 1.0
    overhead: float = 1.0
    fixed_share: float = 1.0


EXACT = Factors()
_NO_WAITING = (0.0, 0.0, 0.0, 0.0)
FREE_NETWORK = Factors(network=0.0, overlapped=0.0, loss=0.0, overhead=0.0)


@dataclass(frozen=True, eq=False)
class Priced:
    """What the kernel charges, the sizes that the machine's tables cover, whether the times are extrapolated.

    Waiting for the slowest device makes all computation longer. It is ``waiting_s`` of a step, in parts: what forward,
    backward, update and the rest of the step contain of it.
    """

    prices: Prices
    known_bytes: tuple[float, float]
    extrapolated: bool
    waiting_s: tuple[float, float, float, float]


def local_share(plan: Plan) -> float:
    """Samples the slowest device computes at once; synchronous training waits for it.

    ceil(B / n) / accumulate for n ``data_devices``, or with leaves those of the device that has the most.
    """
    return largest_share(plan.global_batch, plan.data_devices, plan.leaves) / plan.accumulate


def waiting_factor(machine: Machine, workload: Workload, devices: int) -> float:
    """How many times as long the slowest of n devices computes as the slowest of those that were calibrated together.

    E[slowest of n] / E[slowest of m] (``expected_slowest``), m the most devices with a compute slowdown (1 where
    the machine has none), but at most n: a slowdown was measured on the slowest of them, so it contains the waiting.
    Where all are equally fast it is 1 up to m. The machine's slow devices take part where several devices do: a
    slowdown is that of equal devices, and one device alone is not a slow one.
    """
    slow_devices = machine.slow_devices
    if devices == 1 or not (workload.step_spread or slow_devices):
        return 1.0
    calibrated = min(devices, max((slowdown.devices for slowdown in machine.compute_slowdown), default=1))
    if devices == calibrated and not slow_devices:
        return 1.0
    slowest = functools.partial(expected_slowest, workload.step_spread, correlation=workload.step_correlation)
    return max(1.0, slowest(devices, slow_devices=slow_devices) / slowest(calibrated))


def batch_factor(machine: Machine, workload: Workload, local_batch: float, of_share: float = 1.0) -> float:
    """How many times as long layers compute at a local batch as in proportion to the only one that times are known at.

    f B / b + 1 - f with the machine's ``fixed_share``, times ``of_share``, f of the times at the known batch B. 1 where
    it is not known, or where times at several batches tell what a step takes whatever the batch.
    """
    if not machine.fixed_share or len(workload.local_batches) > 1:
        return 1.0
    share = min(1.0, machine.fixed_share * of_share)
    return share * workload.local_batches[0] / local_batch + 1 - share


def prices_of(machine: Machine, schedule: Schedule, factors: Factors) -> Priced:
    """The prices of a schedule on a machine, each part times its factor.

    A device takes the part of the update's time that its parameters, or its shard of them, are of all parameters; the
    overhead of a step is that of every device.
    """
    workload, plan = schedule.workload, schedule.plan
    strategy = plan.parallelism
    slowdown, beyond = compute_slowdown(machine, plan.devices, plan.layout)
    waits = waiting_factor(machine, workload, plan.devices)
    slowdown *= factors.compute
    samples = local_share(plan)
    slowdown_of_layers = slowdown * waits * batch_factor(machine, workload, samples, factors.fixed_share)
    if plan.accumulate > 1 and not workload.emulated_compute:
        slowdown_of_layers *= workload.accumulation_factor
    layers, announces = _layer_arrays(workload, samples, slowdown_of_layers, factors.compute)
    curves, poll_s = _curves(machine, schedule)
    update_s = workload.update_s * slowdown * _updated_share(schedule)
    times = workload.times(samples)
    overhead_s = times.overhead_s * slowdown + added_s(machine, plan.devices) * factors.compute
    updates = [update_s * waits * share for share in _shares_of_parameters(schedule)]
    loss_s = times.loss_s * slowdown * waits
    stages = rounds(machine.priced(plan.collective))
    fixed = np.array((overhead_s * waits, poll_s * factors.loss, stages, loss_s, *updates), np.float64)
    points = _points(machine, schedule, curves)
    if factors is not EXACT:
        network, overlap = (1.0, factors.network), (1.0, factors.overlapped, factors.loss)
        scales = network, overlap, network, overlap, network, overlap, network, network, network
        points = list(map(_scaled, points, scales))
    if overhead_of_each := (machine.collective_overhead_s or 0.0) * factors.overhead * (plan.devices > 1):
        points = [_later(each, overhead_of_each) for each in points]
    messages = messages_of(machine, schedule) if strategy.stages > 1 else NO_MESSAGES
    seconds = messages.seconds * factors.network if strategy.stages > 1 else messages.seconds
    idle, overlapped, gather, gather_beside, between, between_beside, *of_sums = points
    sums, agreement, joining = of_sums
    costs = idle, overlapped, gather, gather_beside, between, between_beside, sums, agreement, joining
    prices = Prices(layers, announces, fixed, *costs, seconds, messages.copied)
    known = [(1, curve) for curve in curves[: 4 if strategy.gathers else 3]]
    known += [(plan.shard_devices, curve) for curve in curves[4:6] if plan.replicas > 1]
    first_bytes, last_bytes = ([of * getattr(each, end) for of, each in known] for end in ("first_bytes", "last_bytes"))
    calibrated_bytes = max(first_bytes), min(last_bytes)
    waiting_s = _NO_WAITING
    if waits > 1:
        part = 1 - 1 / waits
        forward_s, backward_s = (part * plan.accumulate * float(layers[row].sum()) for row in (0, 1))
        waiting_s = forward_s, backward_s, part * max(updates), part * (float(fixed[0]) + plan.accumulate * loss_s)
    extrapolated = beyond or messages.extrapolated or workload.extrapolated(samples)
    return Priced(prices, calibrated_bytes, extrapolated, waiting_s)


def _updated_share(schedule: Schedule) -> float:
    """The part of all parameters that a device updates: the one with the most, where tensors have owners."""
    if schedule.owners:
        owned = schedule.owned_bytes
        return max(owned) / max(sum(owned), 1)
    return 1 / schedule.plan.shard_devices if schedule.sharded else 1.0


def _curves(machine: Machine, schedule: Schedule) -> tuple[tuple[Curve, ...], float]:
    """The cost of each kind of collective of a schedule, and the seconds of a poll.

    In the order of ``Prices``: an allreduce (or reduce-scatter) alone and during computation, an all-gather alone and
    during computation, the allreduce of a shard over replicas alone and during computation, sums between layers, the
    agreement of all devices, and the joining of the parts of a stage.
    """
    workload, plan = schedule.workload, schedule.plan
    collective, on_several = machine.priced(plan.collective), plan.data_devices > 1
    of_all = machine.priced(plan.of_all_data)
    idle = idle_curve(machine, collective)
    overlapped, poll_s = idle, 0.0
    beside = on_several and plan.overlap in ("poll", "thread")
    if beside:
        overlapped, poll_s = overlapped_curve(machine, collective, plan.overlap)
    gather, gather_beside = idle, overlapped
    if schedule.sharded:
        gathers = msgspec.structs.replace(collective, kind="all-gather")
        gather = gather_beside = idle_curve(machine, gathers)
        if beside:
            gather_beside, _ = overlapped_curve(machine, gathers, plan.overlap)
    elif schedule.owners:
        gather = gather_beside = idle_curve(
            machine, msgspec.structs.replace(collective, kind="broadcast", wire_dtype="float32")
        )
    between, between_beside = idle, overlapped
    if plan.replicas > 1:
        among_replicas = machine.priced(plan.between_replicas)
        between = between_beside = idle_curve(machine, among_replicas)
        if beside:
            between_beside, _ = overlapped_curve(machine, among_replicas, plan.overlap)
        between, between_beside = (_at_once(machine, plan, each) for each in (between, between_beside))
    sums = agreement = joining = idle
    if workload.own_allreduce_bytes and on_several:
        sums = idle_curve(machine, own_allreduce(machine, plan))
    elif (plan.batch_norm != "local" or schedule.sharded) and on_several:
        sums = sums_curve(machine, of_all if plan.batch_norm == "local" else whole(of_all))
    if schedule.classes > 1:
        everybody = msgspec.structs.replace(collective, devices=plan.devices, layout=plan.layout)
        agreement = sums_curve(machine, whole(everybody))
        if plan.parallelism.parts > 1:
            joining = idle_curve(machine, machine.priced(plan.joining))
    return (idle, overlapped, gather, gather_beside, between, between_beside, sums, agreement, joining), poll_s


def _at_once(machine: Machine, plan: Plan, curve: Curve) -> Curve:
    """The curve of an allreduce of shards where the devices of a node do one each at the same time.

    They share what adapters the node has: one where that is not known. Of tables of a library, scaled from nodes of
    more devices, half of that in logarithms is in the scaling already (``dpsim.model.scaling``).
    """
    layout, adapters = plan.between_replicas.layout, machine.network_adapters
    if machine.emulated_network or layout.nodes == 1:
        return curve
    senders = min(plan.shard_devices, plan.data_layout.of_a_node)
    share = senders / min(adapters or 1, senders)
    if adapters is None and curve.scaled is not None and curve.scaled.tables[0].layout.of_a_node > layout.of_a_node:
        share = math.sqrt(share)
    points = np.vstack([curve.points[:1] / share, curve.points[1:]])
    return Curve(points, curve.first_bytes / share, curve.last_bytes / share, curve.scaled)


def _points(machine: Machine, schedule: Schedule, curves: Sequence[Curve]) -> list[Floats]:
    """The points of the curves, with what a fixed order of addition, copies of shards and waking up add to them."""
    plan, parts, blocks = schedule.plan, schedule.plan.parallelism.parts, schedule.workload.column_blocks
    collective = machine.priced(plan.collective)
    points = [curve.points for curve in curves]
    if plan.leaves and plan.data_devices > 1:
        bounds = device_leaves(plan.leaves, plan.data_devices)[: plan.shard_devices + 1]
        points[:2] = [along_the_tree(machine, collective, bounds, each) for each in points[:2]]
    if parts > 1:
        stops = (own_blocks(blocks, part, parts).stop for part in range(parts))
        points[-1] = along_the_tree(machine, plan.joining, (0, *stops), points[-1])
    copied = [*[schedule.gradient_slots] * 2, *[schedule.parameter_slots] * 2]
    for number, copied_slots in enumerate(copied):
        if copied_slots:
            points[number] = _with_copies(points[number], copy_curve(machine, collective), plan.shard_devices)
    if plan.replicas == 1:
        points[4:6] = points[:2]
    if machine.wake_s:  # the parts of a stage stop for their sums, and may have slept before
        points[-1] = _later(points[-1], machine.wake_s)
    return points


def own_allreduce(machine: Machine, plan: Plan) -> Collective:
    """The collective that an allreduce is which a script asks for itself: no hook makes its numbers smaller."""
    return msgspec.structs.replace(whole(machine.priced(plan.of_all_data)), wire_dtype="float32")


def own_allreduces_s(machine: Machine, plan: Plan, workload: Workload) -> float:
    """Seconds of a step in the allreduces that a script asks for itself."""
    points, overhead_s = idle_curve(machine, own_allreduce(machine, plan)).points, machine.collective_overhead_s or 0.0
    return sum(float(at(points, 1, size)) + overhead_s for size in workload.own_allreduce_bytes)


def _shares_of_parameters(schedule: Schedule) -> list[float]:
    """The part of all parameters that each class has."""
    if schedule.classes == 1:
        return [1.0]
    sizes, total = schedule.bucket_size_bytes, max(float(schedule.bucket_size_bytes.sum()), 1.0)
    return [float(sizes[schedule.buckets_of(each)].sum()) / total for each in range(schedule.classes)]


def _scaled(points: Floats, factors: tuple[float, ...]) -> Floats:
    """A curve's rows times their factors; the curve itself where all are 1."""
    rows = factors[: len(points)]
    if rows.count(1.0) == len(rows):
        return points
    scaled: Floats = points * np.array(rows)[:, None]
    return scaled


def _with_copies(points: Floats, copies: Curve | None, devices: int) -> Floats:
    """A curve of collectives before or after each of which a device copies its shard; nothing where that is unknown."""
    longer = points.copy()
    if copies is not None:
        longer[1] += [at(copies.points, 1, size / devices) for size in points[0]]
    return longer


def _later(points: Floats, seconds: float) -> Floats:
    """A curve whose collectives take so many seconds longer, whatever their size."""
    later = points.copy()
    later[1] += seconds
    return later


@remember
def _layer_arrays(
    workload: Workload, local_batch: float, factor: float, launch_factor: float
) -> tuple[Floats, NDArray[np.bool_]]:
    times = workload.times(local_batch)
    launch = np.array([[layer.launch_s, layer.launched_backward_s] for layer in workload.layers]).T * launch_factor
    rows = [times.forward_s * factor, times.backward_s * factor, times.gradient_ready_s * factor, *launch]
    return np.array(rows), np.array([bool(layer.tensors) for layer in workload.layers])


_MOST_SIMULATED = 8
"""Devices up to which messages that are not those of the direct exchange are followed one by one."""


def along_the_tree(
    machine: Machine, collective: Collective, bounds: Sequence[int], points: NDArray[np.float64]
) -> NDArray[np.float64]:
    """A curve of a collective (rows bytes, seconds, ...) that adds along the tree of ``slots(bounds)``.

    What grows with the bytes takes as many times as long as the collective's messages take longer, or as it moves more
    bytes in shared memory; its latency stays.
    """
    where = collective.layout.level(emulated_network=machine.emulated_network, cores=machine.cores)
    factor = _factor(collective, tuple(bounds), inside=where == "inside")
    if factor == 1:
        return points
    times = points[1:]
    return np.vstack([points[0], times[:, :1] + factor * (times - times[:, :1])])


@functools.lru_cache(maxsize=1024)
def _factor(collective: Collective, bounds: tuple[int, ...], *, inside: bool) -> float:
    algorithm, n, order = ALGORITHMS.find(collective.algorithm), collective.devices, slots(bounds)
    if algorithm.place == "elsewhere":
        return 1.0
    held = [order.owners.count(rank) for rank in range(n)]
    if algorithm.place == "shared memory" and inside:
        return (sum(held) + n) / (2 * n)  # each slice of all partial sums is read once, and its sum written to all
    listed = algorithm.place == "messages" and algorithm.steps is None and algorithm.name not in BY_DIRECT_EXCHANGE
    if listed and n <= _MOST_SIMULATED:
        group = n, collective.layout.of_a_node, collective.kind
        return transmission(algorithm.name, order, *group) / transmission(algorithm.name, None, *group)
    busiest = max(max(own * (n - 1), sum(held) - own) for own in held)
    return (busiest + n - 1) / (2 * (n - 1)) if collective.kind == "allreduce" else busiest / (n - 1)
