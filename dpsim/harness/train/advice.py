"""Warnings before a run that is allowed, but likely not intended."""

from __future__ import annotations

from collections.abc import Sequence

from dpsim.plan import Plan
from dpsim.replica import LayerSpec

LEAST_LOCAL_BATCH = 16


def batch_norm_warning(layers: Sequence[LayerSpec], plan: Plan) -> str | None:
    """A warning if batch norm takes its statistics from too few samples, with a remedy; else None. Pure.

    ``plan.batch_norm`` decides whose samples these are: those of a micro-batch, a leaf or the global batch. Below
    16 the statistics are noisy: ResNet-50's top-1 error on ImageNet, with 32, 16, 8, 4 and 2 samples a device, is
    23.6, 23.7, 24.8, 27.3 and 34.7 % with batch norm, and 24.1, 24.2, 24.0, 24.2 and 24.1 % with group norm (Wu and
    He, arXiv:1803.08494, table 2).
    """
    count = sum(layer.batch_norm_channels > 0 for layer in layers)
    together = {"leaf": plan.leaves, "global": 1}.get(plan.batch_norm, plan.devices * plan.accumulate)
    local = plan.global_batch // together
    if not count or local >= LEAST_LOCAL_BATCH:
        return None
    least = LEAST_LOCAL_BATCH * together
    spread = f"{plan.global_batch} samples a step over {plan.devices} device{'s' * (plan.devices != 1)}"
    fewer = "fewer devices or micro-batches"
    if plan.batch_norm == "leaf":
        spread, fewer = f"{plan.global_batch} samples a step in {plan.leaves} leaves", "fewer --leaves"
    elif plan.batch_norm == "local" and plan.accumulate > 1:
        spread += f" and {plan.accumulate} micro-batches"
    layers_take = "1 batch-norm layer takes its" if count == 1 else f"{count} batch-norm layers take their"
    return (
        f"{layers_take} statistics from {local} sample{'s' * (local != 1)} ({spread}): below {LEAST_LOCAL_BATCH} "
        "the test error rises (Wu and He 2018: ResNet-50 on ImageNet 23.7 % at 16 a device, 27.3 % at 4, 34.7 % at 2); "
        f"to do: --global-batch {least} or more, {fewer}, or a model with norm=group"
    )
