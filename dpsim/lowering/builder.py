"""``Builder``: operations and what they wait for, one after another, as the arrays of a Schedule."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsim.lowering.fusion import Buckets
from dpsim.plan import Plan
from dpsim.schedule import (
    ALL_GATHER_EVENT,
    ALLREDUCE_EVENT,
    REDUCE_SCATTER_EVENT,
    SYNCHRONISE_EVENT,
    UPDATE_EVENT,
    Ints,
    Schedule,
)
from dpsim.workload import Workload


@dataclass(frozen=True, kw_only=True, eq=False)
class Columns:
    """The arrays of some operations, named as those of ``Schedule``."""

    kind: NDArray[np.int8]
    layer: NDArray[np.int32]
    bucket: NDArray[np.int32]
    micro_batch: NDArray[np.int32]
    size_bytes: NDArray[np.int64]
    rank_class: NDArray[np.int8]
    peer: NDArray[np.int32]
    meeting: NDArray[np.int32]
    depends_start: NDArray[np.int32]
    depends_on: NDArray[np.int32]


class Builder:
    """A builder of operations in the order of the arrays of a Schedule; ``len`` is the number of the next one."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int, int, int, int, int]] = []
        self._meetings: dict[tuple[object, ...], int] = {}
        self._peers: list[int] = []
        self._depends: list[list[int]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(
        self,
        kind: int,
        after: Iterable[int] = (),
        *,
        layer: int = -1,
        bucket: int = -1,
        micro_batch: int = 0,
        size_bytes: int = 0,
        rank_class: int = 0,
        meeting: int = -1,
    ) -> int:
        """Append an operation that waits for those of ``after``; its number."""
        self._rows.append((kind, layer, bucket, micro_batch, size_bytes, rank_class, meeting))
        self._peers.append(-1)
        self._depends.append([*after])
        return len(self._rows) - 1

    def meeting(self, *what: object) -> int:
        """Return the number of a meeting of several classes; the same for whoever says the same."""
        return self._meetings.setdefault(what, len(self._meetings))

    def receive(self, kind: int, send: int, rank_class: int) -> int:
        """Append the receive of a send, as its peer; its number."""
        _, layer, _, micro_batch, size_bytes, _, _ = self._rows[send]
        number = self.add(
            kind, [send], layer=layer, micro_batch=micro_batch, size_bytes=size_bytes, rank_class=rank_class
        )
        self._peers[number], self._peers[send] = send, number
        return number

    def sum_bucket(
        self,
        buckets: Buckets,
        bucket: int,
        backwards: Iterable[int],
        plan: Plan,
        rank_class: int = 0,
        micro_batch: int | None = None,
        *,
        between_replicas: bool = False,
    ) -> int:
        """Append what adds up the gradients of a bucket, after the backwards of its tensors; its number.

        Without ``micro_batch`` it is the last one's. With ``between_replicas`` an allreduce of each shard follows,
        whose number it is then.
        """
        size_bytes = int(buckets.size_bytes[bucket])
        add = functools.partial(
            self.add,
            bucket=bucket,
            micro_batch=plan.accumulate - 1 if micro_batch is None else micro_batch,
            rank_class=rank_class,
        )
        kind = REDUCE_SCATTER_EVENT if plan.parallelism.sharded else ALLREDUCE_EVENT
        summed = add(kind, dict.fromkeys(backwards), size_bytes=size_bytes)
        if not between_replicas:
            return summed
        return add(ALLREDUCE_EVENT, [summed], size_bytes=-(-size_bytes // plan.shard_devices))

    def update(
        self,
        awaited: list[int],
        plan: Plan,
        *,
        statistics: int = 0,
        agreement: int = 0,
        meeting: int = -1,
        rank_class: int = 0,
    ) -> int:
        """Append the end of the step of a class, after ``awaited``; the number of its update.

        The sum of ``statistics`` bytes of batch norm's mode ``leaf``, the agreement of ``agreement`` bytes that all
        numbers are finite (0: none), of the classes that come to a ``meeting``, and the update after all of them.
        """
        add = functools.partial(self.add, micro_batch=plan.accumulate - 1, rank_class=rank_class)
        sums = []
        if statistics:
            sums.append(add(SYNCHRONISE_EVENT, awaited, size_bytes=statistics))
        if agreement:
            sums.append(add(SYNCHRONISE_EVENT, awaited, size_bytes=agreement, meeting=meeting))
        return add(UPDATE_EVENT, [*awaited, *sums])

    def gather(self, buckets: Buckets, bucket: int, after: int, micro_batch: int, rank_class: int = 0) -> int:
        """Append the all-gather of a bucket's parameters, after one operation; its number."""
        size_bytes = int(buckets.size_bytes[bucket])
        return self.add(
            ALL_GATHER_EVENT,
            [after],
            bucket=bucket,
            micro_batch=micro_batch,
            size_bytes=size_bytes,
            rank_class=rank_class,
        )

    def columns(self) -> Columns:
        """Return the arrays of all operations."""
        table = np.array(self._rows, np.int64).reshape(-1, 7).T
        kind, layer, bucket, micro_batch, size_bytes, rank_class, meeting = table
        return Columns(
            kind=kind.astype(np.int8),
            layer=layer.astype(np.int32),
            bucket=bucket.astype(np.int32),
            micro_batch=micro_batch.astype(np.int32),
            size_bytes=size_bytes.copy(),
            rank_class=rank_class.astype(np.int8),
            peer=np.array(self._peers, np.int32),
            meeting=meeting.astype(np.int32),
            depends_start=np.cumsum([0, *map(len, self._depends)]).astype(np.int32),
            depends_on=np.array(list(itertools.chain.from_iterable(self._depends)), np.int32),
        )

    def schedule(
        self,
        workload: Workload,
        plan: Plan,
        buckets: Buckets,
        *,
        bucket_class: list[int] | None = None,
        bucket_copies: list[int] | None = None,
        stashes: tuple[int, ...] = (1,),
        gradient_slots: int = 0,
        parameter_slots: int = 0,
        tensor_order: Ints | None = None,
    ) -> Schedule:
        """Return the Schedule of all operations, sharded where the strategy is.

        Without ``tensor_order`` buckets hold the tensors in the order in which backward makes them final.
        """
        return Schedule(
            workload=workload,
            plan=plan,
            **vars(self.columns()),
            tensor_order=workload.ready_order.tensor if tensor_order is None else tensor_order,
            bucket_start=buckets.start,
            bucket_size_bytes=buckets.size_bytes,
            bucket_class=np.array([0] * len(buckets.size_bytes) if bucket_class is None else bucket_class, np.int8),
            bucket_copies=np.array([1] * len(buckets.size_bytes) if bucket_copies is None else bucket_copies, np.int8),
            stashes=stashes,
            sharded=plan.parallelism.sharded and plan.data_devices > 1,
            gradient_slots=gradient_slots,
            parameter_slots=parameter_slots,
        )
