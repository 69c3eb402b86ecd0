"""Training in leaves on devices: tried before it begins, since a device's libraries choose their own code."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from dpsim.data import Dataset
from dpsim.errors import ConfigError
from dpsim.plan import Plan
from dpsim.replica import Batch, DeviceReplica
from dpsim.runtime.micro_batches import own_leaves


def check_leaves(replica: DeviceReplica, dataset: Dataset, plan: Plan, comm: MPI.Intracomm) -> None:
    """Raise ``ConfigError`` unless every leaf of a rank has the same bits alone as amid the rank's others.

    It raises on every rank if any has a difference. Collective.
    """
    edges = own_leaves(plan, comm.rank, min(plan.global_batch, len(dataset.train_y)))
    x, labels = dataset.train_batch(np.arange(edges[0], edges[-1]))
    leaves = tuple(edge - edges[0] for edge in edges)
    place = replica.leaf_difference(Batch(x=x, labels=labels, leaves=leaves)) if len(labels) else None
    for rank, differs in enumerate(comm.allgather(place)):
        if differs is not None:
            raise ConfigError(
                f"{differs} has other bits for a leaf alone than amid others, on the device of rank {rank}",
                allowed="leaves that have the same bits on any number of devices",
                remedy="use --backend cpu, or leave --reproducible and --leaves out",
            )
