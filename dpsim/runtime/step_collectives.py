"""The collectives of a step: each begins when the operations that it waits for are done, all end before the update."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from dpsim.collective import CollectiveKind
from dpsim.comm.allreduce import SummationOrder
from dpsim.comm.compression import Compression
from dpsim.comm.progress import BucketAllreduce, Progress, progress
from dpsim.comm.transport import Array, Transport
from dpsim.kernels.allreduce.tree import PartialSums
from dpsim.replica import LayerSpec, OrderedSum
from dpsim.runtime.arena import Arena
from dpsim.runtime.buckets import Run, bucket_policy
from dpsim.runtime.program import StepProgram
from dpsim.runtime.rank_status import RankStatus
from dpsim.runtime.step_clock import StepClock
from dpsim.schedule import ALL_GATHER_EVENT, Schedule


class StepCollectives:
    """Sends the buckets of an arena, of one rank; on one device there is nothing to send.

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
        self._communicates, self._overlapped = plan.devices > 1, plan.overlap != "off"
        self._blocking = plan.overlap in ("off", "inline")
        self._sending = program.adds_up
        self._held: list[Run] = []
        self._handed_in: dict[int, BucketAllreduce] = {}
        self._allreduces: dict[Run, BucketAllreduce] = {}
        self._progress: Progress = progress(transport, plan.algorithm, plan.overlap, self._finished, compression)
        self._policy = bucket_policy(schedule, program, control)
        self._gathers = [
            (bucket, self._progress.prepare(arena.bucket_parameters(bucket), kind="all-gather"))
            for bucket in program.gathers
        ]

    @property
    def bucket(self) -> int:
        """The bucket under way, or -1; for another thread to ask."""
        return self._progress.bucket

    def warm_up(self) -> None:
        """Prepare the allreduce of every bucket. Moves nothing."""
        for bucket in range(self._schedule.buckets if self._communicates else 0):
            self._allreduce(bucket, bucket + 1)

    def begin(self) -> None:
        """Begin a new step."""
        self._policy.begin()
        self._held = []

    def released(self, operation: int) -> None:
        """Begin the messages that may start now that an operation is done."""
        complete = self._policy.ready(operation)
        if not self._overlapped:
            self._held += complete
        elif complete:
            since = self._clock.timestamp() if self._blocking else None
            if self._blocking:
                self._status.waits()
            for first, stop in complete:
                self._hand_in(first, self._allreduce(first, stop))
            if self._blocking:
                self._follow()
                self._status.computes()
                self._clock.paused(since)
        else:
            self._progress.poll()

    def poll(self) -> None:
        """Move on what is under way beside the computation; called when a layer is done."""
        if self._overlapped and self._communicates:
            self._progress.poll()

    def finish(self) -> None:
        """Wait until all gradients are added up; a device's computation waits, and not the host."""
        if not self._communicates:
            return
        since = self._clock.timestamp()
        self._status.waits()
        for first, stop in itertools.chain(self._held, self._policy.rest()):
            self._hand_in(first, self._allreduce(first, stop))
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
        if not self._gathers:
            return
        since = self._clock.timestamp()
        self._status.waits()
        self._sending = ALL_GATHER_EVENT
        for bucket, gather in self._gathers:
            self._hand_in(bucket, gather)
        self._progress.finish()
        self._sending = self._program.adds_up
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
        return functools.partial(self._paused_sum, add or ordered_sum)

    def _paused_sum(self, add: OrderedSum, arrays: Sequence[Array]) -> Array:
        if not self._communicates:
            return add(arrays)
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
        self._clock.reduced((self._sending, bucket, size_bytes), start_s, end_s, self._handed_in[bucket].span())

    def _follow(self) -> None:
        """Let a device's computation wait for the allreduces in its queue; the host waits for all others."""
        if (end := self._progress.enqueue()) is not None:
            self._arena.memory.follow(end)

    def _hand_in(self, bucket: int, collective: BucketAllreduce) -> None:
        self._handed_in[bucket] = collective
        self._progress.submit(bucket, collective)

    def _allreduce(self, first: int, stop: int) -> BucketAllreduce:
        """Return the collective of buckets ``first`` to ``stop - 1``, prepared once; with leaves in a fixed order."""
        run = (first, stop)
        if run not in self._allreduces:
            order = None
            if self._schedule.plan.leaves:
                extra = range(1, len(self._arena.slots))
                order = SummationOrder(self._order, tuple(self._arena.buckets(*run, slot) for slot in extra))
            kind: CollectiveKind = "reduce-scatter" if self._schedule.sharded else "allreduce"
            self._allreduces[run] = self._progress.prepare(self._arena.buckets(*run), order, kind)
        return self._allreduces[run]
