"""dpsim as a system of the allreduce benchmark: its algorithms in memory that the ranks share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from dpsim.comm.allreduce import allreduce
from dpsim.comm.transport import Array, Transport, transport
from dpsim.harness.bench.turns import SCALE, SCALING, Reduction, serve
from dpsim.kernels.elementwise import scale
from dpsim.machine import Network


def serve_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Callable[[str], None]) -> None:
    """The task of ``launch.on_ranks``: take part until the benchmark ends."""
    serve(OwnContender(comm, argument), argument)


class OwnContender:
    """Every algorithm asked for, in place and (after a copy) out of place; the default one twice (A/A)."""

    library = "dpsim"

    def __init__(self, comm: MPI.Intracomm, argument: dict[str, Any]) -> None:
        self.rank: int = comm.rank
        self._algorithms: list[str] = argument["algorithms"]
        self._transport = transport(comm, Network())
        dtype, most = np.dtype(argument["dtype"]), argument["most"]
        self._window = self._transport.allocate(most * dtype.itemsize).view(dtype)
        self._source = np.zeros(most, dtype)

    def reductions(self, count: int) -> list[Reduction]:
        data, source = self._window[:count], self._source[:count]
        default = default_algorithm(self._transport, data)
        found = [Reduction(SCALING, data, data, functools.partial(scale, data, SCALE))]
        for algorithm in dict.fromkeys([*self._algorithms, default]):
            call = prepare(self._transport, data, algorithm)
            found.append(Reduction(algorithm, data, data, call))
            found.append(Reduction(algorithm, source, data, _out_of_place(source, data, call)))
        return [*found, Reduction(default, data, data, prepare(self._transport, data, default), repeat=1)]


def prepare(transport: Transport, data: Array, algorithm: str) -> Callable[[], object]:
    """An allreduce that is ready to be called."""
    return functools.partial(allreduce, transport, data, algorithm)


def default_algorithm(transport: Transport, data: Array) -> str:
    """What dpsim takes for this array when no algorithm is named."""
    return transport.network.usual_algorithm


def _out_of_place(source: Array, data: Array, call: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        data[...] = source
        call()

    return run
