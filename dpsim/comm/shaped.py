"""Shaped networks, seen from the ranks on their hosts: which links they have now, and whether they can have them."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from dpsim.comm.allreduce import prepare
from dpsim.comm.clock import now
from dpsim.comm.group import quiet_barrier
from dpsim.comm.mpi import MpiTransport
from dpsim.errors import ConfigError, DpsimError
from dpsim.launch.shaped import background_is, on_shaped_hosts
from dpsim.launch.shaped.links import (
    CEILING_BYTES,
    CEILING_SAMPLES,
    CEILING_WARM_UPS,
    carried_bytes_per_s,
    check_ceiling,
    not_its_hosts,
    shape,
)
from dpsim.machine import Network

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
    changed = _changed(network) if comm.rank == 0 else []
    quiet_barrier(comm)
    changed = comm.bcast(changed)
    if isinstance(changed, DpsimError):
        raise changed
    background_is(changed)
    _now[:] = [network.token]


def ceiling_bytes_per_s() -> float:
    """Return what a link of this job's hosts carried in each direction before it was shaped; 0 where none was."""
    return next(iter(_ceiling), 0.0)


def _changed(network: Network) -> list[int] | DpsimError:
    """Have the hosts joined by another network; the process of a flow beside, or why it cannot be. On rank 0."""
    try:
        check_ceiling(network, ceiling_bytes_per_s())
        return shape(network)
    except ConfigError as error:
        return error


def _unshaped(comm: MPI.Intracomm) -> float:
    """Return the bytes a second that each link carries in each direction where nothing shapes it. Collective."""
    link = MpiTransport(comm.Dup())
    link.nap_s = 0.0  # ranks that sleep would be timed, and not the links
    data = np.zeros(CEILING_BYTES // 4, np.float32)
    ring, taken_s = prepare(link, data, "ring"), []
    for _ in range(CEILING_WARM_UPS + CEILING_SAMPLES):
        comm.Barrier()
        start_s = now()
        ring.run()
        taken_s.append(comm.allreduce(now() - start_s, MPI.MAX))
    return carried_bytes_per_s(comm.size, taken_s)
