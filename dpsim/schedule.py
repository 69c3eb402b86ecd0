"""``Schedule``: what is to be done in a step, and what waits for what. The runtime executes it; the model prices it."""

from __future__ import annotations

import functools
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
    "send",
    "receive",
    "recompute",
    "broadcast",
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
    SEND_EVENT,
    RECEIVE_EVENT,
    RECOMPUTE_EVENT,
    BROADCAST_EVENT,
) = range(len(KINDS))
COMPUTE_LANE, COMMUNICATION_LANE = 0, 1
LANE_NAMES = ("compute", "communication")

COLLECTIVES = (ALLREDUCE_EVENT, SYNCHRONISE_EVENT, REDUCE_SCATTER_EVENT, ALL_GATHER_EVENT, BROADCAST_EVENT)
_LANES = np.isin(np.arange(len(KINDS)), (*COLLECTIVES, RECEIVE_EVENT)).astype(np.int8)

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """One step as arrays with one entry an operation, so that it costs the same for 8 and for 100,000 devices.

    ``kind`` is an index into ``KINDS``. ``layer`` and ``bucket`` are indices or -1; ``micro_batch`` counts the
    micro-batches of the step; ``size_bytes`` is what a collective adds up or brings together, or what is sent.

    ``rank_class`` says whose operation it is. There are ``classes`` classes of as many ranks each
    (``dpsim.plan.Plan.class_of``): all ranks of a class do the same. A collective is one of the ranks of a class, but
    for a synchronisation with the number of a ``meeting``, which is one operation in each class that comes to it: one
    collective of all ranks, or with a ``layer`` one of each group of ranks that has one of each of these classes. A
    receive has the send that it belongs to as its ``peer``, which is an operation of another class, and a send its
    receive.

    Operation i waits for the operations ``depends_on[depends_start[i]:depends_start[i + 1]]``, which all stand before
    it. Operations of a class and lane run in the order of the arrays: so the order of the collectives is the order in
    which they are sent, and who swaps two of them or adds a dependency changes both the run and its prediction. A
    collective that waits for a backward waits until its gradients are final (``gradient_ready_s``), not for its end; an
    all-gather, which may take the place of parameters that backward still reads, waits for its end. A computation that
    waits for a collective waits for its end.

    A collective with a bucket adds up gradients, or brings parameters together, on the communication lane. A
    synchronisation is a sum that computation waits for: with batch norm's mode ``global`` one follows the forward and
    one the backward of each batch norm (``layer``); with ``leaf`` there is one of all statistics (``layer`` is -1),
    after the buckets; and where ranks hold different parts of the parameters there is one before the update, in which
    they agree that all numbers are finite.

    Bucket k holds the tensors ``tensor_order[bucket_start[k]:bucket_start[k + 1]]`` (forward indices of the workload's
    tensors, in the order in which backward makes them final); ``bucket_size_bytes[k]`` is its size without padding, and
    ``bucket_class[k]`` the first of the ``bucket_copies[k]`` neighbouring classes that have it. Under the rule
    ``horovod`` buckets are decided while running: then ``dynamic`` is true, there are no collectives with a bucket, and
    every tensor is a bucket of its own until ``dpsim.lowering.horovod.HorovodCycle`` joins them.

    Where a schedule is ``sharded``, gradients are reduce-scattered, and a rank updates its shard of every bucket
    (``dpsim.kernels.allreduce.shards``) and holds optimizer state for it alone; all-gathers of parameters bring the
    shards together, after the update or before they are needed. Where the plan has several replicas
    (``Plan.shard_devices``), gathers and reduce-scatters are those of each group of neighbours that share a copy, and
    the allreduce of a bucket behind its reduce-scatter adds up each shard over the groups.

    Where tensors have ``owners`` (the rank of each, by forward index), a rank updates its own tensors, has optimizer
    state for them alone, and broadcasts them after the update: those of rank 0 first, of each rank the largest first.

    ``gradient_slots`` and ``parameter_slots``: how many buckets of a class have memory at once, bucket k in slot k
    modulo that number, while a rank keeps its shard of each; 0 where all have memory of their own. ``stashes[c]`` is
    how many micro-batches class c keeps activations of at once.
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
    rank_class: NDArray[np.int8]
    peer: NDArray[np.int32]
    meeting: NDArray[np.int32]
    bucket_class: NDArray[np.int8]
    bucket_copies: NDArray[np.int8]
    stashes: tuple[int, ...] = (1,)
    dynamic: bool = False
    sharded: bool = False
    gradient_slots: int = 0
    parameter_slots: int = 0
    owners: tuple[int, ...] = ()

    @property
    def buckets(self) -> int:
        return len(self.bucket_size_bytes)

    @property
    def classes(self) -> int:
        """The number of rank classes."""
        return len(self.stashes)

    def class_of(self, rank: int) -> int:
        """The class of a rank."""
        return self.plan.class_of(rank) if self.classes > 1 else 0

    def buckets_of(self, rank_class: int) -> list[int]:
        """The buckets of a class."""
        since = rank_class - self.bucket_class
        own: list[int] = np.flatnonzero((since >= 0) & (since < self.bucket_copies)).tolist()
        return own

    @property
    def gathers_before_use(self) -> bool:
        """Whether parameters are brought together before they are needed, and not after their update."""
        of_class = self.rank_class == 0
        updates = np.flatnonzero(of_class & (self.kind == UPDATE_EVENT))
        gathers = np.flatnonzero(of_class & (self.kind == ALL_GATHER_EVENT))
        return len(gathers) > 0 and bool(gathers[0] < updates[0])

    @functools.cached_property
    def lane(self) -> NDArray[np.int8]:
        """``COMMUNICATION_LANE`` for a collective or a receive, else ``COMPUTE_LANE``, where a send takes no time."""
        return _LANES[self.kind]

    @functools.cached_property
    def gradient_collectives(self) -> Ints:
        """The collectives that add up buckets of gradients, in the order in which they are sent."""
        return np.flatnonzero(self.kind == (REDUCE_SCATTER_EVENT if self.sharded else ALLREDUCE_EVENT))

    @functools.cached_property
    def summed_bytes(self) -> Ints:
        """The bytes of each bucket as it is added up, above 0; those of its gradients where nothing is."""
        sums, sizes = self.gradient_collectives, self.bucket_size_bytes.copy()
        sizes[self.bucket[sums]] = self.size_bytes[sums]
        return sizes[sizes > 0]

    @property
    def parameter_collectives(self) -> Ints:
        """The collectives that bring buckets of parameters together, in the order in which they are sent."""
        return np.flatnonzero(self.kind == ALL_GATHER_EVENT)

    @property
    def broadcast_tensors(self) -> list[int]:
        """The forward index of the tensor of each broadcast, in the order in which they are sent."""
        tensors = self.workload.tensors
        return sorted(range(len(self.owners)), key=lambda index: (self.owners[index], -tensors[index].elements))

    @property
    def owned_bytes(self) -> list[int]:
        """The bytes of the parameters that each rank updates, where tensors have owners."""
        of_rank = [0] * self.plan.devices
        for owner, tensor in zip(self.owners, self.workload.tensors, strict=True):
            of_rank[owner] += tensor.size_bytes
        return of_rank

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
