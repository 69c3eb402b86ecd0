"""Shaped networks, seen from the ranks on their hosts: which links they have now, and whether they can have them."""

from __future__ import annotations

import statistics

import numpy as np
from mpi4py import MPI

from dpsim.comm.allreduce import prepare
from dpsim.comm.clock import now
from dpsim.comm.group import quiet_barrier
from dpsim.comm.mpi import MpiTransport
from dpsim.errors import ConfigError, DpsimError
from dpsim.launch.shaped.links import not_its_hosts, on_shaped_hosts, shape
from dpsim.machine import Network
from dpsim.units import format_bandwidth

LEAST_CEILING = 3.0
"""A rate is emulated only where the hosts' links carry so many times as much when they are not shaped."""
_CEILING_BYTES, _CEILING_WARM_UPS, _CEILING_SAMPLES = 2**20, 5, 15
_now: list[str] = []
_ceiling: list[float] = []


def enter(comm: MPI.Intracomm, network: Network) -> None:
    """Wait for all ranks, asleep; afterwards their hosts are joined by this network. Collective over all of a job.

    The first time it measures what the links carry unshaped. Raises ``ConfigError`` for a rate that is more than a
    third of that. A network that is not shaped, such as that of a setting of one device, leaves the links as they are;
    a job of one rank has no links.
    """
    quiet_barrier(comm)
    if not network.shaped or comm.size == 1 or _now == [network.token]:
        return
    if not on_shaped_hosts():
        raise not_its_hosts(network)
    if not _ceiling:
        _ceiling.append(_unshaped(comm))
    error = _changed(network) if comm.rank == 0 else None
    quiet_barrier(comm)
    if (error := comm.bcast(error)) is not None:
        raise error
    _now[:] = [network.token]


def ceiling_bytes_per_s() -> float:
    """Return what a link of this job's hosts carried in each direction before it was shaped; 0 where none was."""
    return next(iter(_ceiling), 0.0)


def _changed(network: Network) -> DpsimError | None:
    """Have the hosts joined by another network; the error where that cannot be. On rank 0."""
    fastest, ceiling = max(network.rates_bytes_per_s()), ceiling_bytes_per_s()
    if fastest * LEAST_CEILING > ceiling:
        return ConfigError(
            f"the network {network.token}: unshaped, a link of these hosts carries {format_bandwidth(ceiling)}, "
            f"{ceiling / fastest:.2g} times the rate, so that the cores would be timed and not the links",
            allowed=f"rates up to a third of that, {format_bandwidth(ceiling / LEAST_CEILING)}",
            remedy=f"lower the rate or the {network.hosts} hosts; two hosts carry most",
        )
    try:
        shape(network)
    except ConfigError as error:
        return error
    return None


def _unshaped(comm: MPI.Intracomm) -> float:
    """Return the bytes a second that each link carries in each direction where nothing shapes it. Collective."""
    link = MpiTransport(comm.Dup())
    data = np.zeros(_CEILING_BYTES // 4, np.float32)
    ring, taken_s = prepare(link, data, "ring"), []
    for _ in range(_CEILING_WARM_UPS + _CEILING_SAMPLES):
        comm.Barrier()
        start_s = now()
        ring.run()
        taken_s.append(comm.allreduce(now() - start_s, MPI.MAX))
    sent = 2 * (comm.size - 1) / comm.size * data.nbytes
    return float(sent / statistics.median(taken_s[_CEILING_WARM_UPS:]))
