"""The fusion rules: one ``FusionRule`` each, from which the lowering, the model, the flags and the docs take it.

Loads nothing: the implementation is named, and imported when tensors are first fused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dpsim.registry import Registry


@dataclass(frozen=True, kw_only=True)
class FusionRule:
    """One rule for joining gradient tensors into buckets. Nothing has a default, so that nothing can be forgotten.

    ``default_threshold_bytes``: the threshold where none is given, or ``None`` for a rule that takes none.
    ``needs_costs``: whether it decides by the times at which tensors are ready and by an allreduce's alpha and beta.
    ``while_running``: whether it decides in each step anew (a policy that runtime and model both call) and so has no
    buckets beforehand.
    ``buckets(tensors, threshold_bytes)`` gives the first tensor of every bucket and their number
    (``dpsim.lowering.fusion``): the function, or its ``module:name``.
    """

    name: str
    summary: str
    default_threshold_bytes: float | None
    needs_costs: bool
    while_running: bool
    buckets: Callable[..., Any] | str


FUSION_RULES: Registry[FusionRule] = Registry("fusion rule")


def threshold_rules() -> tuple[str, ...]:
    """The names of the rules that take a threshold."""
    return tuple(name for name, rule in FUSION_RULES.items() if rule.default_threshold_bytes is not None)


FUSION_RULES.register(
    FusionRule(
        name="tarantella",
        summary="a bucket closes once it holds the threshold",
        default_threshold_bytes=32 * 2.0**10,
        needs_costs=False,
        while_running=False,
        buckets="dpsim.lowering.fusion:tarantella",
    )
)
FUSION_RULES.register(
    FusionRule(
        name="horovod",
        summary="every cycle packs what is ready, up to the threshold",
        default_threshold_bytes=128 * 2.0**20,
        needs_costs=False,
        while_running=True,
        buckets="dpsim.lowering.fusion:horovod",
    )
)
FUSION_RULES.register(
    FusionRule(
        name="ddp",
        summary="as tarantella, the first bucket 1 MiB at most",
        default_threshold_bytes=25 * 2.0**20,
        needs_costs=False,
        while_running=False,
        buckets="dpsim.lowering.fusion:ddp",
    )
)
FUSION_RULES.register(
    FusionRule(
        name="per-tensor",
        summary="one bucket per tensor",
        default_threshold_bytes=None,
        needs_costs=False,
        while_running=False,
        buckets="dpsim.lowering.fusion:per_tensor",
    )
)
FUSION_RULES.register(
    FusionRule(
        name="one",
        summary="one bucket per step",
        default_threshold_bytes=None,
        needs_costs=False,
        while_running=False,
        buckets="dpsim.lowering.fusion:one",
    )
)
FUSION_RULES.register(
    FusionRule(
        name="mg-wfbp",
        summary="merges where that hides more communication",
        default_threshold_bytes=None,
        needs_costs=True,
        while_running=False,
        buckets="dpsim.lowering.fusion:mg_wfbp",
    )
)
