"""Tasks that the tests of shaped networks run on ranks."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from typing import Any

import numpy as np
from mpi4py import MPI

from dpsim.comm.allreduce import prepare
from dpsim.comm.mpi import MpiTransport
from dpsim.comm.shaped import ceiling_bytes_per_s, enter
from dpsim.launch.shaped.switch import INTERFACE
from dpsim.network import Network
from dpsim.progress import Progress

_RATE = re.compile(r"qdisc tbf .* rate (\d+)([KMG]?)bit")


def about(comm: MPI.Intracomm, argument: dict[str, Any], progress: Progress) -> Any:
    """Return each rank's host and namespace, and the rate in Mbit/s that each host sends at on each network in turn."""
    host = (socket.gethostname(), os.readlink("/proc/self/ns/net"))
    rates = []
    for token in argument["networks"]:
        enter(comm, Network.parse(token))
        rates.append(comm.gather(_rate_mbit()))
    return {"hosts": comm.gather(host), "rates": rates, "ceiling": ceiling_bytes_per_s()}


def _rate_mbit() -> float:
    shown = subprocess.run(["tc", "qdisc", "show", "dev", INTERFACE], capture_output=True, text=True, check=True).stdout
    if (match := _RATE.search(shown)) is None:
        return 0.0
    return int(match[1]) * {"": 1e-6, "K": 1e-3, "M": 1.0, "G": 1e3}[match[2]]


def ring_s(comm: MPI.Intracomm, argument: dict[str, Any], progress: Progress) -> list[float]:
    """Return the least seconds that a ring allreduce of 1 MiB takes on each network in turn."""
    least = []
    for token in argument["networks"]:
        network = Network.parse(token)
        enter(comm, network)
        ring = prepare(MpiTransport(comm.Dup(), network=network), np.zeros(2**18, np.float32), "ring")
        taken_s = []
        for _ in range(argument["samples"]):
            comm.Barrier()
            start_s = time.perf_counter()
            ring.run()
            taken_s.append(comm.allreduce(time.perf_counter() - start_s, MPI.MAX))
        least.append(min(taken_s[1:]))
    return least


def enter_and_wait(comm: MPI.Intracomm, argument: dict[str, Any], progress: Progress) -> str:
    """Enter a network, say so, and wait; end with what rank 0 then says of its host."""
    enter(comm, Network.parse(argument["network"]))
    progress("entered")
    time.sleep(argument["seconds"])
    comm.Barrier()
    return socket.gethostname()
