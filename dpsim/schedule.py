"""``Schedule``: what is to be done in a step, and what waits for what. The runtime executes it; the model prices it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsim.errors import ConfigError
from dpsim.plan import Plan
from dpsim.workload import Workload

COMPUTE, COLLECTIVE, SEND, RECEIVE, UPDATE = range(5)
PREPARE, FORWARD, LOSS, BACKWARD = range(4)
KINDS = (
    "step overhead",
    "forward",
    "loss",
    "backward",
    "update",
    "allreduce",
    "synchronise",
    "wait",
    "other",
    "reduce-scatter",
    "all-gather",
)
"""What an event of a Timeline is; operations' names begin so. ``wait`` is for communication that has not begun."""
(
    OVERHEAD_EVENT,
    FORWARD_EVENT,
    LOSS_EVENT,
    BACKWARD_EVENT,
    UPDATE_EVENT,
    ALLREDUCE_EVENT,
    SYNCHRONISE_EVENT,
    WAIT_EVENT,
    OTHER_EVENT,
    REDUCE_SCATTER_EVENT,
    ALL_GATHER_EVENT,
) = range(len(KINDS))
COMPUTE_LANE, COMMUNICATION_LANE = 0, 1
LANE_NAMES = ("compute", "communication")

Ints = NDArray[np.int64]
_COLUMNS = (
    "kind",
    "phase",
    "event_kind",
    "lane",
    "layer",
    "bucket",
    "micro_batch",
    "size_bytes",
    "rank_class",
    "group",
)


def event_kinds(kind: NDArray[np.int8], phase: NDArray[np.int8], bucket: NDArray[np.int32]) -> NDArray[np.int8]:
    """What operations are as events of a Timeline, as far as these columns tell: indices into ``KINDS``."""
    collective = np.where(bucket >= 0, ALLREDUCE_EVENT, SYNCHRONISE_EVENT)
    other = np.where(kind == COLLECTIVE, collective, np.where(kind == UPDATE, UPDATE_EVENT, OTHER_EVENT))
    return np.where(kind == COMPUTE, phase, other).astype(np.int8)


@dataclass(frozen=True, kw_only=True)
class RankClass:
    """Ranks that do the same operations: ``ranks`` is how many there are."""

    name: str
    ranks: int


@dataclass(frozen=True, kw_only=True)
class Group:
    """Devices that take part in a collective: how many, and how they lie on nodes (``dpsim.layout``; empty: flat)."""

    devices: int
    layout: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """One step as arrays with one entry an operation, so that it costs the same for 8 and for 100,000 devices.

    ``kind``, ``phase`` (of computations, else -1) and ``lane`` are codes of this module; ``event_kind`` follows from
    them (``event_kinds``), except that it tells a reduce-scatter and an all-gather from an allreduce. ``layer`` and
    ``bucket`` are indices or -1; ``micro_batch`` counts the micro-batches of the step; ``size_bytes`` is what a
    collective adds up or brings together. ``rank_class`` and ``group`` (-1: none) are indices into ``rank_classes`` and
    ``groups``.

    Operation i waits for the operations ``depends_on[depends_start[i]:depends_start[i + 1]]``, which all stand before
    it. Within a lane operations run in the order of the arrays: so the order of the collectives is the order in which
    they are sent, and who swaps two of them or adds a dependency changes both the run and its prediction. A collective
    that waits for a backward waits until its gradients are final (``gradient_ready_s``), not for its end.

    A collective with a bucket adds up gradients on the communication lane. One without a bucket is a sum that batch
    norm needs at once, and computation waits for it: with mode ``global`` one follows the forward and one the backward
    of each batch norm (``layer``); with ``leaf`` there is one of all statistics (``layer`` is -1), after the buckets.

    Where a schedule is ``sharded``, gradients are reduce-scattered, a rank updates its shard of every bucket
    (``dpsim.kernels.allreduce.shards``) and holds optimizer state for it alone, and behind the update an all-gather of
    each bucket's parameters brings the shards together. Before the update stands a sum without a layer in which the
    ranks agree that all numbers are finite.

    Bucket k holds the tensors ``tensor_order[bucket_start[k]:bucket_start[k + 1]]`` (forward indices of the workload's
    tensors, in the order in which backward makes them final); ``bucket_size_bytes[k]`` is its size without padding.
    Under the rule ``horovod`` buckets are decided while running: then ``dynamic`` is true, there are no collectives
    with a bucket, and every tensor is a bucket of its own until ``dpsim.lowering.fusion.HorovodCycle`` joins them.
    """

    workload: Workload
    plan: Plan
    kind: NDArray[np.int8]
    phase: NDArray[np.int8]
    event_kind: NDArray[np.int8]
    lane: NDArray[np.int8]
    layer: NDArray[np.int32]
    bucket: NDArray[np.int32]
    micro_batch: NDArray[np.int32]
    size_bytes: NDArray[np.int64]
    rank_class: NDArray[np.int8]
    group: NDArray[np.int8]
    depends_start: NDArray[np.int32]
    depends_on: NDArray[np.int32]
    tensor_order: NDArray[np.int64]
    bucket_start: NDArray[np.int64]
    bucket_size_bytes: NDArray[np.int64]
    rank_classes: tuple[RankClass, ...]
    groups: tuple[Group, ...]
    dynamic: bool = False
    sharded: bool = False

    @property
    def buckets(self) -> int:
        return len(self.bucket_size_bytes)

    @property
    def gradient_collectives(self) -> Ints:
        """The collectives that add up buckets of gradients, in the order in which they are sent."""
        adds_up = (self.event_kind == ALLREDUCE_EVENT) | (self.event_kind == REDUCE_SCATTER_EVENT)
        return np.flatnonzero((self.kind == COLLECTIVE) & adds_up)

    @property
    def parameter_collectives(self) -> Ints:
        """The collectives that bring buckets of parameters together, in the order in which they are sent."""
        return np.flatnonzero((self.kind == COLLECTIVE) & (self.event_kind == ALL_GATHER_EVENT))

    def dependencies(self, operation: int) -> NDArray[np.int32]:
        """The operations that one operation waits for."""
        return self.depends_on[self.depends_start[operation] : self.depends_start[operation + 1]]

    def bucket_tensors(self, bucket: int) -> tuple[str, ...]:
        """Names of a bucket's tensors, in the order in which backward makes them final."""
        tensors, (start, stop) = self.workload.tensors, self.bucket_start[bucket : bucket + 2]
        return tuple(tensors[i].name for i in self.tensor_order[start:stop])

    def operation_name(self, operation: int) -> str:
        """``backward dense2`` or ``allreduce 3``."""
        kind, layer = KINDS[self.event_kind[operation]], self.layer[operation]
        if layer >= 0:
            return f"{kind} {self.workload.layers[layer].name}"
        return f"{kind} {self.bucket[operation]}" if self.bucket[operation] >= 0 else kind

    def reordered(self, order: Sequence[int]) -> Schedule:
        """The same operations in another order: operation ``order[i]`` becomes operation i.

        Raises ``ConfigError`` where an operation would stand before one that it waits for.
        """
        rows = np.asarray(order, np.int64)
        if sorted(rows.tolist()) != list(range(len(self.kind))):
            raise ConfigError("an order that leaves operations out", allowed="every operation of the schedule once")
        place = np.empty(len(rows), np.int32)
        place[rows] = np.arange(len(rows), dtype=np.int32)
        return self._replaced(rows, [place[self.dependencies(int(row))] for row in rows])

    def delayed(self, operation: int, until: int) -> Schedule:
        """The same schedule, where ``operation`` also waits for the operation ``until``. Raises ``ConfigError``."""
        rows = np.arange(len(self.kind))
        dependencies = [self.dependencies(int(row)) for row in rows]
        dependencies[operation] = np.append(dependencies[operation], np.int32(until))
        return self._replaced(rows, dependencies)

    def swapped(self, first: int, second: int) -> Schedule:
        """The same schedule, where two operations stand in each other's place. Raises ``ConfigError``."""
        order = list(range(len(self.kind)))
        order[first], order[second] = second, first
        return self.reordered(order)

    def _replaced(self, rows: Ints, dependencies: Sequence[NDArray[np.int32]]) -> Schedule:
        """The operations ``rows`` with these dependencies (in the new numbers)."""
        for row, earlier in enumerate(dependencies):
            if len(earlier) and earlier.max() >= row:
                raise ConfigError(
                    f"operation {self.operation_name(int(rows[row]))!r} stands before an operation that it waits for",
                    allowed="dependencies on earlier operations",
                )
        changed = {name: getattr(self, name)[rows] for name in _COLUMNS}
        start = np.cumsum([0, *map(len, dependencies)]).astype(np.int32)
        joined = np.concatenate(dependencies) if len(dependencies) else np.empty(0, np.int32)
        return dataclasses.replace(self, depends_start=start, depends_on=joined.astype(np.int32), **changed)
