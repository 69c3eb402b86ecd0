"""dpsim as a system of the allreduce benchmark: its algorithms in memory that the ranks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from dpsim.comm.allreduce import prepare
from dpsim.comm.mpi import MpiTransport
from dpsim.comm.transport import Array
from dpsim.harness.bench.turns import SCALE, SCALING, Reduction, serve
from dpsim.kernels.allreduce.registry import versions
from dpsim.kernels.elementwise import scaling
from dpsim.machine import Selection
from dpsim.records.bench import MESSAGES
from dpsim.runtime.choosing import choose_selection


def serve_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Callable[[str], None]) -> None:
    """The task of ``launch.on_ranks``: take part until the benchmark ends."""
    serve(OwnContender(comm, argument), argument)


class OwnContender:
    """Every algorithm asked for, in place and (after a copy) out of place; the default one twice (A/A)."""

    library = "dpsim"

    def __init__(self, comm: MPI.Intracomm, argument: dict[str, Any]) -> None:
        self.rank: int = comm.rank
        self._algorithms: list[str] = argument["algorithms"]
        self._transport = MpiTransport(comm.Dup())
        self._selection = choose_selection(comm).selection(comm.size) or Selection.usual(comm.size)
        dtype, most = np.dtype(argument["dtype"]), argument["most"]
        self._window = self._transport.allocate(most * dtype.itemsize).view(dtype)
        self._source = np.zeros(most, dtype)

    def reductions(self, count: int) -> list[Reduction]:
        data, source = self._window[:count], self._source[:count]
        default = self.default(data)
        found = [Reduction(SCALING, data, data, scaling(data, SCALE))]
        for algorithm in dict.fromkeys([*self._algorithms, default]):
            call = self.call(data, algorithm)
            if call is not None:
                found.append(Reduction(algorithm, data, data, call))
                found.append(Reduction(algorithm, source, data, _out_of_place(source, data, call)))
        again = self.call(data, default)
        return [*found, Reduction(default, data, data, again, repeat=1)] if again else found

    def default(self, data: Array) -> str:
        """What training takes for this array where no algorithm is named: as measured on this type of processor."""
        shared = self._transport.prepare(data, "two-shot", None) is not None
        return self._selection.algorithm(data.nbytes) if shared else "mpi"

    def call(self, data: Array, algorithm: str) -> Callable[[], object] | None:
        """An allreduce ready to be called; None for a kernel that takes no array of this size, or without memory."""
        kernel = next((version for version in versions("cpu") if version.name == algorithm), None)
        if kernel is None:
            name = algorithm.removesuffix(MESSAGES)
            return prepare(self._transport, data, name).run
        if kernel.most_bytes is not None and data.nbytes > kernel.most_bytes:
            return None
        prepared = self._transport.kernel(data, algorithm)
        return None if prepared is None else prepared.run


def _out_of_place(source: Array, data: Array, call: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        data[...] = source
        call()

    return run
