"""One training step: a replica computes, buckets are reduced as they become complete, the update follows."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsim.collective import CollectiveKind
from dpsim.comm.allreduce import SummationOrder
from dpsim.comm.clock import now
from dpsim.comm.compression import compression
from dpsim.comm.ordered_sum import ordered_sum
from dpsim.comm.progress import BucketAllreduce, Progress, progress
from dpsim.comm.transport import Array, Transport
from dpsim.errors import ConfigError, NotFiniteError
from dpsim.lowering.zero1 import agreement_bytes
from dpsim.machine import check_algorithm
from dpsim.replica import (
    Batch,
    BatchNormReplica,
    BatchSums,
    DiagnosticReplica,
    EmulatedCompute,
    LeafReplica,
    OrderedSum,
    Replica,
    WarmUpReplica,
)
from dpsim.runtime.arena import Arena, gradient_dtype
from dpsim.runtime.buckets import BucketPolicy, Run, bucket_policy
from dpsim.runtime.compute_dtype import choose_compute_dtype
from dpsim.runtime.finite import FetchedGradients, finite_check
from dpsim.runtime.gradient_accumulator import GradientAccumulator
from dpsim.runtime.leaf_statistics import LeafStatistics
from dpsim.runtime.micro_batches import MicroBatch, plan_micro_batches, plan_partial_sums
from dpsim.runtime.program import compiled
from dpsim.runtime.rank_status import UNKNOWN, RankStatus
from dpsim.runtime.recorder import StepMarks
from dpsim.runtime.shard_update import shard_update
from dpsim.runtime.stall import Labels
from dpsim.runtime.step_clock import step_clock
from dpsim.runtime.step_sums import Sums, fetch_step, step_sums
from dpsim.schedule import ALL_GATHER_EVENT, Schedule

_WITNESS_FIRST_S = 2.0
"""How long a rank that only sees the consequence waits for the rank that knows the cause to end the job."""


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """Sums over this rank's samples of one step, the samples of the whole batch, and when everything happened."""

    sums: BatchSums
    global_samples: int
    marks: StepMarks


class StepRunner:
    """Executes a schedule's step again and again with one replica and one transport.

    It owns the run's memory (``arena``) and hands it to the replica. ``initialise`` must be called once.
    ``control`` carries the decisions of a rule that packs buckets while running (Horovod's); such a rule needs
    one of its own, since its messages must not mix with the gradients'. ``status`` is where it says what it does.
    ``rate`` gives the learning rate of each step, counted from 0; without it the optimizer's own stays.
    ``exact`` carries the sums in the fixed order of addition (``ordered_sum``), on several ranks in a transport of its
    own: they may be asked for while gradients travel.
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
    ) -> None:
        plan = schedule.plan
        check_algorithm(plan.algorithm, transport.network)
        if transport.size != plan.devices:
            raise ConfigError(f"a plan for {plan.devices} devices on {transport.size} ranks", allowed="as many ranks")
        if transport.devices_a_node != plan.devices_a_node:
            raise ConfigError(
                f"a plan for nodes of {plan.devices_a_node} on nodes of {transport.devices_a_node} devices",
                allowed="the plan's own layout",
            )
        normalises = any(layer.batch_norm_channels for layer in replica.layers)
        if plan.batch_norm != "local" and normalises and not isinstance(replica, BatchNormReplica):
            raise ConfigError(
                f"batch_norm is {plan.batch_norm} for a replica that has one mode of its own",
                allowed="batch_norm local",
                remedy="leave --reproducible and --batch-norm out, normalise each sample alone (group or layer norm),"
                " or write a replica as dpsim.replica.BatchNormReplica describes",
            )
        choose_compute_dtype(replica, plan.compute_dtype)
        self.replica, self.schedule, self.transport, self.memory = replica, schedule, transport, transport.memory
        self.plan = plan
        dtype = gradient_dtype(schedule)
        slots = plan_partial_sums(plan)
        self._order = slots
        self.ordered_sum = ordered_sum(exact or transport, slots)
        most_slots = max(map(slots.owners.count, slots.owners))
        self.arena = Arena(schedule, dtype, transport.allocate, most_slots, transport.rank, self.memory)
        self.parameters = self.arena.views(self.arena.parameters)
        self.gradients = self.arena.views(self.arena.gradients)
        self._micro_batches = plan_micro_batches(plan, transport.rank, takes_leaves=isinstance(replica, LeafReplica))
        self._compression = compression(plan.wire_dtype, dtype, plan.global_batch)
        self._rounding = self._compression.rounding if self._compression is not None and plan.leaves else None
        held = len(slots.of(transport.rank))
        self._memory = GradientAccumulator(replica, self.arena, held, self._micro_batches, self._rounding)
        self._micro_batch = self._micro_batches[0]
        if isinstance(replica, LeafReplica):
            replica.train_in_leaves(plan.leaves > 0, self._rounding)
        self._memory.bind(self._micro_batch)
        self._statistics: LeafStatistics | None = None
        if normalises and isinstance(replica, BatchNormReplica):
            add = self._sum_between_layers(dtype.name)
            replica.normalise_batches(plan.batch_norm, add)
            if plan.batch_norm == "leaf":
                self._statistics = LeafStatistics(replica, self._micro_batches, add)
        self._emulated = replica if isinstance(replica, EmulatedCompute) else None
        self.steps = 0
        self.status = RankStatus() if status is None else status
        self._rate = rate or (lambda step: plan.optimizer.learning_rate)
        self._layers = replica.layers
        last = next(layer for layer in reversed(self._layers) if layer.tensors)
        telltale = self.gradients[min(last.tensors, key=lambda tensor: tensor.elements).name]
        self._finite = finite_check(self.arena, telltale, transport)
        self._update = shard_update(self.arena, plan.optimizer)
        self._of_tensors: Array = np.empty(0)
        self._agreement_bytes = agreement_bytes(schedule.workload, plan.optimizer)
        self._clock = step_clock(self.memory)
        self._handed_in: dict[int, BucketAllreduce] = {}
        self._overlapped = plan.overlap != "off"
        self._communicates = plan.devices > 1
        self._progress: Progress = progress(transport, plan.algorithm, plan.overlap, self._finished, self._compression)
        self.program = compiled(schedule)
        self._sending = self.program.adds_up
        self._policy: BucketPolicy = bucket_policy(schedule, self.program, control or transport)
        self._allreduces: dict[Run, BucketAllreduce] = {}
        self._gathers = [
            (bucket, self._progress.prepare(self.arena.bucket_parameters(bucket), kind="all-gather"))
            for bucket in self.program.gathers
        ]
        self._held: list[Run] = []
        self._blocking = plan.overlap in ("off", "inline")
        self._of_micro_batch(self._micro_batch)

    def initialise(self, seed: int) -> None:
        """Parameters from the replica's own initial values, optimizer state zero."""
        for name, value in self.replica.initial_parameters(seed).items():
            self.memory.write(self.parameters[name], value)
        for slot in self.arena.optimizer_state.values():
            slot[...] = 0

    def warm_up(self) -> None:
        """Compute one sample and update nothing: every kernel of a step is then compiled. Overwrites gradients."""
        if isinstance(self.replica, WarmUpReplica):
            self.replica.warm_up()
        for bucket in range(self.schedule.buckets if self._communicates else 0):
            self._allreduce(bucket, bucket + 1)
        self._update.warm_up()

    def run(self, share: Batch, global_samples: int, begin_s: float | None = None) -> StepOutcome:
        """One optimizer update from this rank's share of a batch of ``global_samples``, cut into this rank's leaves.

        ``begin_s`` is when the step began if that was earlier, as when the batch was fetched in it.
        Raises ``NotFiniteError`` when the loss of any rank is not finite, before any parameter changes.
        """
        self.memory.use()
        clock = self._clock
        clock.begin(now() if begin_s is None else begin_s)
        clock.computed(self.program.overhead)
        self.status.computes(self.steps + 1)
        self._policy.begin()
        self._held = []
        x, labels = share.x, share.labels
        of_each = [self._forward_backward(one, share) for one in self._micro_batches]
        sums = None if self.memory.deferred else self._sums(of_each, x, labels)
        if self._communicates:
            self._finish_communication()
        if self._emulated is not None:
            self._emulated.update_begins(max((sent[-1] for sent in clock.marks.collectives), default=0.0))
        if sums is None:
            if self._statistics is not None:
                self._statistics.add_up()
            sums = self._sums(of_each, x, labels)
        of_tensors = self._of_tensors if self.memory.deferred else self._update.measure()
        if self._finite.agrees or self._communicates or self._rounding is not None:
            self._check_reduced(sums.loss, of_tensors, x, labels)
        if self._statistics is not None:
            self._statistics.update()
        self._update(of_tensors, self._rate(self.steps), 1.0 / global_samples, self.steps + 1)
        marks = clock.marks
        marks.end_s = clock.computed(self.program.update)
        if self._gathers:
            self._gather_parameters()
        self.steps += 1
        self.status.rests()
        return StepOutcome(sums=sums, global_samples=global_samples, marks=marks)

    @property
    def labels(self) -> Labels:
        """What the numbers of ``look`` stand for."""
        return Labels([self.schedule.bucket_tensors(n) for n in range(self.schedule.buckets)], self.program.names)

    def look(self) -> tuple[int, int]:
        """The bucket under way, and the number of the operation finished last; for another thread to ask."""
        last = self._clock.marks.last_operation
        known = last not in (None, self.program.overhead, self.program.update)
        return self._progress.bucket, UNKNOWN if last is None or not known else last

    def close(self) -> None:
        """End the communication thread, if there is one."""
        self._progress.close()

    # What the replica announces (dpsim.replica.StepEvents).

    def forward_done(self, layer: int) -> None:
        self._clock.computed(self._forward[layer])
        if self._announces and self.program.releases[self._forward[layer]]:
            self._released(self._forward[layer])

    def loss_done(self) -> None:
        self._clock.computed(self._loss)

    def gradients_ready(self, layer: int) -> None:
        self._clock.ready(layer)
        if self._micro_batch.merges or self._rounding is not None:
            self._memory.add_up(self._micro_batch, [tensor.name for tensor in self._layers[layer].tensors])
        if self._announces:
            self._released(self._backward[layer])

    def _released(self, operation: int) -> None:
        """Begin the messages that may start now that an operation is done."""
        complete = self._policy.ready(operation)
        if not self._overlapped:
            self._held += complete
        elif complete:
            since = self._clock.moment() if self._blocking else None
            if self._blocking:
                self.status.waits()
            for first, stop in complete:
                self._reduce(first, stop)
            if self._blocking:
                self._follow_allreduces()
                self.status.computes(self.steps + 1)
                self._clock.paused(since)
        else:
            self._progress.poll()

    def backward_done(self, layer: int) -> None:
        self._clock.computed(self._backward[layer])
        if self._overlapped and self._communicates:
            self._progress.poll()

    def _finished(self, bucket: int, size_bytes: int, start_s: float, end_s: float) -> None:
        self._clock.reduced((self._sending, bucket, size_bytes), start_s, end_s, self._handed_in[bucket].span())

    def _finish_communication(self) -> None:
        since = self._clock.moment()
        self.status.waits()
        for first, stop in itertools.chain(self._held, self._policy.rest()):
            self._reduce(first, stop)
        if self.memory.deferred:
            self._follow_allreduces()
        else:
            self._progress.finish()
        self.status.computes(self.steps + 1)
        self._clock.computed(self.program.overhead, self._clock.paused(since))

    def _follow_allreduces(self) -> None:
        """Let a device's computation wait for the allreduces that are in its queue; the host waits for those alone
        that are not."""
        if (end := self._progress.enqueue()) is not None:
            self.memory.follow(end)

    def _gather_parameters(self) -> None:
        """Bring the parameters together that each rank has updated its shards of, in the order of the schedule."""
        since = self._clock.moment()
        self.status.waits()
        self._sending = ALL_GATHER_EVENT
        for bucket, gather in self._gathers:
            self._hand_in(bucket, gather)
        self._progress.finish()
        self._sending = self.program.adds_up
        self._clock.marks.end_s = self._clock.paused(since)

    def _reduce(self, first: int, stop: int) -> None:
        """Begin to add up buckets ``first`` to ``stop - 1`` over the ranks, into the first slot."""
        self._hand_in(first, self._allreduce(first, stop))

    def _hand_in(self, bucket: int, collective: BucketAllreduce) -> None:
        self._handed_in[bucket] = collective
        self._progress.submit(bucket, collective)

    def _allreduce(self, first: int, stop: int) -> BucketAllreduce:
        """The allreduce of some buckets, prepared once; with leaves in the fixed order of addition."""
        run = (first, stop)
        if run not in self._allreduces:
            order = None
            if self.plan.leaves:
                extra = range(1, len(self.arena.slots))
                order = SummationOrder(self._order, tuple(self.arena.buckets(*run, slot) for slot in extra))
            kind: CollectiveKind = "reduce-scatter" if self.schedule.sharded else "allreduce"
            self._allreduces[run] = self._progress.prepare(self.arena.buckets(*run), order, kind)
        return self._allreduces[run]

    def _sum_between_layers(self, dtype: str) -> OrderedSum:
        """What batch norm adds over the ranks with: statistics in float64, sums of gradients in their ``dtype``."""
        if self.plan.batch_norm == "local":
            return self._paused_sum
        values = [1 + 2 * layer.batch_norm_channels for layer in self.replica.layers if layer.batch_norm_channels]
        most = (
            {"float64": sum(values)}
            if self.plan.batch_norm == "leaf"
            else dict.fromkeys(("float64", dtype), max(values))
        )
        add = self.transport.sums_between_layers(self._order, most)
        return self._paused_sum if add is None else functools.partial(self._paused_sum, add=add)

    def _paused_sum(self, arrays: Sequence[Array], add: OrderedSum | None = None) -> Array:
        """``ordered_sum`` in the midst of computing, or another one that adds in its order."""
        add = add or self.ordered_sum
        if not self._communicates:
            return add(arrays)
        since = self._clock.moment()
        self.status.waits()
        total = add(arrays)
        self.status.computes(self.steps + 1)
        self._clock.paused(since, arrays[0].nbytes)
        return total

    def _of_micro_batch(self, micro_batch: MicroBatch) -> None:
        """Look up the operations that the replica announces next.

        There may be more micro-batches than the schedule has, the first ones then in place of its first one; what is
        released is released by the last one that stands for a micro-batch of the schedule.
        """
        number = self._micro_batches.index(micro_batch)
        surplus = len(self._micro_batches) - self.plan.accumulate
        self._announces = self._communicates and number >= surplus
        scheduled = max(0, number - surplus)
        self._forward, self._backward = self.program.forward[scheduled], self.program.backward[scheduled]
        self._loss = self.program.loss[scheduled]

    def _forward_backward(self, one: MicroBatch, share: Batch) -> Sums:
        """The sums of one pass over its leaves of the share."""
        if len(self._micro_batches) > 1:
            self._micro_batch = one
            self._of_micro_batch(one)
            self._memory.bind(one)
        edges = share.leaves[one.first : one.stop + 1]
        low, high = edges[0], edges[-1]
        part = Batch(
            x=share.x[low:high],
            labels=share.labels[low:high],
            leaves=tuple(edge - low for edge in edges),
            seed=share.seed,
            step=share.step,
            first_sample=share.first_sample + low,
        )
        sums = self.replica.forward_backward(part, self)
        if self._statistics is not None:
            self._statistics.take()
        return sums

    def _sums(self, of_each: Sequence[Sums], x: Array, labels: NDArray[np.int64]) -> BatchSums:
        """The sums of the step; on a device this is where the host waits for them, and for all that comes with them.

        Raises ``NotFiniteError`` for a loss that is not finite, where the ranks do not agree on that together.
        """
        if isinstance(self._finite, FetchedGradients):
            self.status.waits()
            measured = self._update.measure()
            fetched, self._of_tensors = fetch_step(self.memory, of_each, self._finite, measured)
            self._clock.fetched()
            self._progress.finish()
            self.status.computes(self.steps + 1)
        else:
            fetched = [sums.fetch() for sums in of_each]
        sums = step_sums(self._micro_batches, fetched, len(labels))
        if not self._finite.agrees:
            self._check_finite(sums.loss, x, labels)
        return sums

    def _check_finite(self, loss: float, x: Array, labels: NDArray[np.int64]) -> None:
        if math.isfinite(loss):
            return
        raise self._not_finite(f"the loss is {loss}", x, labels)

    def _check_reduced(self, loss: float, of_tensors: NDArray[np.float64], x: Array, labels: NDArray[np.int64]) -> None:
        """Notice another rank's NaN in this step, not by the parameters that it spoils.

        Adds ``of_tensors``, what the update must know of whole tensors, over the ranks where they have shards.
        """
        since = self._clock.moment() if self._finite.agrees else None
        finite = self._finite(loss, of_tensors)
        if self._finite.agrees:
            self._clock.computed(self.program.overhead, self._clock.paused(since, self._agreement_bytes))
        if finite:
            return
        self._check_finite(loss, x, labels)
        time.sleep(_WITNESS_FIRST_S)
        sent = f", sent as {self._compression.dtype}," if self._compression is not None else ""
        raise self._not_finite(
            f"the loss of this rank is finite, the sum of all ranks' gradients{sent} is not", x, labels
        )

    def _not_finite(self, what: str, x: Array, labels: NDArray[np.int64]) -> NotFiniteError:
        place = self.replica.first_nonfinite_layer(x, labels) if isinstance(self.replica, DiagnosticReplica) else None
        return NotFiniteError(
            f"{what} in step {self.steps + 1}; the first value that is not finite: {place or 'the loss'}",
            remedy="lower --learning-rate, or look at the data for values that are not finite",
        )
