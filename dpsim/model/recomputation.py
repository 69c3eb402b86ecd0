"""A script with activation checkpointing, or without it, where it was profiled the other way."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from dpsim.errors import ConfigError, unknown
from dpsim.workload import Layer, Workload

Recompute = Literal["none", "all"]
RECOMPUTE: tuple[str, ...] = get_args(Recompute)


def recomputing(workload: Workload, recompute: str) -> Workload:
    """Return a workload whose backward computes the activations of ``all`` blocks again, or of ``none``.

    backward_s -+ recompute_s of each layer, with the activations of that choice. A script that recomputes is taken to
    do so in all blocks. Raises ``ConfigError`` where the profile does not know.
    """
    if recompute not in RECOMPUTE:
        raise unknown("recompute", recompute, RECOMPUTE)
    recomputes = workload.ddp is not None and workload.ddp.recomputes
    if recomputes == (recompute == "all"):
        return workload
    if workload.ddp is None or not any(layer.recompute_s for layer in workload.layers):
        raise ConfigError(
            f"recompute={recompute} for {workload.name}, whose profile knows no blocks that could be computed again",
            allowed="a script that was profiled on a processor, with a Sequential or ModuleList of blocks",
            remedy="profile it again with dpsim profile --torch-script",
        )
    sign = -1 if recomputes else 1

    def otherwise(layer: Layer) -> Layer:
        seconds = layer.recompute_s or (0.0,) * len(layer.backward_s)
        return msgspec.structs.replace(
            layer,
            backward_s=tuple(max(a + sign * b, 0.0) for a, b in zip(layer.backward_s, seconds, strict=True)),
            activation_bytes_per_sample=layer.other_activation_bytes_per_sample,
            other_activation_bytes_per_sample=layer.activation_bytes_per_sample,
        )

    return msgspec.structs.replace(
        workload,
        layers=tuple(map(otherwise, workload.layers)),
        ddp=msgspec.structs.replace(workload.ddp, recomputes=not recomputes),
    )
