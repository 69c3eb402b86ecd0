"""The order in which an MPI library's own allreduce adds, blocking or not: seen of the libraries listed here alone.

``tests/comm/test_mpi_order.py`` compares its bits with those of the order, on several numbers of ranks and from 4 bytes
to megabytes.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Mapping

from dpsim.kernels.allreduce.algorithms import PLAIN
from dpsim.kernels.allreduce.orders import Order, unit_orders

SEEN_ORDERS: Mapping[str, str] = {"mpich 5.0": "recursive-doubling"}
"""The algorithm of ``PLAIN`` in whose order a library adds, whatever the size, by its package and version."""
SEEN_RANKS = range(2, 9)
"""The numbers of ranks on which that was seen, on one machine."""


@functools.cache
def installed_library() -> str:
    """Return package and version of the MPI library in this Python, like ``mpich 5.0``; empty for any other library."""
    try:
        version = importlib.metadata.version("mpich")
    except importlib.metadata.PackageNotFoundError:
        return ""
    return f"mpich {'.'.join(version.split('.')[:2])}"


@functools.cache
def native_order(ranks: int) -> Order | None:
    """Return the order in which the installed library's allreduce adds; None where it was not seen."""
    algorithm = SEEN_ORDERS.get(installed_library())
    if algorithm is None or ranks not in SEEN_RANKS:
        return None
    (order,) = unit_orders([PLAIN[algorithm](ranks)])
    return order
