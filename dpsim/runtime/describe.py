"""A replica as a Workload whose times are zero: its layers, tensors and sizes."""

from __future__ import annotations

import msgspec
import numpy as np

from dpsim.replica import Capabilities, Replica
from dpsim.workload import Layer, Workload


def describe(replica: Replica, name: str) -> Workload:
    """Return the workload of a replica without times, which is enough for fusion rules that need no ready times."""
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
            column_block=spec.column_block,
        )
        for spec in replica.layers
    )
    state_bytes = int(sum(np.asarray(value).nbytes for value in replica.state().values()))
    return Workload(
        name=name, local_batches=(1,), layers=layers, state_bytes=state_bytes, source="described, times unknown"
    )


def with_work_bytes(workload: Workload, replica: Replica) -> Workload:
    """Return the workload of a replica with the bytes that it allocates for each layer; as it is if it knows none.

    What one and two samples take tells how the bytes grow. The last layer has the loss's too. Computes both steps.
    """
    sized = Capabilities.of(replica).sized
    if sized is None:
        return workload
    *one, loss_of_one = sized.layer_work_bytes((0, 1))
    *two, loss_of_two = sized.layer_work_bytes((0, 2))
    one[-1], two[-1] = one[-1] + loss_of_one, two[-1] + loss_of_two
    layers = tuple(
        msgspec.structs.replace(layer, work_bytes=2 * of_one - of_two, work_bytes_per_sample=of_two - of_one)
        for layer, of_one, of_two in zip(workload.layers, one, two, strict=True)
    )
    return msgspec.structs.replace(workload, layers=layers)
