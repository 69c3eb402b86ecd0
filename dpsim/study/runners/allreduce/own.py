"""dpsim as a system of the allreduce benchmark: its algorithms in memory that the ranks share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from dpsim.comm.allreduce import prepare
from dpsim.comm.clock import now
from dpsim.comm.mpi import MpiTransport
from dpsim.comm.transport import Array, SteppedAllreduce, pause
from dpsim.errors import AllreduceError
from dpsim.kernels.allreduce.registry import versions
from dpsim.kernels.elementwise import scaling
from dpsim.runtime.choosing import choose_selection
from dpsim.study.runners.allreduce.algorithms import MESSAGES, label, own_function
from dpsim.study.runners.allreduce.turns import SCALE, SCALING, HostRank, Variant
from dpsim.units import format_size
from dpsim.user_code import is_function

_LONGEST_S = 10.0


class OwnRank(HostRank):
    """Every requested algorithm, in place and (after a copy) out of place; the default one twice (A/A)."""

    def __init__(self, comm: MPI.Intracomm, argument: dict[str, Any]) -> None:
        self._algorithms: list[str] = argument["algorithms"]
        self._transport = MpiTransport(comm.Dup())
        self._selection = choose_selection(comm)
        dtype = np.dtype(argument["dtype"])
        window = self._transport.allocate(argument["count"] * dtype.itemsize).view(dtype)
        super().__init__(comm.rank, "dpsim", argument, window)

    def variants(self, count: int) -> list[Variant]:
        """Return in-place scaling first, then the algorithms, then the default one again."""
        data, source = (array[:count] for array in self._arrays)
        shared = self._transport.prepare(data, "two-shot", None) is not None
        default = self._selection.algorithm(data.nbytes) if shared else "mpi"
        variants = [Variant(algorithm=SCALING, source=data, target=data, call=scaling(data, SCALE))]
        for algorithm in dict.fromkeys([*self._algorithms, default]):
            if (call := self._prepared(data, algorithm)) is not None:
                after_copy, name = functools.partial(_out_of_place, source, data, call), label(algorithm)
                variants.append(Variant(algorithm=name, source=data, target=data, call=call))
                variants.append(Variant(algorithm=name, source=source, target=data, call=after_copy))
        if (again := self._prepared(data, default)) is not None:
            variants.append(Variant(algorithm=default, source=data, target=data, call=again, repeat=1))
        return variants

    def _prepared(self, data: Array, algorithm: str) -> Callable[[], object] | None:
        """Return the allreduce as a function without arguments.

        None for a kernel that does not take arrays of this size, and where the ranks share no memory.
        """
        if is_function(algorithm):
            return _OwnAllreduce(self._transport, data, algorithm).run
        kernel = next((version for version in versions("cpu") if version.name == algorithm), None)
        if kernel is None:
            return prepare(self._transport, data, algorithm.removesuffix(MESSAGES)).run
        if kernel.most_bytes is not None and data.nbytes > kernel.most_bytes:
            return None
        prepared = self._transport.kernel(data, algorithm)
        return None if prepared is None else prepared.run


class _OwnAllreduce(SteppedAllreduce):
    """A user's own allreduce. Ranks that wait for different messages would wait forever: the first run has an end."""

    def __init__(self, t: MpiTransport, data: Array, algorithm: str) -> None:
        super().__init__(t, functools.partial(own_function(algorithm), t, data))
        self._name, self._bytes, self._first = label(algorithm), data.nbytes, True

    def run(self) -> None:
        if not self._first:
            return super().run()
        self._first, end_s = False, now() + _LONGEST_S
        for number, pending in enumerate(self.start(), start=1):
            while not all([request.done() for request in pending]):
                pause(self._transport, pending)
                if now() > end_s:
                    raise AllreduceError(
                        f"{self._name} of {format_size(self._bytes)} has not ended after {_LONGEST_S:.0f} s: rank"
                        f" {self._transport.rank} of {self._transport.size} waits in its round {number}",
                        allowed="for every send one receive of as many elements, in the same order between two ranks",
                        remedy="compare what the function sends and receives; a right one stands in docs/extend.md",
                    )


def _out_of_place(source: Array, data: Array, call: Callable[[], object]) -> None:
    data[...] = source
    call()
