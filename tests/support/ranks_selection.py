"""Tasks of the tests of what ``auto`` takes, on ranks that behave as if each had a host of its own."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
from mpi4py import MPI

from dpsim import codec
from dpsim.comm import mpi
from dpsim.comm.allreduce import prepare
from dpsim.comm.message_steps import MessageAllreduce
from dpsim.comm.networks import transport
from dpsim.comm.selection import select
from dpsim.comm.transport import wait
from dpsim.machine import Network, Selection
from dpsim.progress import Progress

LENGTHS = (1, 3, 1000, 70_000)


def measured(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[dict[str, Any]]:
    """What each rank measured, the lengths at which ``auto`` is wrong then, and whether it is MPI's own by size."""
    with mock.patch.object(mpi, "on_shaped_hosts", lambda: True):
        selection = select(comm)
        link = transport(comm, Network(), selection=selection)
        wrong = [length for length in LENGTHS if not _right(comm, link, length)]
        made_up = Selection(
            devices=comm.size, algorithms=("recursive-doubling", "mpi", "ring"), below_bytes=(100, 10_000)
        )
        link = transport(comm, Network(), selection=made_up)
        sums = [prepare(link, np.zeros(length, np.float32), "auto") for length in (4, 400, 40_000)]
        native = [not isinstance(each, MessageAllreduce) for each in sums]
    return comm.allgather({"selection": codec.to_builtins(selection), "wrong": wrong, "native": native})


def _right(comm: MPI.Intracomm, link: Any, length: int) -> bool:
    """Whether three runs of one prepared sum are exact: the first sends anew, the others by persistent requests."""
    data = np.empty(length, np.float32)
    allreduce = prepare(link, data, "auto")
    right = True
    for run in range(3):
        data[:] = np.arange(length) % 7 + comm.rank + run
        if run < 2:
            allreduce.run()
        else:
            for pending in allreduce.start():
                wait(link, pending)
        expected = (np.arange(length) % 7 + run) * comm.size + sum(range(comm.size))
        right = right and np.array_equal(data, expected)
    return right
