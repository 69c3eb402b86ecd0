"""Parameter servers in memory that the workers of a node share: pull, push, the bound on staleness, and the record.

A server is a shard of the parameters and of their optimizer state with a lock and a version, not a process: whoever
pushes a gradient computes the server's update under its lock. So nobody waits until another worker has computed a layer
and answers, and a worker that dies takes no parameters with it. The kernel opens the locks of a process that ends.
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
from dpsim.nn.optimizer import update
from dpsim.optimizer import AdamW, Sgd
from dpsim.replica import Array
from dpsim.runtime.rank_status import Board
from dpsim.runtime.update_order import UpdateOrder

if TYPE_CHECKING:
    from mpi4py import MPI

_NAP_S, _LOOK_S = 1e-4, 0.05
_ENDED = np.iinfo(np.int64).max
_LINE = 64


class ParameterServers:
    """As many shards as there are ranks in ``comm``, for so many ``updates``; collective, on one node.

    ``initial`` are the flat parameters before the first update. A version of a shard is the number of its updates. The
    next version is written beside the last one, which stays whole if its writer dies. ``staleness`` is the bound of
    stale synchronous parallel training (Ho et al. 2013): no worker begins an update while it has made more than so
    many updates more than the slowest one. One line on stderr says that a worker has died.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        initial: Array,
        optimizer: Sgd | AdamW,
        updates: int,
        staleness: int,
    ) -> None:
        self.rank, self.workers, self._updates, self._staleness = comm.rank, comm.size, updates, staleness
        self._optimizer = optimizer
        self._board = Board(comm)
        edges = [number * len(initial) // comm.size for number in range(comm.size + 1)]
        self.shards = tuple(itertools.starmap(slice, itertools.pairwise(edges)))
        sizes: dict[str, tuple[tuple[int, ...], Any]] = {
            "versions": ((comm.size,), np.int64),
            "clocks": ((comm.size,), np.int64),
            "next": ((1,), np.int64),
            "orders": ((comm.size, updates), np.int32),
            "pulls": ((updates, comm.size), np.int32),
            "takers": ((updates,), np.int32),
            "losses": ((updates,), np.float64),
            "ends": ((updates,), np.float64),
            "values": ((1 + len(optimizer.slots), 2, len(initial)), initial.dtype),
        }
        arrays = _shared_arrays(comm, sizes)
        self._versions, self._clocks, self._next = arrays["versions"], arrays["clocks"], arrays["next"]
        self._orders, self._pulls, self._takers = arrays["orders"], arrays["pulls"], arrays["takers"]
        self.losses, self.ends_s = arrays["losses"], arrays["ends"]
        self._values = arrays["values"]
        self._locks = _lock_file(comm)
        if comm.rank == 0:
            self._values[0, 0] = initial
            self._takers[...] = -1
        comm.Barrier()
        independent()

    def take(self) -> int | None:
        """Wait for the slowest worker where the bound says so, and return the number of the next update.

        ``None`` when all have been taken.
        """
        looked_s = now()
        while self._clocks[self.rank] - self._clocks.min() > self._staleness:
            time.sleep(_NAP_S)
            if now() - looked_s > _LOOK_S:
                self._look()
                looked_s = now()
        with self._lock(self.workers):
            ticket = int(self._next[0])
            if ticket == self._updates:
                self._clocks[self.rank] = _ENDED
                return None
            self._next[0], self._takers[ticket] = ticket + 1, self.rank
        return ticket

    def pull(self, ticket: int, parameters: Array) -> None:
        """Copy the newest version of every shard, the own one first."""
        for shard in self._in_turn():
            with self._lock(shard):
                version, part = int(self._versions[shard]), self.shards[shard]
                parameters[part] = self._values[0, version % 2, part]
                self._pulls[ticket, shard] = version

    def push(self, ticket: int, gradients: Array, loss: float, rate: float, scale: float) -> None:
        """Update every shard, the own one first, by a step at ``rate`` along ``scale`` * ``gradients``."""
        for shard in self._in_turn():
            with self._lock(shard):
                version, part = int(self._versions[shard]), self.shards[shard]
                advance(self._values[..., part], version, gradients[part], self._optimizer, rate, scale)
                self._orders[shard, version] = ticket
                self._versions[shard] = version + 1
        self.losses[ticket], self.ends_s[ticket] = loss, now()
        self._clocks[self.rank] += 1

    def finish(self) -> bool:
        """Wait until no worker computes any more; whether this rank is the first of those that are alive."""
        while self._clocks.min() < _ENDED:
            self._look()
            time.sleep(_NAP_S)
        return self._alive()[0] == self.rank

    @property
    def values(self) -> list[Array]:
        """The newest parameters, and those of each slot of the optimizer's state; when nobody pushes any more."""
        newest = np.empty_like(self._values[:, 0])
        for part, version in zip(self.shards, self._versions.tolist(), strict=True):
            newest[:, part] = self._values[:, version % 2, part]
        return list(newest)

    @property
    def order(self) -> UpdateOrder:
        """The order of all updates so far; when nobody pushes any more."""
        orders = tuple(
            tuple(order[:version].tolist())
            for order, version in zip(self._orders, self._versions.tolist(), strict=True)
        )
        pulls = tuple(map(tuple, self._pulls.tolist()))
        return UpdateOrder(takers=tuple(self._takers.tolist()), pulls=pulls, orders=orders)

    def _in_turn(self) -> Iterator[int]:
        return ((self.rank + number) % self.workers for number in range(self.workers))

    def _alive(self) -> list[int]:
        return [entry.rank for entry in self._board.entries() if entry.state not in ("", "Z")]

    def _look(self) -> None:
        """Count the workers that have died as ended, so that nobody waits for them."""
        for entry in self._board.entries():
            if entry.state in ("", "Z") and self._clocks[entry.rank] < _ENDED:
                with self._lock(self.workers):
                    news = self._clocks[entry.rank] < _ENDED
                    self._clocks[entry.rank] = _ENDED
                if news:
                    line = f"worker {entry.rank} (process {entry.pid}) is gone; the others go on without it"
                    print(f"dpsim: {line}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def _lock(self, number: int) -> Iterator[None]:
        fcntl.lockf(self._locks, fcntl.LOCK_EX, 1, number)
        try:
            yield
        finally:
            fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, number)

    def close(self) -> None:
        os.close(self._locks)


def advance(values: Array, version: int, gradients: Array, optimizer: Sgd | AdamW, rate: float, scale: float) -> None:
    """Write version ``version + 1`` of a shard beside its version ``version``.

    ``values`` [1 + slots, 2, elements]: the parameters and each slot, version v in row v % 2.
    """
    old, new = version % 2, (version + 1) % 2
    values[:, new] = values[:, old]
    state = dict(zip(optimizer.slots, values[1:, new], strict=True))
    update(values[0, new], gradients, state, optimizer, rate, scale, version + 1)


def _shared_arrays(comm: MPI.Intracomm, sizes: dict[str, tuple[tuple[int, ...], Any]]) -> dict[str, NDArray[Any]]:
    """Zeroed arrays of these shapes and dtypes that all ranks share. Raises ``ConfigError`` where they cannot."""
    lengths = [int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in sizes.values()]
    starts = [0, *itertools.accumulate(-(-length // _LINE) * _LINE for length in lengths)]
    from mpi4py import MPI

    node = MPI.Intracomm(comm.Split_type(MPI.COMM_TYPE_SHARED))
    memory = shared_memory(comm, starts[-1], "dpsim-servers") if node.size == comm.size else None
    node.Free()
    if memory is None:
        raise ConfigError(
            "parameter servers in memory that the ranks cannot share",
            allowed="the ranks of one node, with enough memory that they can share",
            remedy="use one node, fewer devices or a smaller model, or leave --strategy out",
        )
    return {
        name: np.frombuffer(memory, dtype, int(np.prod(shape)), start).reshape(shape)
        for (name, (shape, dtype)), start in zip(sizes.items(), starts, strict=False)
    }


def _lock_file(comm: MPI.Intracomm) -> int:
    """A descriptor of a file without a name that all ranks have open, so that each can lock bytes of it."""
    own = os.memfd_create("dpsim-locks") if comm.rank == 0 else -1
    path: str = comm.bcast(f"/proc/{os.getpid()}/fd/{own}")
    opened = own if comm.rank == 0 else os.open(path, os.O_RDWR)
    comm.Barrier()
    return opened
