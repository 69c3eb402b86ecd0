"""Workloads as profiles of scripts have them."""

from __future__ import annotations

from typing import Any

import msgspec

from dpsim.ddp_settings import DdpSettings
from dpsim.workload import Layer, Tensor, Workload


def four_layers(**changes: Any) -> Workload:
    """Four linear layers of 32 under DDP with its own bucket cap, profiled at a local batch of 4."""
    layers = tuple(
        Layer(
            name=f"{number}",
            kind="module",
            forward_s=(1e-4,),
            backward_s=(2e-4,),
            tensors=(Tensor(name=f"{number}.weight", shape=(32, 32)), Tensor(name=f"{number}.bias", shape=(32,))),
        )
        for number in range(4)
    )
    ddp = DdpSettings(torch="2.13.0", devices=2, bucket_cap_bytes=25 * 2**20)
    return msgspec.structs.replace(Workload(name="four", local_batches=(4,), layers=layers, ddp=ddp), **changes)
