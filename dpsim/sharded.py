"""What reduce-scatters and all-gathers can be done with: the refusals of strategy ``zero1``."""

from __future__ import annotations

from dpsim.algorithms import ALGORITHMS
from dpsim.errors import ConfigError
from dpsim.fusion_rules import FUSION_RULES
from dpsim.wire_dtype import SIXTEEN_BITS


def sharded_algorithms() -> tuple[str, ...]:
    """The algorithms that consist of a reduce-scatter and an all-gather which can run one without the other."""
    return tuple(name for name, algorithm in ALGORITHMS.items() if algorithm.halves)


def check_shards(algorithm: str, fusion_rule: str, wire_dtype: str | None) -> None:
    """Refuse what cannot be sharded: rules that decide while running, 16 bits, and algorithms without two halves."""
    if FUSION_RULES.find(fusion_rule).while_running:
        raise ConfigError(
            f"strategy zero1 under rule {fusion_rule}, which decides buckets while running: shards are slices of"
            " buckets, and optimizer state stays with its shard",
            allowed="fusion rules that decide beforehand",
            remedy="choose another --fusion-rule, or leave --strategy out",
        )
    if not ALGORITHMS.find(algorithm).halves:
        raise ConfigError(
            f"strategy zero1 with algorithm {algorithm!r}, of which there is no reduce-scatter and no all-gather",
            allowed=", ".join(sharded_algorithms()),
            remedy="choose one of them with --algorithm, or leave --strategy out",
        )
    if wire_dtype in SIXTEEN_BITS:
        raise ConfigError(
            f"strategy zero1 with gradients sent as {wire_dtype}: parameters are gathered as they are",
            allowed="wire dtypes float32 and float64",
            remedy="leave --wire-dtype out, or leave --strategy out",
        )
