"""Ranks that are threads of this process, in place of MPI's: the runtime trains on them as on those of a job.

No MPI library is initialised and no process is started. Messages are copied when they are sent. The MPI library's own
allreduce adds in the order in which it does so in a job (``dpsim.comm.mpi_order``).
"""

from __future__ import annotations

import functools
import pickle
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from queue import SimpleQueue
from typing import Any, Generic, Self, TypeVar

import mpi4py
import numpy as np

from dpsim.comm.mpi_order import SEEN_ORDERS, SEEN_RANKS, native_order
from dpsim.errors import ConfigError
from dpsim.kernels.allreduce.tree import fold

if "mpi4py.MPI" not in sys.modules:
    mpi4py.rc.initialize = False
from mpi4py import MPI

T = TypeVar("T")
_LOOK_S = 1e-3
"""How long a look at a message waits for it, so that other ranks can compute meanwhile."""


_GRACE_S = 2.0
"""How long the other ranks have to notice that one has failed."""


class RankFailed(Exception):
    """Another rank of the group raised an error, which is the one to report."""


class _Group:
    """What the ranks of a group share: their messages, and the values of each collective until all have taken them."""

    def __init__(self, size: int, job: _Job) -> None:
        self.size, self.job = size, job
        self.messages: dict[tuple[int, int, int], dict[int, bytes]] = defaultdict(dict)
        self.sent: dict[tuple[int, int, int], int] = defaultdict(int)
        self.received: dict[tuple[int, int, int], int] = defaultdict(int)
        self.values: dict[int, dict[int, Any]] = defaultdict(dict)
        self.taken: dict[int, int] = defaultdict(int)


class _Job:
    """The lock of all groups of a job, and whether one of its ranks has failed."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.failed = False

    def wait(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Return whether ``ready()``, waiting for it up to ``timeout_s``. The lock must be held."""
        self.changed.wait_for(lambda: self.failed or ready(), timeout_s)
        if self.failed:
            raise RankFailed
        return ready()


class _Request:
    """A message or a collective under way; ``finish`` is called once, when ``ready()``."""

    def __init__(self, job: _Job, ready: Callable[[], bool], finish: Callable[[], None]) -> None:
        self._job, self._ready, self._finish, self._done = job, ready, finish, False

    def Test(self) -> bool:
        with self._job.changed:
            if not self._done and self._job.wait(self._ready, _LOOK_S):
                self._finish()
                self._done = True
        return self._done


class LocalComm(MPI.Intracomm):
    """One rank's communicator of a group of threads: those methods of MPI's that dpsim's runtime calls."""

    _group: _Group
    _number: int
    _collectives: int

    @classmethod
    def of(cls, group: _Group, rank: int) -> Self:
        """Return the communicator of a rank."""
        comm = cls.__new__(cls)
        comm._group, comm._number, comm._collectives = group, rank, 0
        return comm

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    __hash__ = object.__hash__

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self._number

    @property
    def size(self) -> int:  # type: ignore[override]
        return self._group.size

    def _start(self, value: Any, finish: Callable[[list[Any]], None]) -> _Request:
        """Begin a collective that brings every rank the values of all."""
        group, number = self._group, self._collectives
        self._collectives += 1
        with group.job.changed:
            values = group.values[number]
            values[self._number] = value
            group.job.changed.notify_all()

        def end() -> None:
            group.taken[number] += 1
            if group.taken[number] == group.size:
                del group.values[number], group.taken[number]
            finish([values[rank] for rank in range(group.size)])

        return _Request(group.job, lambda: len(values) == group.size, end)

    def _exchange(self, value: Any) -> list[Any]:
        values: list[Any] = []
        request = self._start(value, values.extend)
        while not request.Test():
            pass
        return values

    def allgather(self, value: Any) -> list[Any]:
        return [pickle.loads(each) for each in self._exchange(pickle.dumps(value))]

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        values = self._exchange(pickle.dumps(value))
        return [pickle.loads(each) for each in values] if self._number == root else None

    def bcast(self, value: Any, root: int = 0) -> Any:
        return pickle.loads(self._exchange(pickle.dumps(value) if self._number == root else b"")[root])

    def Barrier(self) -> None:
        self._exchange(None)

    def Ibarrier(self) -> Any:
        return self._start(None, lambda values: None)

    def Split(self, color: int = 0, key: int = 0) -> Any:
        rows = self._exchange((color, key))
        ranks = sorted(
            (rank for rank, row in enumerate(rows) if row[0] == color), key=lambda rank: (rows[rank][1], rank)
        )
        own = _Group(len(ranks), self._group.job) if ranks[0] == self._number else None
        groups = self._exchange(own)
        return None if color == MPI.UNDEFINED else LocalComm.of(groups[ranks[0]], ranks.index(self._number))

    def Split_type(self, split_type: int, key: int = 0, info: Any = None) -> Any:
        return self.Split(0, key)

    def Dup(self, info: Any = None) -> Any:
        return self.Split(0, self._number)

    def Free(self) -> None:
        pass

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Any:
        group, pair = self._group, (self._number, dest, tag)
        with group.job.changed:
            group.messages[pair][group.sent[pair]] = np.ascontiguousarray(buf).tobytes()
            group.sent[pair] += 1
            group.job.changed.notify_all()
        return _Request(group.job, lambda: True, lambda: None)

    def Irecv(self, buf: Any, source: int = 0, tag: int = 0) -> Any:
        group, pair = self._group, (source, self._number, tag)
        with group.job.changed:
            arrived, number = group.messages[pair], group.received[pair]
            group.received[pair] += 1

        def take() -> None:
            buf[...] = np.frombuffer(arrived.pop(number), buf.dtype).reshape(buf.shape)

        return _Request(group.job, lambda: number in arrived, take)

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Any = None) -> None:
        self._add(recvbuf, self._exchange(recvbuf.copy()))

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Any = None) -> Any:
        return self._start(recvbuf.copy(), lambda values: self._add(recvbuf, values))

    def _add(self, target: Any, values: Sequence[Any]) -> None:
        order = native_order(self.size)
        if order is None:
            raise ConfigError(
                f"the order in which this MPI library's own allreduce adds on {self.size} ranks",
                allowed=f"{', '.join(SEEN_ORDERS)} on {SEEN_RANKS.start} to {SEEN_RANKS.stop - 1}",
                remedy="choose another --algorithm, or train with dpsim reproduce",
            )
        target[...] = fold(order.expression, values.__getitem__, np.add)


class LocalRanks(Generic[T]):
    """Ranks that are threads of this process. Each runs ``task(communicator)`` from one ``yield`` to the next."""

    def __init__(self, ranks: int, task: Callable[[LocalComm], Generator[T]]) -> None:
        self._job = _Job()
        group = _Group(ranks, self._job)
        self._tasks = [task(LocalComm.of(group, rank)) for rank in range(ranks)]
        self._calls: list[SimpleQueue[_Call | None]] = [SimpleQueue() for _ in range(ranks)]
        for rank, calls in enumerate(self._calls):  # daemons: one that waits for a failed rank ends with the process
            threading.Thread(target=_serve, args=(calls,), name=f"dpsim-rank-{rank}", daemon=True).start()

    def advance(self) -> T:
        """Return what rank 0 yields next; all ranks go on to theirs. Raises the first rank's own error."""
        results = self._run([functools.partial(self._next, task) for task in self._tasks])
        errors = [error for each in results if each.done() and (error := each.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, RankFailed)), errors[0])
        value: T = results[0].result()
        return value

    def _run(self, functions: Sequence[Callable[[], object]]) -> list[Future[Any]]:
        """Call one function on each rank's thread, and wait for all; where one fails for the others a moment alone."""
        results: list[Future[Any]] = [Future() for _ in functions]
        for calls, function, result in zip(self._calls, functions, results, strict=True):
            calls.put((function, result))
        if not self._job.failed:
            wait(results, return_when=FIRST_EXCEPTION)
        wait(results, timeout=_GRACE_S if self._job.failed else None)
        return results

    def _next(self, task: Iterator[T]) -> T:
        try:
            return next(task)
        except BaseException:
            with self._job.changed:
                self._job.failed = True
                self._job.changed.notify_all()
            raise

    def close(self) -> None:
        """End the tasks where they are, and their threads."""
        self._run([task.close for task in self._tasks])
        for calls in self._calls:
            calls.put(None)


_Call = tuple[Callable[[], object], "Future[Any]"]


def _serve(calls: SimpleQueue[_Call | None]) -> None:
    """Call what is asked for, one after another, until nothing more is."""
    while (call := calls.get()) is not None:
        function, result = call
        try:
            result.set_result(function())
        except BaseException as error:  # handed to the thread that asked, which raises it
            result.set_exception(error)
