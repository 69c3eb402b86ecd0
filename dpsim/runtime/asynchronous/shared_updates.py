"""Asynchronous updates in memory that the workers of a node share: pull, push, the bound on staleness, and the record.

A cell has a lock and a version, and no process of its own: whoever has a gradient computes the cell's next version
under its lock. So nobody waits until another worker has computed a layer and answers, and a worker that dies takes
nothing with it. The kernel opens the locks of a process that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpsim.comm.clock import now
from dpsim.comm.shared import shared_memory
from dpsim.errors import ConfigError
from dpsim.launch.rank_process import independent
from dpsim.optimizer import AdamW, Sgd
from dpsim.replica import Array
from dpsim.runtime.asynchronous.cells import Cells
from dpsim.runtime.asynchronous.update_order import UpdateOrder
from dpsim.runtime.rank_status import Board
from dpsim.strategy import Asynchronous

if TYPE_CHECKING:
    from mpi4py import MPI

_NAP_S, _LOOK_S = 1e-4, 0.05
_ENDED = np.iinfo(np.int64).max
_LINE = 64


class SharedUpdates:
    """The cells of a strategy, as many as there are ranks in ``comm``, for so many ``updates``. Collective.

    All ranks are on one node. ``initial`` are the flat parameters before the first update. The version of a cell is the
    number of its changes. The next version is written next to the last one, which stays whole if its writer dies, and
    counts when all cells of its group have been written. One line on stderr says that a worker has died.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        initial: Array,
        strategy: Asynchronous,
        optimizer: Sgd | AdamW,
        updates: int,
    ) -> None:
        self.rank, self.workers, self._updates, self._strategy = comm.rank, comm.size, updates, strategy
        self._groups: list[tuple[int, ...]] = []
        self._board, self._looked_s = Board(comm), now()
        copies = strategy.copies(comm.size)
        sizes: dict[str, tuple[tuple[int, ...], Any]] = {
            "versions": ((comm.size,), np.int64),
            "clocks": ((comm.size,), np.int64),
            "gone": ((comm.size,), np.bool_),
            "next": ((1,), np.int64),
            "orders": ((comm.size, updates + 1), np.int32),
            "pulls": ((updates, comm.size), np.int32),
            "takers": ((updates,), np.int32),
            "losses": ((updates,), np.float64),
            "apart": ((updates,), np.float64),
            "ends": ((updates,), np.float64),
            "values": ((copies, 1 + len(optimizer.slots), 2, len(initial)), initial.dtype),
        }
        arrays = _shared_arrays(comm, sizes)
        self._versions, self._clocks, self._next = arrays["versions"], arrays["clocks"], arrays["next"]
        self._orders, self._pulls, self._takers = arrays["orders"], arrays["pulls"], arrays["takers"]
        self._gone, self.losses, self.apart, self.ends_s = (arrays[n] for n in ("gone", "losses", "apart", "ends"))
        self.cells = Cells(arrays["values"], comm.size, optimizer)
        self._locks = _lock_file(comm)
        if comm.rank == 0:
            self.cells.initialise(initial)
            for nothing in (self._orders, self._pulls, self._takers):
                nothing[...] = -1
        comm.Barrier()
        independent()

    def take(self) -> int | None:
        """Wait for the slowest worker where the bound says so, and return the number of the next update.

        ``None`` when all have been taken.
        """
        self._look()
        while self._clocks[self.rank] - self._clocks.min() > self._strategy.staleness:
            time.sleep(_NAP_S)
            self._look()
        with self._lock(self.workers):
            ticket = int(self._next[0])
            if ticket == self._updates:
                self._clocks[self.rank] = _ENDED
                return None
            self._next[0], self._takers[ticket] = ticket + 1, self.rank
        return ticket

    def pull(self, ticket: int, parameters: Array) -> None:
        """Copy the newest version of every cell that the update will add its gradient to."""
        gone = np.flatnonzero(self._gone).tolist()
        groups = self._strategy.groups(self.rank, self.workers, int(self._clocks[self.rank]), gone)
        self._groups = [(own, *sorted(others)) for own, *others in groups]  # the order in which a replay adds them
        for cell, *_ in self._groups:
            with self._lock(cell):
                self._pulls[ticket, cell] = version = self._version(cell)
                self.cells.pull(cell, version, parameters)

    def push(self, ticket: int, gradients: Array, loss: float, rate: float, scale: float) -> None:
        """Update what was pulled by a step at ``rate`` along ``scale`` * ``gradients``, and average it with others."""
        for group in self._groups:
            with self._lock(*sorted(group)):
                versions = [self._version(cell) for cell in group]
                made = self._clocks[self.rank] if self._strategy.copies(self.workers) > 1 else versions[0]
                self.apart[ticket] = self.cells.push(group, versions, int(made), gradients, rate, scale)
                for cell, version in zip(group, versions, strict=True):
                    self._orders[cell, version] = ticket
                self.losses[ticket], self.ends_s[ticket] = loss, now()  # from now on the new versions count
                for cell, version in zip(group, versions, strict=True):
                    self._versions[cell] = version + 1
        self._clocks[self.rank] += 1

    def _version(self, cell: int) -> int:
        """Return a cell's version, under its lock: a dead writer may not have counted one that counts."""
        version = int(self._versions[cell])
        ticket = self._orders[cell, version]
        if ticket >= 0 and self.ends_s[ticket] > 0:
            self._versions[cell] = version = version + 1
        return version

    def finish(self) -> bool:
        """Wait until no worker computes any more; whether this rank is the first of those that are alive."""
        while self._clocks.min() < _ENDED:
            self._look()
            time.sleep(_NAP_S)
        return self._alive()[0] == self.rank

    @property
    def order(self) -> UpdateOrder:
        """The order of all updates so far; when nobody pushes any more."""
        orders = tuple(tuple(order[: self._version(cell)].tolist()) for cell, order in enumerate(self._orders))
        return UpdateOrder(
            takers=tuple(self._takers.tolist()),
            pulls=tuple(map(tuple, self._pulls.tolist())),
            orders=orders,
            gone=tuple(np.flatnonzero(self._gone).tolist()),
        )

    def _alive(self) -> list[int]:
        return [entry.rank for entry in self._board.entries() if entry.state not in ("", "Z")]

    def _look(self) -> None:
        """Count the workers that have died as ended, so that nobody waits for them; not more often than ``_LOOK_S``."""
        if now() - self._looked_s < _LOOK_S:
            return
        self._looked_s = now()
        for entry in self._board.entries():
            if entry.state in ("", "Z") and self._clocks[entry.rank] < _ENDED:
                with self._lock(self.workers):
                    news = self._clocks[entry.rank] < _ENDED
                    self._gone[entry.rank], self._clocks[entry.rank] = True, _ENDED
                if news:
                    line = f"worker {entry.rank} (process {entry.pid}) is gone; the others go on without it"
                    print(f"dpsim: {line}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def _lock(self, *numbers: int) -> Iterator[None]:
        """Hold some locks, which are given in ascending order, so that no two workers wait for each other."""
        for number in numbers:
            fcntl.lockf(self._locks, fcntl.LOCK_EX, 1, number)
        try:
            yield
        finally:
            for number in numbers:
                fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, number)

    def close(self) -> None:
        os.close(self._locks)


def _shared_arrays(comm: MPI.Intracomm, sizes: dict[str, tuple[tuple[int, ...], Any]]) -> dict[str, NDArray[Any]]:
    """Allocate zeroed arrays of these shapes and dtypes that all ranks share. Raises ``ConfigError`` if impossible."""
    lengths = [int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in sizes.values()]
    starts = [0, *itertools.accumulate(-(-length // _LINE) * _LINE for length in lengths)]
    from mpi4py import MPI

    node = MPI.Intracomm(comm.Split_type(MPI.COMM_TYPE_SHARED))
    memory = shared_memory(comm, starts[-1], "dpsim-cells") if node.size == comm.size else None
    node.Free()
    if memory is None:
        raise ConfigError(
            "asynchronous training in memory that the ranks cannot share",
            allowed="the ranks of one node, with enough memory that they can share",
            remedy="use one node, fewer devices or a smaller model, or leave --strategy out",
        )
    return {
        name: np.frombuffer(memory, dtype, int(np.prod(shape)), start).reshape(shape)
        for (name, (shape, dtype)), start in zip(sizes.items(), starts, strict=False)
    }


def _lock_file(comm: MPI.Intracomm) -> int:
    """Return a descriptor of a file without a name that all ranks have open, so that each can lock bytes of it."""
    own = os.memfd_create("dpsim-locks") if comm.rank == 0 else -1
    path: str = comm.bcast(f"/proc/{os.getpid()}/fd/{own}")
    opened = own if comm.rank == 0 else os.open(path, os.O_RDWR)
    comm.Barrier()
    return opened
