"""Joins workloads of one training at several local batches into one with tables over them. Loads no torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from dpsim.errors import ConfigError
from dpsim.workload import Workload, overhead_line


def joined(workloads: Sequence[Workload]) -> Workload:
    """One workload of several that have one local batch each, all different. Raises ``ConfigError``.

    Times of layers are tables; the overhead is a line over the local batch; what does not depend on the local batch is
    a median.
    """
    ordered = sorted(workloads, key=lambda workload: workload.local_batches)
    first = ordered[0]
    batches = [workload.local_batches[0] for workload in ordered]
    for workload, batch in zip(ordered, batches, strict=True):
        check_same(first, workload, batch)
    overhead_s, per_sample_s = overhead_line(batches, [workload.overhead_s for workload in ordered])
    layers = tuple(
        msgspec.structs.replace(
            layer,
            forward_s=tuple(workload.layers[number].forward_s[0] for workload in ordered),
            backward_s=tuple(workload.layers[number].backward_s[0] for workload in ordered),
        )
        for number, layer in enumerate(first.layers)
    )
    errors = [workload.relative_uncertainty for workload in ordered if workload.relative_uncertainty is not None]
    load_s = statistics.median(workload.input_s_per_sample for workload in ordered)
    return msgspec.structs.replace(
        first,
        local_batches=tuple(batches),
        layers=layers,
        update_s=statistics.median(workload.update_s for workload in ordered),
        overhead_s=overhead_s,
        overhead_per_sample_s=per_sample_s,
        relative_uncertainty=max(errors, default=None),
        input_s_per_sample=load_s,
        input_workers=first.input_workers if load_s else 1,
        input_prefetch=first.input_prefetch and load_s > 0,
        source=f"{first.source}, with data loaders of batches of {', '.join(map(str, batches))}"
        if len(batches) > 1
        else first.source,
    )


def check_same(first: Workload, other: Workload, batch: int) -> None:
    """Raises ``ConfigError`` unless both send the same gradients in the same order."""
    sent = [[(layer.name, layer.tensors) for layer in workload.layers] for workload in (first, other)]
    same_settings = first.ddp == other.ddp and first.input_workers == other.input_workers
    if sent[0] != sent[1] or not same_settings:
        raise ConfigError(
            f"with local batch {batch} the script sends its gradients in other buckets than with"
            f" {first.local_batches[0]}, or trains with other settings",
            allowed="a script in which the local batch decides nothing but the batch",
            remedy="profile each local batch by itself: --local-batch with one number",
        )
