"""The collectives of a step: each begins when the operations that it waits for are done, all end before the update."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Sequence

from dpsim.collective import CollectiveKind
from dpsim.comm.allreduce import SummationOrder
from dpsim.comm.broadcast import prepare_broadcast
from dpsim.comm.compression import Compression
from dpsim.comm.progress import BucketAllreduce, Progress, progress
from dpsim.comm.transport import Array, Transport
from dpsim.kernels.allreduce.tree import PartialSums
from dpsim.replica import LayerSpec, OrderedSum
from dpsim.runtime.arena import Arena
from dpsim.runtime.buckets import Message, bucket_policy
from dpsim.runtime.program import StepProgram
from dpsim.runtime.rank_status import RankStatus
from dpsim.runtime.step_clock import StepClock
from dpsim.schedule import ALL_GATHER_EVENT, ALLREDUCE_EVENT, BROADCAST_EVENT, REDUCE_SCATTER_EVENT, Schedule


class StepCollectives:
    """The collectives of one rank's buckets in an arena; on one device there is nothing to send.

    ``order`` is the fixed order of addition in training with leaves. What the host or the device waits for is recorded
    by ``clock`` and ``status``.
    """

    def __init__(
        self,
        schedule: Schedule,
        program: StepProgram,
        transport: Transport,
        control: Transport,
        arena: Arena,
        order: PartialSums,
        compression: Compression | None,
        clock: StepClock,
        status: RankStatus,
    ) -> None:
        plan = schedule.plan
        self._schedule, self._program, self._arena, self._order = schedule, program, arena, order
        self._transport, self._clock, self._status = transport, clock, status
        self._communicates, self._overlapped = plan.data_devices > 1, plan.overlap != "off"
        self._blocking, self._replicas = plan.overlap in ("off", "inline"), plan.replicas
        self._held: list[Message] = []
        self._submitted = 0
        self._under_way: deque[tuple[Message, BucketAllreduce]] = deque()
        self._prepared: dict[Message, BucketAllreduce] = {}
        self._progress: Progress = progress(transport, plan.algorithm, plan.overlap, self._finished, compression)
        self._policy = bucket_policy(schedule, program, control)

    @property
    def bucket(self) -> int:
        """The bucket under way, or -1; for another thread to ask."""
        return self._progress.bucket

    def warm_up(self) -> None:
        """Prepare every collective. Moves nothing."""
        for queued in self._program.queue:
            self._collective(Message.of(queued))
        for bucket in range(self._schedule.buckets if self._schedule.dynamic else 0):
            self._collective(Message(ALLREDUCE_EVENT, bucket, bucket + 1))

    def begin(self) -> None:
        """Begin a new step."""
        self._policy.begin()
        self._held, self._submitted = [], 0

    def released(self, positions: Sequence[int], operation: int) -> None:
        """Begin what may start now that ``operation``, for which these ``positions`` of the queue wait, is done."""
        complete = self._policy.ready(positions, operation)
        if not self._overlapped:
            self._held += complete
        elif complete:
            since = self._clock.timestamp() if self._blocking else None
            if self._blocking:
                self._status.waits()
            for message in complete:
                self._hand_in(message)
            if self._blocking:
                self._follow()
                self._status.computes()
                self._clock.paused(since)
        else:
            self._progress.poll()

    def need(self, count: int) -> float:
        """Return when the first ``count`` collectives of the queue have ended: what follows needs what they bring."""
        since = self._clock.timestamp()
        self._status.waits()
        while self._submitted < count:
            self._hand_in(self._held.pop(0))
        self._progress.finish_until(count)
        self._status.computes()
        end_s: float = self._clock.paused(since)
        return end_s

    def poll(self) -> None:
        """Move on what is under way during the computation; called when a layer is done."""
        if self._overlapped and self._communicates:
            self._progress.poll()

    def finish(self) -> None:
        """Wait until all gradients are added up; a device's computation waits, and not the host."""
        if not self._communicates:
            return
        since = self._clock.timestamp()
        self._status.waits()
        for message in itertools.chain(self._held, self._policy.rest()):
            self._hand_in(message)
        if self._arena.memory.deferred:
            self._follow()
        else:
            self._progress.finish()
        self._status.computes()
        self._clock.computed(self._program.overhead, self._clock.paused(since))

    def fetched(self) -> None:
        """End what is in a device's queue, for whose end the host has waited."""
        self._progress.finish()

    def gather_parameters(self) -> None:
        """Bring the parameters together that each rank has updated its shards of, in the order of the schedule."""
        gathers = self._policy.ready(self._program.releases[self._program.update], self._program.update)
        if not gathers:
            return
        since = self._clock.timestamp()
        self._status.waits()
        for message in gathers:
            self._hand_in(message)
        self._progress.finish()
        self._clock.marks.end_s = self._clock.paused(since)

    def sum_between_layers(self, layers: Sequence[LayerSpec], dtype: str, ordered_sum: OrderedSum) -> OrderedSum:
        """Return what batch norm adds over the ranks with: statistics in float64, sums of gradients in ``dtype``.

        It adds in the order of ``ordered_sum``, and is recorded as a pause of the computation.
        """
        mode, add = self._schedule.plan.batch_norm, None
        if mode != "local":
            values = [1 + 2 * layer.batch_norm_channels for layer in layers if layer.batch_norm_channels]
            most = {"float64": sum(values)} if mode == "leaf" else dict.fromkeys(("float64", dtype), max(values))
            add = self._transport.sums_between_layers(self._order, most)
        add = add or ordered_sum
        return functools.partial(self.paused_sum, add) if self._communicates else add

    def paused_sum(self, add: OrderedSum, arrays: Sequence[Array]) -> Array:
        """Return what ``add`` returns, whose time is recorded as a pause of the computation."""
        since = self._clock.timestamp()
        self._status.waits()
        total = add(arrays)
        self._status.computes()
        self._clock.paused(since, arrays[0].nbytes)
        return total

    def close(self) -> None:
        """End the communication thread, if there is one."""
        self._progress.close()

    def _finished(self, bucket: int, size_bytes: int, start_s: float, end_s: float) -> None:
        """Record a collective, which end in the order in which they were handed in; in the thread that saw its end."""
        message, collective = self._under_way.popleft()
        self._clock.reduced((message.kind, bucket, size_bytes), start_s, end_s, collective.span())
        if message.kind == (REDUCE_SCATTER_EVENT if self._replicas == 1 else ALLREDUCE_EVENT):
            self._arena.keep_gradients(bucket)

    def _follow(self) -> None:
        """Let a device's computation wait for the allreduces in its queue; the host waits for all others."""
        if (end := self._progress.enqueue()) is not None:
            self._arena.memory.follow(end)

    def _hand_in(self, message: Message) -> None:
        collective = self._collective(message)
        self._under_way.append((message, collective))
        self._submitted += 1
        self._progress.submit(message.first, collective)

    def _collective(self, message: Message) -> BucketAllreduce:
        """Return a collective of buckets, prepared once; sums with leaves are in a fixed order."""
        if message not in self._prepared:
            if message.kind == BROADCAST_EVENT:
                prepared = self._broadcast(message.tensor)
            else:
                prepared = self._gather(message.first) if message.kind == ALL_GATHER_EVENT else self._sum(message)
            self._prepared[message] = prepared
        return self._prepared[message]

    def _broadcast(self, tensor: int) -> BucketAllreduce:
        name = self._schedule.workload.tensors[tensor].name
        parameters = self._arena.parameter_views()[name].reshape(-1)
        steps = prepare_broadcast(self._transport, parameters, self._schedule.owners[tensor])
        return BucketAllreduce(steps, parameters.nbytes)

    def _gather(self, bucket: int) -> BucketAllreduce:
        arena = self._arena
        parameters = arena.bucket_parameters(bucket)
        gather = self._progress.prepare(parameters, kind="all-gather", replicas=self._replicas)

        def complete() -> None:
            arena.bring_parameters(bucket)
            gather.complete()

        return gather._replace(complete=complete)

    def _sum(self, message: Message) -> BucketAllreduce:
        buckets, order = message[1:3], None
        if self._schedule.plan.leaves:
            extra = range(1, len(self._arena.slots))
            order = SummationOrder(self._order, tuple(self._arena.buckets(*buckets, slot) for slot in extra))
        kind: CollectiveKind = "allreduce" if message.kind == ALLREDUCE_EVENT else "reduce-scatter"
        collective = self._progress.prepare(self._arena.buckets(*buckets), order, kind, self._replicas)
        if self._replicas == 1 or kind != "allreduce":
            return collective
        return collective._replace(size_bytes=-(-collective.size_bytes // self._schedule.plan.shard_devices))
