"""The fusion rules: one ``FusionRule`` each, from which the lowering, the model, the flags and the docs take it.

Loads nothing: the implementation is named, and imported when tensors are first fused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dpsim.registry import Registry


@dataclass(frozen=True, kw_only=True)
class FusionRule:
    """One rule that joins gradient tensors into buckets. Only ``needs_units`` has a default: few rules are of units.

    ``default_threshold_bytes``: the default threshold; ``None`` for a rule without a threshold.
    ``needs_costs``: whether it decides by the times at which tensors are ready and by an allreduce's alpha and beta.
    ``while_running``: whether it decides anew in each step (a policy that runtime and model both call), so that there
    are no buckets before the step.
    ``needs_units``: whether it differs from other rules only where a script wraps units (``fully_shard``).
    ``buckets(tensors, threshold_bytes)`` gives the first tensor of every bucket and their number
    (``dpsim.lowering.fusion``): the function, or its ``module:name``.
    """

    name: str
    summary: str
    default_threshold_bytes: float | None
    needs_costs: bool
    while_running: bool
    buckets: Callable[..., Any] | str
    needs_units: bool = False


FUSION_RULES: Registry[FusionRule] = Registry("fusion rule", FusionRule, group="dpsim.fusion_rules")
DDP_RULES = frozenset({"ddp", "ddp-2.3", "ddp-1.5"})
"""The rules of PyTorch's DDP, which a script's ``bucket_cap_mb`` belongs to."""
OTHER_BY_DEFAULT = frozenset({"ddp"})
"""Rules that make other buckets where no threshold is set than at their default threshold."""

DEFAULT_RULE = "tarantella"
"""The rule of dpsim's own training, where nobody names one and no script of PyTorch was profiled."""


def threshold_rules() -> tuple[str, ...]:
    """The names of the rules that take a threshold."""
    return tuple(name for name, rule in FUSION_RULES.items() if rule.default_threshold_bytes is not None)


_KIB, _MIB = 2.0**10, 2.0**20
# name, summary, default threshold, module
for _name, _summary, _threshold_bytes, _module in (
    ("tarantella", "a bucket closes once it holds the threshold", 32 * _KIB, "fusion"),
    ("horovod", "every cycle packs what is ready, up to the threshold", 128 * _MIB, "horovod"),
    ("ddp", "as tarantella; by default, the first bucket at 1 MiB", 25 * _MIB, "ddp"),
    ("ddp-2.3", "as ddp of PyTorch 1.6 to 2.3: the first bucket always at 1 MiB", 25 * _MIB, "ddp"),
    ("ddp-1.5", "as ddp up to PyTorch 1.5: from the first layer on, its bucket at 1 MiB", 25 * _MIB, "ddp"),
    ("capped", "a bucket closes before it would exceed the threshold", 25 * _MIB, "fusion"),
    ("capped-forward", "as capped, filled from the first layer on", 25 * _MIB, "fusion"),
    ("per-tensor", "one bucket per tensor", None, "fusion"),
    ("fsdp", "one bucket per unit of a script's fully_shard; else as per-tensor", None, "fusion"),
    ("one", "one bucket per step", None, "fusion"),
    ("mg-wfbp", "merges where that hides more communication", None, "fusion"),
):
    FUSION_RULES.register(
        FusionRule(
            name=_name,
            summary=_summary,
            default_threshold_bytes=_threshold_bytes,
            needs_costs=_name == "mg-wfbp",
            while_running=_name == "horovod",
            buckets=f"dpsim.lowering.{_module}:{re.sub('[-.]', '_', _name)}",
            needs_units=_name == "fsdp",
        )
    )

FUSION_RULES.close()
