"""A workload of a few equal layers, and a machine with a link and overlap by a thread, to price in tests."""

from __future__ import annotations

from typing import Any

from dpsim.machine import AllreduceCost, Link, Machine, OverlapCost
from dpsim.uncertainty import IntervalWidth
from dpsim.workload import Layer, Tensor, Workload


def workload(layers: int = 4, activations: float = 1000.0, **changes: Any) -> Workload:
    """Layers of 40 kB of parameters, 1 ms forward and 2 ms backward at 8 samples, 100 us of that whatever the batch."""
    fields: dict[str, Any] = {
        "name": "w",
        "local_batches": (1, 8),
        "layers": tuple(
            Layer(
                name=f"l{number}",
                forward_s=(2e-4, 1e-3),
                backward_s=(4e-4, 2e-3),
                tensors=(Tensor(name=f"w{number}", shape=(10_000,)),),
                activation_bytes_per_sample=activations,
                output_bytes_per_sample=500.0,
            )
            for number in range(layers)
        ),
        "update_s": 1e-3,
        "overhead_s": 1e-4,
        "relative_uncertainty": 0.01,
    }
    return Workload(**fields | changes)


def machine(latency_s: float = 1e-5, bandwidth: float = 1e9, **changes: Any) -> Machine:
    """A link, and overlap by a thread that takes a tenth of its time from computation."""
    sizes = (1000, 100_000)
    time_s = tuple(latency_s + size / bandwidth for size in sizes)
    beside = OverlapCost(
        algorithm="ring",
        devices=4,
        overlap="thread",
        sizes_bytes=sizes,
        time_s=time_s,
        compute_loss_s=tuple(time / 10 for time in time_s),
        relative_uncertainty=0.02,
        loss_relative_uncertainty=0.02,
    )
    fields: dict[str, Any] = {
        "name": "m",
        "allreduce": tuple(
            AllreduceCost(algorithm="ring", devices=n, sizes_bytes=sizes, time_s=time_s, relative_uncertainty=0.01)
            for n in (2, 4)
        ),
        "overlap": (beside,),
        "link": Link(latency_s=latency_s, bandwidth_bytes_per_s=bandwidth, relative_uncertainty=0.01),
        "relative_uncertainty": 0.01,
        "memory_bytes": 1e9,
        "interval_widths": (IntervalWidth(group="any", factor=1.0),),
    }
    return Machine(**fields | changes)
