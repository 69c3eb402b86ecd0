"""``Schedule``: what has to be done. The runtime executes it and the model prices it.

Data parallelism has one rank class: every rank does the same operations. Operations stand in arrays, so a
schedule costs the same for 8 and for 100,000 devices. Within a lane operations run in array order; across
lanes an operation waits for the one operation that ``after`` names (-1: none).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsim.plan import Plan
from dpsim.workload import Workload

FORWARD, BACKWARD, ALLREDUCE, UPDATE, SYNCHRONISE = 0, 1, 2, 3, 4
KIND_NAMES = ("forward", "backward", "allreduce", "update", "synchronise")
COMPUTE, COMMUNICATION = 0, 1
LANE_NAMES = ("compute", "communication")


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """One step of a data-parallel run, as arrays with one entry an operation.

    ``kind`` and ``lane`` are codes of this module; ``layer`` and ``bucket`` are indices or -1;
    ``micro_batch`` counts the accumulation passes; ``size_bytes`` is a collective's size. An allreduce's
    ``after`` is the backward operation of the last micro-batch that makes its bucket's last gradient
    final: it may start at that layer's ``gradient_ready_s``. The update's ``after`` is the last allreduce.

    A synchronisation is a sum over the devices that batch norm needs at once: the compute lane waits for it. With mode
    ``global`` one follows the forward and one the backward of each batch norm (``layer``); with ``leaf`` one, of the
    statistics of all of them (``layer`` is -1), comes when all allreduces have ended.

    Bucket k holds the tensors ``tensor_order[bucket_start[k]:bucket_start[k + 1]]`` (forward indices of
    the workload's tensors, in the order backward makes them final); ``bucket_size_bytes[k]`` is its size
    without padding. Under the rule ``horovod`` buckets are decided while running: then ``dynamic`` is
    true, there is no allreduce operation, and every tensor is a bucket of its own until the policy
    (``dpsim.lowering.fusion.HorovodCycle``) joins them.
    """

    workload: Workload
    plan: Plan
    kind: NDArray[np.int8]
    lane: NDArray[np.int8]
    layer: NDArray[np.int32]
    bucket: NDArray[np.int32]
    micro_batch: NDArray[np.int32]
    size_bytes: NDArray[np.int64]
    after: NDArray[np.int32]
    tensor_order: NDArray[np.int64]
    bucket_start: NDArray[np.int64]
    bucket_size_bytes: NDArray[np.int64]
    dynamic: bool = False

    @property
    def buckets(self) -> int:
        return len(self.bucket_size_bytes)

    def bucket_tensors(self, bucket: int) -> tuple[str, ...]:
        """Names of a bucket's tensors, in the order backward makes them final."""
        tensors, (start, stop) = self.workload.tensors, self.bucket_start[bucket : bucket + 2]
        return tuple(tensors[i].name for i in self.tensor_order[start:stop])

    def operation_name(self, index: int) -> str:
        """``backward dense2`` or ``allreduce 3``."""
        kind = KIND_NAMES[self.kind[index]]
        if self.layer[index] >= 0:
            return f"{kind} {self.workload.layers[self.layer[index]].name}"
        return f"{kind} {self.bucket[index]}" if self.bucket[index] >= 0 else kind
