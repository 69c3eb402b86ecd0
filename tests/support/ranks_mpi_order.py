"""Task of the tests of the order in which the MPI library's own allreduce adds."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from dpsim.comm.mpi_order import native_order
from dpsim.comm.networks import transport
from dpsim.comm.transport import wait
from dpsim.kernels.allreduce.tree import fold
from dpsim.machine import Network
from dpsim.progress import Progress

SIZES = (1, 2, 3, 7, 64, 400, 511, 512, 513, 1025, 5000, 20_001, 300_000, 2_000_000)
"""Elements on both sides of the sizes at which libraries change their algorithm."""


def native_sums(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[Any]:
    """Return the (dtype, elements, blocking) whose sum does not have the bits of the library's order."""
    link, order, wrong = transport(comm, Network()), native_order(comm.size), []
    assert order is not None
    for dtype in ("float32", "float64"):
        for elements in SIZES:
            drawn = [
                np.random.default_rng([rank, elements]).standard_normal(elements).astype(dtype)
                for rank in range(comm.size)
            ]
            expected = fold(order.expression, drawn.__getitem__, np.add)
            for blocking in (True, False):
                data = drawn[comm.rank].copy()
                if blocking:
                    link.native_allreduce(data)
                else:
                    wait(link, [link.start_native_allreduce(data)])
                if data.tobytes() != expected.tobytes():
                    wrong.append([dtype, elements, blocking])
    return [each for of_rank in comm.allgather(wrong) for each in of_rank]
