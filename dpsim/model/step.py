"""Prices one step of a Plan: its time, its exposed communication, its Timeline."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsim.codec import Noun
from dpsim.fusion_rules import FUSION_RULES
from dpsim.lowering import lower
from dpsim.lowering.computation import ready_times
from dpsim.machine import FusionCosts, Machine
from dpsim.model.cost import nearest_line
from dpsim.model.horovod import joined
from dpsim.model.prices import EXACT, Factors, local_share, prices_of
from dpsim.model.queue import MODES
from dpsim.model.simulate import operations_of, simulate
from dpsim.model.skew import hidden_s
from dpsim.network import Network
from dpsim.plan import Plan
from dpsim.schedule import (
    BACKWARD_EVENT,
    COMPUTE_LANE,
    FORWARD_EVENT,
    LOSS_EVENT,
    OVERHEAD_EVENT,
    SEND_EVENT,
    UPDATE_EVENT,
    Schedule,
)
from dpsim.timeline import EXPOSED_S, Timeline
from dpsim.workload import Workload

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Prediction(Noun, frozen=True):
    """One predicted step.

    step_s = overhead + forward_s + backward_s + update_s + waiting_for_slowest_s + exposed communication +
    waiting_for_input_s, plus what the computation waits for the host or for Horovod's cycle. ``backward_s`` contains
    what communication beside it takes away. ``extrapolated``: outside what the workload or the machine was measured on.

    - ``waiting_for_slowest_s``: how much longer the slowest device computes than the workload and the compute slowdown
      say, where more devices take part than were calibrated together (``dpsim.model.prices``).
    - ``communication_cost_s`` = step_s - the step on a network where every collective takes no time. It is more than
      the exposed communication where overlap takes compute time away.
    - ``low_s`` and ``high_s`` are the ends of the interval that holds the median measured step with a probability of
      ``interval_level`` (``dpsim.model.interval``; ``None``: its width is assumed). It is ``interval_factor`` times
      as wide as the model's own, by ``interval_studies`` past studies of the machine, or where there are none by what
      predictions of others missed on ``interval_clusters`` published clusters.

    The last six are not set where they were not asked for: in ``price(...).prediction``.
    """

    step_s: float
    exposed_communication_s: float
    buckets: int
    forward_s: float
    backward_s: float
    update_s: float
    extrapolated: bool
    waiting_for_slowest_s: float = 0.0
    waiting_for_input_s: float = 0.0
    communication_cost_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    interval_level: float | None = None
    interval_factor: float = 1.0
    interval_studies: int = 0
    interval_clusters: int = 0


@dataclass(frozen=True, eq=False)
class PricedStep:
    """A schedule with the time of each operation on a machine: every operation's instants, and the sums.

    ``schedule`` has Horovod's buckets decided; ``times`` (3, operations) are start, end and gradients ready. ``sums``
    are those of the rank class that waits least (``dpsim.model.simulate``).
    """

    machine: Machine
    schedule: Schedule
    times: Floats
    sums: Floats
    step_s: float
    extrapolated: bool
    waiting_s: tuple[float, float, float, float]
    input_s: float

    @property
    def prediction(self) -> Prediction:
        """The sums over the operations."""
        exposed_s, forward_s, backward_s, update_s = (
            float(self.sums[kind]) for kind in (EXPOSED_S, FORWARD_EVENT, BACKWARD_EVENT, UPDATE_EVENT)
        )
        return Prediction(
            step_s=self.step_s,
            exposed_communication_s=exposed_s,
            buckets=self.schedule.buckets,
            forward_s=forward_s - self.waiting_s[0],
            backward_s=backward_s - self.waiting_s[1],
            update_s=update_s - self.waiting_s[2],
            extrapolated=self.extrapolated,
            waiting_for_slowest_s=sum(self.waiting_s),
            waiting_for_input_s=self.input_s,
        )

    def timeline(self) -> Timeline:
        """The step as events of the first rank of each class, in the order of their starts.

        A backward that stops for an allreduce is two events. What takes no time is left out where no layer does it.
        """
        schedule, (start, end, _) = self.schedule, self.times
        queue = schedule.gradient_collectives if schedule.plan.overlap == "inline" else np.empty(0, np.int64)
        ranks = schedule.rank_class.astype(np.int64) * (schedule.plan.devices // schedule.classes)
        kinds, lanes = schedule.kind, schedule.lane
        events: list[tuple[float, float, int, int, int]] = []
        for i in range(len(schedule.kind)):
            lane, size = int(lanes[i]), int(schedule.size_bytes[i])
            paused = queue[:0]
            if lane == COMPUTE_LANE:
                inside = (start[queue] >= start[i]) & (end[queue] <= end[i]) & (end[queue] > start[queue])
                paused = queue[inside & (ranks[queue] == ranks[i])]
            edges = [float(start[i]), *np.column_stack([start[paused], end[paused]]).ravel().tolist(), float(end[i])]
            empty = len(paused) or kinds[i] in (OVERHEAD_EVENT, LOSS_EVENT, SEND_EVENT)
            for begin, stop in zip(edges[::2], edges[1::2], strict=True):
                if stop > begin or not empty:
                    events.append((begin, stop, lane, i, size))
        events.sort(key=lambda event: event[:2])
        columns = [np.array(column) for column in zip(*events, strict=True)]
        rows = columns[3].astype(np.int64)
        return Timeline(
            source="predicted",
            operations=tuple(schedule.operation_name(i) for i in range(len(schedule.kind))),
            step=np.zeros(len(events), np.int64),
            rank=ranks[rows],
            lane=columns[2].astype(np.int64),
            operation=rows,
            start_s=columns[0],
            end_s=columns[1],
            size_bytes=columns[4].astype(np.int64),
            emulated_network=self.machine.emulated_network,
            emulated_compute=schedule.workload.emulated_compute,
        )

    def buckets_ready_s(self) -> Floats:
        """When each bucket of gradients of the last micro-batch is complete, in the order in which they are sent.

        They are seconds of computation from the start of their class's backward. What runs beside backward slows it
        down; where backward stands still for an allreduce (inline), that does not count.
        """
        schedule, (start, end, ready) = self.schedule, self.times
        last = schedule.micro_batch == schedule.plan.accumulate - 1
        queue = schedule.gradient_collectives
        queue = queue[last[queue]]
        ready_s: Floats = np.array([ready[schedule.dependencies(int(bucket))].max() for bucket in queue])
        for own in range(schedule.classes):
            backward = (schedule.kind == BACKWARD_EVENT) & (schedule.rank_class == own) & last
            of_class = schedule.rank_class[queue] == own
            ready_s[of_class] -= start[backward].min()
            if schedule.plan.overlap == "inline":
                standing = (end - start)[queue[of_class]]
                ready_s[of_class] -= np.cumsum(standing) - standing
        return ready_s


def price(schedule: Schedule, machine: Machine, factors: Factors = EXACT) -> PricedStep:
    """When each operation of a schedule starts and ends (``dpsim.model.simulate.simulate``).

    Layer times are the Workload's at the largest local batch, times the machine's compute slowdown at this device
    count (overhead and update too), and times what waiting for the slowest device adds (``prices.waiting_factor``).
    The step lasts until its input is prepared. ``factors`` multiply parts of the prices. Raises ``ConfigError`` where
    the machine does not price the plan's allreduce.
    """
    plan, workload = schedule.plan, schedule.workload
    priced = prices_of(machine, schedule, factors)
    (first_bytes, last_bytes), extrapolated, mode = priced.known_bytes, priced.extrapolated, MODES[plan.overlap]
    if schedule.dynamic:
        schedule, operations = joined(schedule, priced.prices, mode)
    else:
        operations = operations_of(schedule)
    times, sums, step_s = simulate(operations, priced.prices, mode)
    if machine.network and sums[EXPOSED_S] > 0:
        exposed_s = float(sums[EXPOSED_S])
        hidden = min(exposed_s, hidden_s(Network.parse(machine.network), schedule, step_s - exposed_s))
        if hidden > 0:
            times, step_s = _shortened(times, schedule.gradient_collectives, hidden), step_s - hidden
            sums[EXPOSED_S] -= hidden
    if plan.data_devices > 1 and schedule.buckets and not extrapolated:
        sizes = schedule.summed_bytes
        extrapolated = bool(len(sizes)) and bool(sizes.min() < first_bytes or sizes.max() > last_bytes)
    input_s = _waiting_for_input_s(workload, plan, step_s)
    waiting_s = priced.waiting_s
    return PricedStep(machine, schedule, times, sums, float(step_s) + input_s, extrapolated, waiting_s, input_s)


def _shortened(times: Floats, collectives: Ints, hidden: float) -> Floats:
    """Return the instants of operations where the collectives together take that much less, each in proportion."""
    first_s, last_s = float(times[0, collectives].min()), float(times[1, collectives].max())
    shorter: Floats = np.interp(times, [0.0, first_s, last_s], [0.0, first_s, last_s - hidden])
    return np.where(times > last_s, times - hidden, shorter)


def step_times(workload: Workload, machine: Machine, plans: Iterable[Plan]) -> Floats:
    """``predict(...).step_s`` of each plan."""
    return np.array([price(scheduled(workload, machine, plan), machine).step_s for plan in plans], np.float64)


def timeline(workload: Workload, machine: Machine, plan: Plan) -> Timeline:
    """The predicted step of a plan as events (``PricedStep.timeline``), from the same numbers as ``predict``."""
    return price(scheduled(workload, machine, plan), machine).timeline()


def scheduled(workload: Workload, machine: Machine, plan: Plan) -> Schedule:
    """The plan's schedule. A rule that needs costs takes those that were decided, or else the machine's line."""
    if not FUSION_RULES.find(plan.fusion_rule).needs_costs:
        return lower(workload, plan)
    if (costs := _decided_costs(machine, plan)) is not None:
        return lower(workload, plan, np.array(costs.ready_s), costs.alpha_s, costs.beta_s_per_byte)
    alpha_s, beta = nearest_line(machine, machine.priced(plan.collective))
    return lower(workload, plan, alpha_s=alpha_s, beta_s_per_byte=beta)


def decides_by_costs(plan: Plan) -> bool:
    """Whether the plan's buckets depend on ready times and on what its allreduce costs."""
    return plan.data_devices > 1 and FUSION_RULES.find(plan.fusion_rule).needs_costs


def fusion_costs(workload: Workload, machine: Machine, plan: Plan) -> FusionCosts:
    """Return by what the plan's rule makes buckets: those that were decided, or else the workload's and the machine's.

    Raises ``ConfigError`` where the machine does not price the plan's allreduce.
    """
    if (decided := _decided_costs(machine, plan)) is not None:
        return decided
    alpha_s, beta = nearest_line(machine, machine.priced(plan.collective))
    return FusionCosts(
        collective=plan.collective,
        local_batch=plan.local_batch,
        ready_s=tuple(ready_times(workload, plan.local_batch).tolist()),
        alpha_s=alpha_s,
        beta_s_per_byte=beta,
    )


def _decided_costs(machine: Machine, plan: Plan) -> FusionCosts | None:
    key = plan.collective, plan.local_batch
    return next((each for each in machine.fusion_costs if (each.collective, each.local_batch) == key), None)


def _waiting_for_input_s(workload: Workload, plan: Plan, step_s: float) -> float:
    """Seconds that a step waits for its samples: for all of them, or for what prefetching beside a step leaves."""
    input_s = workload.input_s(local_share(plan) * plan.accumulate)
    return max(0.0, input_s - step_s) if workload.input_prefetch else input_s
