"""A replica as a Workload whose times are zero: its layers, tensors and sizes."""

from __future__ import annotations

import numpy as np

from dpsim.replica import Replica
from dpsim.workload import Layer, Workload


def describe(replica: Replica, name: str) -> Workload:
    """The workload of a replica without times, which is enough for fusion rules that need no ready times."""
    layers = tuple(
        Layer(
            name=spec.name,
            kind=spec.kind,
            forward_s=(0.0,),
            backward_s=(0.0,),
            tensors=spec.tensors,
            activation_bytes_per_sample=spec.activation_bytes_per_sample,
            batch_norm_channels=spec.batch_norm_channels,
            depends_on=spec.depends_on,
            output_bytes_per_sample=spec.output_bytes_per_sample,
        )
        for spec in replica.layers
    )
    state_bytes = int(sum(np.asarray(value).nbytes for value in replica.state().values()))
    return Workload(
        name=name, local_batches=(1,), layers=layers, state_bytes=state_bytes, source="described, times unknown"
    )
