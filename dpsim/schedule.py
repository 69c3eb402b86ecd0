"""``Schedule``: what is to be done in a step, and what waits for what. The runtime executes it; the model prices it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsim.plan import Plan
from dpsim.workload import Workload

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

COLLECTIVES = (ALLREDUCE_EVENT, SYNCHRONISE_EVENT, REDUCE_SCATTER_EVENT, ALL_GATHER_EVENT)
_LANES = np.isin(np.arange(len(KINDS)), COLLECTIVES).astype(np.int8)

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """One step as arrays with one entry an operation, so that it costs the same for 8 and for 100,000 devices.

    ``kind`` is an index into ``KINDS``. ``layer`` and ``bucket`` are indices or -1; ``micro_batch`` counts the
    micro-batches of the step; ``size_bytes`` is what a collective adds up or brings together.

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
    with a bucket, and every tensor is a bucket of its own until ``dpsim.lowering.horovod.HorovodCycle`` joins them.
    """

    workload: Workload
    plan: Plan
    kind: NDArray[np.int8]
    layer: NDArray[np.int32]
    bucket: NDArray[np.int32]
    micro_batch: NDArray[np.int32]
    size_bytes: NDArray[np.int64]
    depends_start: NDArray[np.int32]
    depends_on: NDArray[np.int32]
    tensor_order: NDArray[np.int64]
    bucket_start: NDArray[np.int64]
    bucket_size_bytes: NDArray[np.int64]
    dynamic: bool = False
    sharded: bool = False

    @property
    def buckets(self) -> int:
        return len(self.bucket_size_bytes)

    @property
    def lane(self) -> NDArray[np.int8]:
        """``COMMUNICATION_LANE`` for a collective, else ``COMPUTE_LANE``."""
        return _LANES[self.kind]

    @property
    def gradient_collectives(self) -> Ints:
        """The collectives that add up buckets of gradients, in the order in which they are sent."""
        return np.flatnonzero((self.kind == ALLREDUCE_EVENT) | (self.kind == REDUCE_SCATTER_EVENT))

    @property
    def parameter_collectives(self) -> Ints:
        """The collectives that bring buckets of parameters together, in the order in which they are sent."""
        return np.flatnonzero(self.kind == ALL_GATHER_EVENT)

    def dependencies(self, operation: int) -> NDArray[np.int32]:
        """The operations that one operation waits for."""
        return self.depends_on[self.depends_start[operation] : self.depends_start[operation + 1]]

    def bucket_tensors(self, bucket: int) -> tuple[str, ...]:
        """Names of a bucket's tensors, in the order in which backward makes them final."""
        tensors, (start, stop) = self.workload.tensors, self.bucket_start[bucket : bucket + 2]
        return tuple(tensors[i].name for i in self.tensor_order[start:stop])

    def operation_name(self, operation: int) -> str:
        """``backward dense2`` or ``allreduce 3``."""
        kind, layer = KINDS[self.kind[operation]], self.layer[operation]
        if layer >= 0:
            return f"{kind} {self.workload.layers[layer].name}"
        return f"{kind} {self.bucket[operation]}" if self.bucket[operation] >= 0 else kind
