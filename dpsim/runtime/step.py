"""One training step: a replica computes, buckets are reduced as they become complete, the update follows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsim.comm.clock import now
from dpsim.comm.compression import compression
from dpsim.comm.ordered_sum import ordered_sum
from dpsim.comm.transport import Array, Transport
from dpsim.constraints import check
from dpsim.errors import ConfigError, NotFiniteError
from dpsim.kernels.allreduce.tree import PartialSums
from dpsim.plan import Plan
from dpsim.replica import Batch, BatchSums, Capabilities, DeferredSums, LayerSpec, OrderedSum, Replica, StagedReplica
from dpsim.runtime.arena import Arena, gradient_dtype
from dpsim.runtime.device_step import FetchedGradients
from dpsim.runtime.finite import finite_check
from dpsim.runtime.leaf_step import LeafStep, Pass
from dpsim.runtime.micro_batches import plan_partial_sums
from dpsim.runtime.program import compiled
from dpsim.runtime.rank_status import UNKNOWN, RankStatus
from dpsim.runtime.recorder import StepMarks
from dpsim.runtime.shard_update import shard_update
from dpsim.runtime.stages.groups import StageGroups
from dpsim.runtime.stages.stage_step import StageStep
from dpsim.runtime.stall import Labels
from dpsim.runtime.step_clock import step_clock
from dpsim.runtime.step_collectives import StepCollectives
from dpsim.schedule import Schedule

_ROOT_CAUSE_GRACE_S = 2.0
"""Seconds to wait before reporting a NaN received from another rank, so that the rank's own error is shown."""


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """Sums over this rank's samples of one step, the samples of the whole batch, and when everything happened."""

    sums: BatchSums
    global_samples: int
    marks: StepMarks


class StepRunner:
    """A runner that executes a schedule's step again and again with one replica and one transport.

    It owns the run's memory (``arena``) and hands it to the replica. ``initialise`` must be called once.
    ``control`` carries the decisions of a rule that packs buckets while running (Horovod's); such a rule needs
    one of its own, since its messages must not mix with the gradients'. ``status`` is told what the rank does.
    ``rate`` gives the learning rate of each step, counted from 0; without it the optimizer's own stays.
    ``exact`` carries the sums in the fixed order of addition (``ordered_sum``), on several ranks in a transport of its
    own: they may be asked for while gradients travel. Where the schedule has several rank classes, ``transport`` is
    that of the rank's own class, and ``groups`` has the others.
    """

    def __init__(
        self,
        replica: Replica,
        schedule: Schedule,
        transport: Transport,
        control: Transport | None = None,
        status: RankStatus | None = None,
        rate: Callable[[int], float] | None = None,
        exact: Transport | None = None,
        groups: StageGroups | None = None,
    ) -> None:
        plan, able = schedule.plan, Capabilities.of(replica)
        world = None if groups is None else groups.world
        rank = transport.rank if world is None else world.rank
        self.program = compiled(schedule, rank)
        own_layers = [replica.layers[layer] for layer in self.program.layers]
        normalises = any(layer.batch_norm_channels for layer in own_layers)
        _check(plan, transport, world, able, normalises)
        able.multiply_in(plan.compute_dtype)
        self.replica, self.schedule, self.transport, self.memory = replica, schedule, transport, transport.memory
        self.plan, self.steps, self._layers = plan, 0, replica.layers
        self._warm_up, self._emulated, self._diagnostic = able.warm_up, able.emulated, able.diagnostic
        dtype, order = gradient_dtype(schedule), plan_partial_sums(plan)
        self.ordered_sum = ordered_sum(exact or transport, order)
        most_slots = max(map(order.owners.count, order.owners))
        self.arena = Arena(schedule, dtype, transport.allocate, most_slots, rank, self.memory)
        self.parameters = self.arena.parameter_views()
        self.gradients = self.arena.gradient_views(self.arena.gradients)
        self._compression = compression(plan.wire_dtype, dtype, plan.global_batch)
        rounding = self._compression.rounding if self._compression is not None and plan.leaves else None
        self._may_overflow = plan.devices > 1 or rounding is not None
        if able.staged is not None and groups is not None:
            groups.give_layers(able.staged, schedule, self.program, self._paused_sum)
        held = len(order.of(transport.rank))
        self._leaves = LeafStep(replica, self.arena, plan, transport.rank, held, rounding, self.program)
        self._pass = self._leaves.passes[0]
        self.status = RankStatus() if status is None else status
        self._rate = rate or (lambda step: plan.optimizer.learning_rate)
        self._finite = finite_check(self.arena, _smallest_last_tensor(own_layers), transport, world)
        self._update = shard_update(self.arena, plan.optimizer)
        self._measured: Array = np.empty(0)
        self._clock = step_clock(self.memory)
        self._collectives = self._step_collectives(control or transport, order)
        self._share = self.arena.updated_share
        self._communicates_inside = self.program.waits_for_collectives or world is not None
        self._follows = tuple(self._communicates_inside or bool(each) for each in self.program.releases)
        self._stage = None if able.staged is None or groups is None else self._stage_step(able.staged, groups)
        if normalises and able.batch_norm is not None:
            add = self._collectives.sum_between_layers(own_layers, dtype.name, self.ordered_sum)
            self._leaves.normalise(able.batch_norm, plan.batch_norm, add)

    def _paused_sum(self, add: OrderedSum, arrays: Sequence[Array]) -> Array:
        return self._collectives.paused_sum(add, arrays)

    def _step_collectives(self, control: Transport, order: PartialSums) -> StepCollectives:
        return StepCollectives(
            self.schedule,
            self.program,
            self.transport,
            control,
            self.arena,
            order,
            self._compression,
            self._clock,
            self.status,
        )

    def _stage_step(self, replica: StagedReplica, groups: StageGroups) -> StageStep | None:
        """Return what runs a stage's actions; ``None`` where the program has none."""
        if not self.program.actions:
            return None
        return StageStep(
            replica,
            self.program,
            self._leaves,
            groups.world,
            self.schedule,
            self._clock,
            self.status,
            self._emulated,
        )

    def initialise(self, seed: int) -> None:
        """Set parameters to the replica's own initial values, and optimizer state to zero."""
        self.arena.set_parameters(self.arena.flat(self.replica.initial_parameters(seed)))
        for slot in self.arena.optimizer_state.values():
            slot[...] = 0

    def evaluate(self, x: Array, labels: NDArray[np.int64]) -> BatchSums:
        """Return the sums of an evaluation of these samples: in stages those of the last one, zeros in the others."""
        return (self._stage or self.replica).evaluate(x, labels)

    def bind_again(self) -> None:
        """Give the replica its memory back, after somebody else has bound it."""
        self._leaves.bind_again()

    def warm_up(self) -> None:
        """Compute one sample and update nothing: every kernel of a step is then compiled. Overwrites gradients."""
        if self._warm_up is not None:
            self._warm_up.warm_up()
        self._collectives.warm_up()
        self._update.warm_up()

    def run(self, share: Batch, global_samples: int, begin_s: float | None = None) -> StepOutcome:
        """Do one optimizer update from this rank's share of a batch of ``global_samples``, cut into its leaves.

        ``begin_s`` is when the step began if that was earlier, as when the batch was fetched in it.
        Raises ``NotFiniteError`` when the loss of any rank is not finite, before any parameter changes.
        """
        self.memory.use()
        clock, leaves = self._clock, self._leaves
        clock.begin(now() if begin_s is None else begin_s)
        clock.computed(self.program.overhead)
        self.status.computes(self.steps + 1)
        self._collectives.begin()
        if self._emulated is not None and self._communicates_inside:
            self._emulated.step_begins(leaves.part(leaves.passes[0].micro_batch, share))
        if self._communicates_inside:
            self._after(self.program.overhead, self.program.releases)
        if self._stage is not None:
            parts: Sequence[BatchSums | DeferredSums] = self._stage.run(share, self._enter, self)
        else:
            parts = [self._forward_backward(each, share) for each in leaves.passes]
        sums = None if self.memory.deferred else self._sums(parts, share)
        self._collectives.finish()
        if self._stage is not None:
            self._stage.finish()
        if sums is None:
            leaves.add_statistics()
            sums = self._sums(parts, share)
        measured = self._measured if self.memory.deferred else self._update.measure()
        if self._finite.agrees or self._may_overflow:
            self._check_reduced(sums.loss, measured, share)
        leaves.update_statistics()
        if self._emulated is not None:
            self._emulated.update_begins(max((sent[-1] for sent in clock.marks.collectives), default=0.0), self._share)
        self._update(measured, self._rate(self.steps), 1.0 / global_samples, self.steps + 1)
        gathers = self.program.before_update < len(self.program.queue)
        if self._emulated is not None and gathers:
            self._emulated.update_ends(self._share)
        marks = clock.marks
        marks.end_s = clock.computed(self.program.update)
        self._collectives.gather_parameters()
        if self._emulated is not None and gathers:
            self._emulated.resumes_at(marks.end_s)
        self.steps += 1
        self.status.rests()
        return StepOutcome(sums=sums, global_samples=global_samples, marks=marks)

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Bytes that this rank has allocated, by part; ``messages`` are those that other stages send."""
        arena = self.arena
        return {
            "parameters": arena.parameter_bytes,
            "gradients": arena.gradient_bytes + self._leaves.partial_sum_bytes,
            "optimizer_state": arena.optimizer_state_bytes,
            "messages": 0 if self._stage is None else self._stage.size_bytes,
        }

    @property
    def labels(self) -> Labels:
        """The meaning of the numbers of ``look``."""
        return Labels([self.schedule.bucket_tensors(n) for n in range(self.schedule.buckets)], self.program.names)

    def look(self) -> tuple[int, int]:
        """Return the bucket under way and the number of the operation finished last; for another thread to ask."""
        last = self._clock.marks.last_operation
        is_layer = last not in (None, self.program.overhead, self.program.update)
        return self._collectives.bucket, UNKNOWN if last is None or not is_layer else last

    def close(self) -> None:
        """End the communication thread, if there is one."""
        self._collectives.close()

    # What the replica announces (dpsim.replica.StepEvents).

    def forward_done(self, layer: int) -> None:
        operation = self._pass.forward[layer]
        self._clock.computed(operation)
        if self._follows[operation]:
            self._after(operation, self.program.releases)

    def recompute_done(self, layer: int) -> None:
        self._done(self._pass.recompute[layer])

    def loss_done(self) -> None:
        self._done(self._pass.loss)

    def gradients_ready(self, layer: int) -> None:
        self._clock.ready(layer)
        if self._pass.adds:
            self._leaves.add_up(self._pass.micro_batch, [tensor.name for tensor in self._layers[layer].tensors])
        if self._pass.releases:
            operation = self._pass.backward[layer]
            self._collectives.released(self.program.releases[operation], operation)

    def backward_done(self, layer: int) -> None:
        operation = self._pass.backward[layer]
        self._clock.computed(operation)
        if self._communicates_inside:
            self._after(operation, self.program.releases_at_end)
        self._collectives.poll()

    def _done(self, operation: int) -> None:
        self._clock.computed(operation)
        if self._follows[operation]:
            self._after(operation, self.program.releases)

    def _after(self, operation: int, releases: tuple[tuple[int, ...], ...]) -> None:
        """Begin what waits for an operation that is done, and wait for what the next computation needs."""
        if releases[operation] and self._pass.releases:
            self._collectives.released(releases[operation], operation)
        elif self._communicates_inside:
            self._collectives.poll()
        if count := self.program.needs_after[operation]:
            moment = self._collectives.need(count)
            if self._emulated is not None:
                self._emulated.resumes_at(moment)
        if self._stage is not None:
            self._stage.poll()

    def _enter(self, each: Pass) -> None:
        self._pass = each

    def _forward_backward(self, each: Pass, share: Batch) -> BatchSums | DeferredSums:
        self._pass = each
        self._leaves.bind(each)
        sums = self.replica.forward_backward(self._leaves.part(each.micro_batch, share), self)
        self._leaves.take_statistics()
        return sums

    def _sums(self, parts: Sequence[BatchSums | DeferredSums], share: Batch) -> BatchSums:
        """Return the sums of the step; on a device the host waits here for them, and for all that comes with them.

        Raises ``NotFiniteError`` for a loss that is not finite, where the ranks do not agree on that together.
        """
        if isinstance(self._finite, FetchedGradients):
            self.status.waits()
            fetched, self._measured = self._finite.fetch(self.memory, parts, self._update.measure())
            self._clock.fetched()
            self._collectives.fetched()
            self.status.computes()
        else:
            fetched = [sums.fetch() for sums in parts]
        sums = self._leaves.total(fetched, len(share.labels))
        if not self._finite.agrees:
            self._check_loss(sums.loss, share)
        return sums

    def _check_loss(self, loss: float, share: Batch) -> None:
        if not math.isfinite(loss):
            raise self._not_finite(f"the loss is {loss}", share)

    def _check_reduced(self, loss: float, measured: NDArray[np.float64], share: Batch) -> None:
        """Notice another rank's NaN in this step, not by the parameters that it spoils.

        Adds ``measured``, what the update must know of whole tensors, over the ranks where they have shards.
        """
        since = self._clock.timestamp() if self._finite.agrees else None
        finite = self._finite(loss, measured)
        if self._finite.agrees:
            self._clock.computed(self.program.overhead, self._clock.paused(since, self.program.agreement_bytes))
        if finite:
            return
        self._check_loss(loss, share)
        time.sleep(_ROOT_CAUSE_GRACE_S)
        sent = f", sent as {self._compression.dtype}," if self._compression is not None else ""
        raise self._not_finite(f"the loss of this rank is finite, the sum of all ranks' gradients{sent} is not", share)

    def _not_finite(self, what: str, share: Batch) -> NotFiniteError:
        able = self._diagnostic if self.arena.has_all_parameters else None
        where = None if able is None else able.first_nonfinite_layer(share.x, share.labels)
        return NotFiniteError(
            f"{what} in step {self.steps + 1}; the first value that is not finite: {where or 'the loss'}",
            remedy="lower --learning-rate, or look at the data for values that are not finite",
        )


def _smallest_last_tensor(layers: Sequence[LayerSpec]) -> str:
    """Return the name of the smallest tensor of the last layer that has any: its gradient comes first."""
    last = next(layer for layer in reversed(layers) if layer.tensors)
    return min(last.tensors, key=lambda tensor: tensor.elements).name


def _check(plan: Plan, transport: Transport, world: Transport | None, able: Capabilities, normalises: bool) -> None:
    """Raise ``ConfigError`` for a plan that the transports or the replica cannot run."""
    check("network", algorithm=plan.algorithm, network=transport.network)
    ranks = (transport if world is None else world).size
    if (ranks, transport.size) != (plan.devices, plan.data_devices):
        raise ConfigError(f"a plan for {plan.devices} devices on {ranks} ranks", allowed="as many ranks")
    if world is not None and able.staged is None:
        raise ConfigError(
            f"strategy {plan.strategy} for a model that computes all of its layers in one call",
            allowed="strategies in which every device computes all layers",
            remedy="leave --strategy out, or write a replica as dpsim.replica.StagedReplica describes",
        )
    devices_a_node = plan.data_layout.of_a_node
    if transport.devices_a_node != devices_a_node:
        raise ConfigError(
            f"a plan for nodes of {devices_a_node} on nodes of {transport.devices_a_node} devices",
            allowed="the plan's own layout",
        )
    if plan.batch_norm != "local" and normalises and able.batch_norm is None:
        raise ConfigError(
            f"batch_norm is {plan.batch_norm} for a replica that has one mode of its own",
            allowed="batch_norm local",
            remedy="leave --reproducible and --batch-norm out, normalise each sample alone (group or layer norm),"
            " or write a replica as dpsim.replica.BatchNormReplica describes",
        )
