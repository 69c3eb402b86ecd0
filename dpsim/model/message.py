"""A workload that computes nothing: one message, so that a collective alone is priced as a step is."""

from __future__ import annotations

import math

from dpsim.workload import Layer, Tensor, Workload


def message(size_bytes: int) -> Workload:
    """Return a workload that computes nothing and has one gradient tensor of so many bytes, or one more of odd ones."""
    tensor = Tensor(name="message", shape=(size_bytes // 4,))
    if size_bytes % 4:
        tensor = Tensor(name="message", shape=(math.ceil(size_bytes / 2),), dtype="float16")
    layer = Layer(name="message", forward_s=(0.0,), backward_s=(0.0,), tensors=(tensor,))
    return Workload(name="an allreduce alone", local_batches=(1,), layers=(layer,))
