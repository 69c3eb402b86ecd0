"""How uncertain the prices of a plan are: what was measured, what is assumed, and each step outside what is known."""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec
import numpy as np

from dpsim.collective import Collective, Layout
from dpsim.machine import AllreduceCost, ComputeSlowdown, Machine, OverlapCost
from dpsim.memo import remember
from dpsim.model.cost import (
    SEND_ALGORITHM,
    compute_slowdown,
    emulated_link,
    idle_curve,
    send_table,
    sizes_on_the_wire,
    table_for,
    tables_of,
    whole,
)
from dpsim.model.curve import Floats, at
from dpsim.model.prices import local_share
from dpsim.model.scaling import layout_error, level
from dpsim.schedule import Schedule
from dpsim.uncertainty import (
    ASSUMED_COMPUTE,
    ASSUMED_FIT,
    ASSUMED_LINK,
    ASSUMED_LOSS,
    ASSUMED_OVERHEAD,
    ASSUMED_OVERLAP,
    ASSUMED_SLOWDOWN,
    ASSUMED_SPEED,
    ASSUMED_TABLE,
)
from dpsim.workload import Workload

NORMAL_95 = 1.96
BATCH_STEP, SIZE_STEP, DEVICES_STEP = 0.05, 0.10, 0.05
"""What each doubling adds that a local batch, a message size, or a number of devices lies outside what was measured.

Published tables of collectives that are cut off up to four doublings below their last size miss it by errors whose 90 %
quantile, over 1.645, is 0.05 to 0.2 for each doubling. A scaled table has its own step (``dpsim.model.scaling``).
"""


class Uncertainty(NamedTuple):
    """Relative standard errors, independent of each other.

    ``speed`` is that of the mean of the machine's later times, common to computation and whatever processors send;
    ``compute`` of all computing times, ``network`` of collectives with nothing else running, ``overlapped`` of their
    times during computation, ``loss`` of the compute time lost to them, ``overhead`` of what the host adds to each,
    ``fixed_share`` of the part of the layer times that no batch changes.
    """

    speed: float
    compute: float
    network: float
    overlapped: float
    loss: float
    overhead: float = 0.0
    fixed_share: float = 0.0


def uncertainty(schedule: Schedule, machine: Machine) -> Uncertainty:
    """The uncertainties of a plan's prices on a machine.

    Emulated computation takes the times of the workload, whatever they are: they are not uncertain, and the machine's
    speed does not change them. How long ranks wait for the slowest of them is, for it is drawn anew in each step.
    """
    plan, workload = schedule.plan, schedule.workload
    devices = plan.devices
    emulated, stated_doubt = workload.emulated_compute, machine.relative_uncertainty
    speed = 0.0 if emulated else ASSUMED_SPEED if stated_doubt is None else stated_doubt
    compute = 0.0 if emulated else _compute(workload, machine, local_share(plan))
    if devices == 1:
        return Uncertainty(
            speed, compute, 0.0, 0.0, 0.0, fixed_share=_fixed_share(workload, machine, local_share(plan))
        )
    compute = math.hypot(compute, _slowdown(machine, devices, plan.layout, emulated=emulated))
    network = overlapped = loss = 0.0
    if plan.data_devices > 1:
        collective = machine.priced(plan.collective)
        network = network_error(machine, collective, schedule.summed_bytes.astype(float))
        gather = msgspec.structs.replace(collective, kind="all-gather")
        broadcast = msgspec.structs.replace(collective, kind="broadcast", wire_dtype="float32")
        between = [machine.priced(plan.between_replicas)] if plan.replicas > 1 else []
        others = [*([gather] if schedule.sharded else [broadcast] if schedule.owners else []), *between]
        network = max([network, *(_network(machine, each) for each in others)])
        if plan.overlap in ("poll", "thread"):
            overlapped, loss = _overlap(machine, collective, plan.overlap)
            for each in others if plan.parallelism.gathers else ():
                overlapped, loss = map(max, (overlapped, loss), _overlap(machine, each, plan.overlap))
    if schedule.classes > 1:
        send = Collective(algorithm=SEND_ALGORITHM, devices=2, kind="send")
        layouts = plan.layout.neighbours(devices)
        messages = (_network(machine, msgspec.structs.replace(send, layout=layout)) for layout in layouts)
        network = max(network, *messages)
    stated_doubt = machine.collective_overhead_uncertainty
    overhead = (ASSUMED_OVERHEAD if stated_doubt is None else stated_doubt) if machine.collective_overhead_s else 0.0
    return Uncertainty(
        speed, compute, network, overlapped, loss, overhead, _fixed_share(workload, machine, local_share(plan))
    )


def of_each_size(schedule: Schedule, machine: Machine) -> tuple[str, ...]:
    """Return the fields of ``Uncertainty`` that are sampling errors of a table: each of its sizes has one of its own.

    What is assumed, fitted, scaled or extrapolated is wrong alike at all sizes, and so is the compute time lost, whose
    error is that of all sizes together.
    """
    plan = schedule.plan
    if plan.data_devices == 1:
        return ()
    collective = machine.priced(plan.collective)
    tables: dict[str, AllreduceCost | OverlapCost | None] = {
        "network": table_for(tables_of(machine, collective.kind), collective),
        "overlapped": _overlap_table(machine, collective, plan.overlap),
    }
    if _doublings_outside(machine, collective, schedule.summed_bytes.astype(float)) > 0:
        return ()
    return tuple(name for name, table in tables.items() if table is not None and table.relative_uncertainty is not None)


def _compute(workload: Workload, machine: Machine, local_batch: float) -> float:
    """Of layer times at a local batch; more for every doubling (or halving) outside the profile.

    Where the share of a step that no batch changes has a doubt of its own (``_fixed_share``), that is all.
    """
    stated = workload.relative_uncertainty
    doubt = ASSUMED_COMPUTE if stated is None else stated
    if _fixed_share(workload, machine, local_batch):
        return doubt
    outside = max(workload.local_batches[0] / local_batch, local_batch / workload.local_batches[-1], 1.0)
    return doubt + BATCH_STEP * math.log2(outside)


def _fixed_share(workload: Workload, machine: Machine, local_batch: float) -> float:
    """Of the share of a step that no batch changes, where layer times are known at one batch and it is in doubt."""
    known, *others = workload.local_batches
    if not machine.fixed_share or workload.emulated_compute or others or known == local_batch:
        return 0.0
    return machine.fixed_share_uncertainty or 0.0


@remember
def _slowdown(machine: Machine, devices: int, layout: Layout, *, emulated: bool) -> float:
    """Of the compute slowdown; more for every doubling away from the nearest calibrated number of devices.

    That of emulated computation is exact where no half width is stated. Devices that do not share processors need no
    slowdown to be measured: where the machine states none at all and they have a core each (or nothing is known of
    cores), it is taken to be 1 with the assumed uncertainty. Computing times that were fitted to steps of several
    devices alone contain what these lose, whatever that is: only how it grows from there on is in doubt.
    """
    nearest: ComputeSlowdown | None = min(
        machine.compute_slowdown, key=lambda slowdown: abs(math.log2(slowdown.devices / devices)), default=None
    )
    if emulated:
        return 0.0 if nearest is None else nearest.half_width / NORMAL_95
    if nearest is None:
        return ASSUMED_SLOWDOWN + DEVICES_STEP * math.log2(max(1.0, compute_slowdown(machine, devices, layout)[0]))
    doubt = nearest.half_width / NORMAL_95 if nearest.half_width > 0 else ASSUMED_SLOWDOWN
    of_doubling, known = machine.loss_growth_uncertainty, machine.known_devices
    if of_doubling is not None:
        assumed_alone = known and 1 not in known and "compute_slowdown" in machine.assumed
        away = min(abs(math.log2(devices / count)) for count in (known if assumed_alone else (nearest.devices,)))
        return math.hypot(0.0 if assumed_alone else doubt, of_doubling * away)
    return doubt + DEVICES_STEP * abs(math.log2(devices / nearest.devices))


@remember
def _network(machine: Machine, collective: Collective) -> float:
    """Of a collective's cost inside its table, or by what stands for a table that the machine does not have.

    What an emulated link does with one message is exact.
    """
    if collective.kind == "send":
        table, link = send_table(machine, collective.layout), machine.link
        if table is not None or emulated_link(machine, collective.layout):
            return _stated(table) if table is not None else 0.0
        return ASSUMED_LINK if link is None or link.relative_uncertainty is None else link.relative_uncertainty
    table = table_for(tables_of(machine, collective.kind), collective)
    if table is not None:
        other_dtype = SIZE_STEP if table.wire_dtype != collective.wire_dtype else 0.0
        return _stated(table) + other_dtype
    scaled = idle_curve(machine, collective).scaled
    if scaled is not None:
        return scaled.error
    if collective.kind != "allreduce":
        return ASSUMED_TABLE + _network(machine, whole(collective))
    link, calibrated_devices = machine.link, {table.devices for table in machine.allreduce}
    if link is not None and link.relative_uncertainty is not None:
        return link.relative_uncertainty
    if link is None or not link.fitted_to:
        return ASSUMED_LINK
    away = min((abs(math.log2(collective.devices / count)) for count in calibrated_devices), default=0.0)
    own_level, levels = level(machine, collective.layout), {level(machine, table.layout) for table in machine.allreduce}
    unmeasured = 0.0 if machine.link_in_node is not None and collective.layout else layout_error(own_level, levels)
    return math.hypot(max(ASSUMED_FIT, link.median_residual) + DEVICES_STEP * away, unmeasured)


def _stated(table: AllreduceCost) -> float:
    return ASSUMED_TABLE if table.relative_uncertainty is None else table.relative_uncertainty


def network_error(machine: Machine, collective: Collective, sizes: Floats) -> float:
    """Return that of a collective alone of these sizes (bytes): more outside the sizes of the tables that price it."""
    return _network(machine, collective) + SIZE_STEP * _doublings_outside(machine, collective, sizes)


def _doublings_outside(machine: Machine, collective: Collective, sizes: Floats) -> float:
    """By how many doublings the sizes lie outside the table, or the tables that are scaled, on average by their cost.

    0 without a table.
    """
    curve = idle_curve(machine, collective)
    first, last = curve.first_bytes, curve.last_bytes
    if curve.scaled is not None:
        tables = [sizes_on_the_wire(table, collective.wire_dtype) for table in curve.scaled.tables]
        first, last = max(each[0] for each in tables), min(each[-1] for each in tables)
    if not len(sizes) or not first <= last:
        return 0.0
    doublings = np.log2(np.maximum(1.0, np.maximum(first / sizes, sizes / max(last, 1.0))))
    if not doublings.any():
        return 0.0
    costs = np.array([at(curve.points, 1, size) for size in sizes])
    return float(np.average(doublings, weights=costs)) if costs.sum() > 0 else float(doublings.mean())


@remember
def _overlap(machine: Machine, collective: Collective, overlap: str) -> tuple[float, float]:
    """(of the times beside computation, of the compute time lost), by the nearest table of the mechanism."""
    nearest = _overlap_table(machine, collective, overlap)
    if nearest is None:
        doubt = machine.contention_uncertainty
        taken, stated_loss = machine.computation_taken, machine.computation_taken_uncertainty
        of_loss = stated_loss / taken if taken and stated_loss is not None else ASSUMED_LOSS
        return ASSUMED_OVERLAP if doubt is None else doubt, of_loss
    away = DEVICES_STEP * abs(math.log2(nearest.devices / collective.devices))
    away += ASSUMED_TABLE if nearest.kind != collective.kind else 0.0
    overlapped, loss = nearest.relative_uncertainty, nearest.loss_relative_uncertainty
    return (
        (ASSUMED_OVERLAP if overlapped is None else overlapped) + away,
        (ASSUMED_LOSS if loss is None else loss) + away,
    )


def _overlap_table(machine: Machine, collective: Collective, overlap: str) -> OverlapCost | None:
    """The nearest table of an overlap mechanism; ``None`` without one."""
    tables = [t for t in machine.overlap if t.overlap == overlap and t.algorithm == collective.algorithm]
    return min(
        tables,
        key=lambda t: (t.kind != collective.kind, abs(math.log2(t.devices / collective.devices))),
        default=None,
    )
