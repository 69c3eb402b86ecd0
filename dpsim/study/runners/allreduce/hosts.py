"""dpsim and MPI as systems of the allreduce benchmark on shaped hosts, each in a job on hosts of its own."""

from __future__ import annotations

import functools
from typing import Any

from mpi4py import MPI

from dpsim.comm.allreduce import prepare
from dpsim.comm.mpi import MpiTransport
from dpsim.comm.shaped import enter
from dpsim.machine import Network
from dpsim.runtime.choosing import choose_selection
from dpsim.study.runners.allreduce.algorithms import BETWEEN_HOSTS
from dpsim.study.runners.allreduce.turns import HostRank, MpiRank, Variant


class OwnHostRank(HostRank):
    """Every requested algorithm in place; ``auto``, the default one, twice (A/A)."""

    def __init__(self, comm: MPI.Intracomm, argument: dict[str, Any]) -> None:
        network = Network.parse(argument["network"])
        enter(comm, network)
        selection = choose_selection(comm)
        self._transport = MpiTransport(comm.Dup(), selection=selection, network=network)
        self._algorithms = dict.fromkeys([*argument["algorithms"], BETWEEN_HOSTS])
        steps = [
            f"{name} below {size} B" for name, size in zip(selection.algorithms, selection.below_bytes, strict=False)
        ]
        super().__init__(comm.rank, f"auto is {', '.join([*steps, selection.algorithms[-1]])}", argument)

    def variants(self, count: int) -> list[Variant]:
        """Return the algorithms, then ``auto`` again."""
        data = self._arrays[0][:count]
        make = functools.partial(Variant, source=data, target=data)
        variants = [make(algorithm=name, call=prepare(self._transport, data, name).run) for name in self._algorithms]
        again = prepare(self._transport, data, BETWEEN_HOSTS).run
        return [*variants, make(algorithm=BETWEEN_HOSTS, call=again, repeat=1)]


class MpiHostRank(MpiRank):
    """MPI's own allreduce, with the thread level and the variables that the job's environment sets."""

    def __init__(self, comm: MPI.Intracomm, argument: dict[str, Any]) -> None:
        enter(comm, Network.parse(argument["network"]))
        self._mpi, self._comm, self.requests = MPI, comm, []
        level = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_MULTIPLE: "MULTIPLE"}.get(MPI.Query_thread(), "other")
        library = " ".join(MPI.Get_library_version().replace("\0", "").split("\n")[0].split())[:60]
        HostRank.__init__(self, comm.rank, f"{library}, THREAD_{level}", argument)

    def variants(self, count: int) -> list[Variant]:
        """Return those in place."""
        return [variant for variant in super().variants(count) if variant.in_place]

    def close(self) -> None:
        for request in self.requests:
            request.Free()
