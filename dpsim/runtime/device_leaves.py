"""Training in leaves on devices: their libraries choose their own code, so they are given fixed settings, and what they
compute is tried before training begins.
"""

from __future__ import annotations

import os

import numpy as np
from mpi4py import MPI

from dpsim.comm.cuda.reducer import raise_on_all
from dpsim.comm.cuda.reproducible import fix_libraries, settings
from dpsim.comm.transport import Transport
from dpsim.data import Dataset
from dpsim.errors import ConfigError
from dpsim.plan import Plan
from dpsim.processor import LAYERS_VARIABLE, layers_by_kernels
from dpsim.replica import Batch, Capabilities, DeviceReplica
from dpsim.runtime.micro_batches import own_leaves


def check_leaves(replica: DeviceReplica, dataset: Dataset, plan: Plan, comm: MPI.Intracomm) -> None:
    """Raise ``ConfigError`` unless every leaf of a rank has the same bits alone as amid the rank's others.

    It raises on every rank if any has a difference. Collective.
    """
    Capabilities.of(replica).multiply_in(plan.compute_dtype)
    edges = own_leaves(plan, comm.rank, min(plan.global_batch, len(dataset.train_y)))
    x, labels = dataset.train_batch(np.arange(edges[0], edges[-1]))
    leaves = tuple(edge - edges[0] for edge in edges)
    difference = replica.leaf_difference(Batch(x=x, labels=labels, leaves=leaves)) if len(labels) else None
    for rank, differs in enumerate(comm.allgather(difference)):
        if differs is not None:
            raise ConfigError(
                f"{differs} has other bits for a leaf alone than amid others, on the device of rank {rank}",
                allowed="leaves that have the same bits on any number of devices",
                remedy="use --backend cpu, or leave --reproducible and leaves out",
            )


def fix_libraries_on_all(comm: MPI.Intracomm) -> None:
    """Give the libraries of every rank's device settings with which bits do not depend on the number of devices.

    Raises ``ConfigError`` on all ranks if one of them has other settings. Collective.
    """
    error = None
    of_first = comm.bcast(layers_by_kernels())
    try:
        fix_libraries()
        if layers_by_kernels() != of_first:
            own = os.environ.get(LAYERS_VARIABLE, "")
            raise ConfigError(
                f"{LAYERS_VARIABLE}={own}, which rank 0 has otherwise, in reproducible training on GPUs",
                allowed="the same on every rank, since it decides bits",
                remedy=f"set or unset {LAYERS_VARIABLE} for all ranks",
            )
    except ConfigError as refused:
        error = refused
    raise_on_all(comm, error)


def described(transport: Transport, comm: MPI.Intracomm) -> tuple[str, str]:
    """Return where ranks of backend cuda compute and reduce gradients, and what decides the bits. Collective."""
    from dpsim.comm.cuda.transport import CudaTransport  # loads CUDA

    assert isinstance(transport, CudaTransport)
    own = (transport.description, "; ".join(filter(None, (transport.device.libraries, settings()))))
    where, libraries = (" and ".join(sorted(set(texts))) for texts in zip(*comm.allgather(own), strict=True))
    return where, libraries
