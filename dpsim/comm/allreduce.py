"""Allreduce in place: by messages, by kernels in shared memory or on GPUs, or by the MPI library.

``prepare`` decides once which of them reduces an array; the result runs again and again. dpsim's own algorithms are
lists of steps (``dpsim.kernels.allreduce.algorithms``), which ``message_steps`` turns into rounds of messages. A user's
own is a generator: it starts a round of messages, yields them, and goes on once they are done, whether the caller
waits, polls during a backward pass, or has a thread for it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dpsim.algorithms import ALGORITHMS
from dpsim.collective import CollectiveKind
from dpsim.comm.broadcast import prepare_broadcast
from dpsim.comm.compression import Compression
from dpsim.comm.message_steps import MessageAllreduce
from dpsim.comm.transport import Array, PersistentAllreduce, SteppedAllreduce, Transport
from dpsim.comm.transport import CollectiveSteps as CollectiveSteps
from dpsim.comm.transport import SummationOrder as SummationOrder
from dpsim.constraints import check
from dpsim.errors import AllreduceError
from dpsim.registry import load


def prepare(
    t: Transport,
    data: Array,
    algorithm: str,
    compression: Compression | None = None,
    order: SummationOrder | None = None,
    kind: CollectiveKind = "allreduce",
    replicas: int = 1,
) -> PersistentAllreduce:
    """Prepare the allreduce (sum) of a contiguous 1-D array, in place. Moves nothing.

    With an ``order`` several arrays a rank are added along the tree of their partial sums, into ``data``, by whatever
    algorithm; where ``mpi`` or ``recursive-doubling`` would add in another order, by the direct exchange. What the
    extra arrays hold afterwards is not defined.

    With a ``compression`` float32 numbers travel as its 16-bit codes; with an ``order`` too they are rounded to it
    already, and every sum of two is, by whatever algorithm. Raises ``ConfigError`` for an unknown algorithm, or one
    that cannot do that. Groups of one and empty arrays have no rounds. The first sum of a user's own algorithm is
    checked (``_CheckedAllreduce``).

    ``kind`` reduce-scatter leaves each rank with its shard of the sum (``dpsim.kernels.allreduce.shards``), and
    all-gather brings every rank's shard to all: by ``ring``, and by the direct exchange under any other algorithm. With
    several ``replicas`` the ranks are as many groups of neighbours, each of which does that for itself, and the
    allreduce adds up each shard over the groups: in an ``order`` in which the partial sums of each are one subtree.
    A broadcast is that of rank 0, by messages along a tree.
    """
    ALGORITHMS.find(algorithm)
    if t.size == 1 or data.size == 0:
        return SteppedAllreduce(t, _nothing)
    if kind == "broadcast":
        return prepare_broadcast(t, data, 0)
    if (own := t.prepare(data, algorithm, compression, order, kind, replicas)) is not None:
        return own
    if kind != "allreduce" or replicas > 1:
        arrays, sums = ([data, *order.extra], order.slots) if order is not None else ([data], None)
        return MessageAllreduce(t, arrays, algorithm, sums, kind=kind, replicas=replicas)
    if order is not None:
        return MessageAllreduce(t, [data, *order.extra], algorithm, order.slots, compression)
    algorithm = by_messages(algorithm, compressed=compression is not None)
    if compression is not None:
        check(algorithm=algorithm, wire_dtype=compression.dtype, leaves=0)
    if algorithm == "mpi":
        return _NativeAllreduce(t, data)
    steps = ALGORITHMS.find(algorithm).steps
    if steps is None:
        return MessageAllreduce(t, [data], algorithm, None, compression)
    return _CheckedAllreduce(t, data, algorithm, load(steps))


def by_messages(algorithm: str, *, compressed: bool) -> str:
    """Return what takes the place of an algorithm in shared memory where the ranks share none and measured nothing."""
    if ALGORITHMS.find(algorithm).place != "shared memory":
        return algorithm
    return "direct" if compressed else "mpi"


def allreduce(
    t: Transport,
    data: Array,
    algorithm: str,
    compression: Compression | None = None,
    order: SummationOrder | None = None,
) -> None:
    """Sum ``data`` over the ranks, in place, and return when it is done. Same bits on every rank.

    For an array that is reduced again and again, ``prepare`` once.
    """
    prepare(t, data, algorithm, compression, order).run()


class _NativeAllreduce:
    """The MPI library's own allreduce. Blocking, it is faster than the same as a request."""

    def __init__(self, t: Transport, data: Array) -> None:
        self._transport, self._data = t, data

    def run(self) -> None:
        self._transport.native_allreduce(self._data)

    def start(self) -> CollectiveSteps:
        yield [self._transport.start_native_allreduce(self._data)]


class _CheckedAllreduce(SteppedAllreduce):
    """The allreduce ``steps(transport, data)`` of a user, whose first run is compared with dpsim's direct exchange.

    That adds float64 copies. The tolerance is the rounding error of a sum of n values in any order: n eps sum(|x|).
    A first run that is wrong raises ``AllreduceError``.
    """

    def __init__(self, t: Transport, data: Array, algorithm: str, steps: Callable[..., CollectiveSteps]) -> None:
        super().__init__(t, self._begin)
        self._data, self._algorithm, self._steps = data, algorithm, steps
        self._checked = False

    def _begin(self) -> CollectiveSteps:
        if self._checked:
            return self._steps(self._transport, self._data)
        self._checked = True
        return self._check()

    def _check(self) -> CollectiveSteps:
        t, data = self._transport, self._data
        expected = np.concatenate([data, np.abs(data)]).astype(np.float64)
        yield from MessageAllreduce(t, [expected], "direct").start()
        yield from self._steps(t, data)
        sums, magnitudes = np.split(expected, 2)
        with np.errstate(invalid="ignore"):
            near = np.abs(data - sums) <= t.size * np.finfo(data.dtype).eps * magnitudes
        wrong = np.flatnonzero(~near & np.isfinite(magnitudes))  # others have failed where they were computed
        if wrong.size:
            first = wrong[0]
            raise AllreduceError(
                f"the allreduce {self._algorithm!r} gives a wrong sum on rank {t.rank} of {t.size}: element {first} is"
                f" {data[first]:.9g} instead of {sums[first]:.9g} ({wrong.size} of {data.size} elements are wrong)",
                allowed="the sum over the ranks, in place, on every rank",
                remedy="correct the function that the algorithm gives as steps; a right one stands in docs/extend.md",
            )


def _nothing() -> CollectiveSteps:
    yield from ()
