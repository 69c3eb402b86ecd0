"""Horovod's fusion rule: a policy that decides buckets while a step runs. The runtime and the model both call it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dpsim.errors import ConfigError
from dpsim.fusion_rules import FUSION_RULES
from dpsim.lowering.fusion import GradientTensors, Ints

HOROVOD_PADDING_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class HorovodCycle:
    """Horovod's rule, decided while running: every ``cycle_s`` the tensors that became ready are packed at once.

    Greedy in ready order: a bucket takes its first tensor, then every later one of the same dtype while the sum of
    sizes, each padded to 16 bytes, stays <= ``threshold_bytes`` (a maximum), looking past tensors that do not fit;
    what was passed over forms the next bucket. A tensor above the threshold goes alone; threshold 0 is one a tensor.
    ``reference formulas`` states it so; Horovod's own ``controller.cc`` bounds the look-ahead (size + skipped bytes
    <= threshold), so there it passes over tensors of another dtype only.
    """

    threshold_bytes: float
    cycle_s: float

    def __post_init__(self) -> None:
        if not self.threshold_bytes >= 0:
            raise ConfigError(f"fusion threshold is {self.threshold_bytes}", allowed="0 or more bytes, or inf")
        if not (math.isfinite(self.cycle_s) and self.cycle_s > 0):
            raise ConfigError(f"cycle_s is {self.cycle_s}", allowed="finite seconds > 0")

    def next_tick_s(self, tick_s: float, now_s: float) -> float:
        """The earliest instant of the decision after one at ``now_s``, which was due at ``tick_s``."""
        return max(tick_s + self.cycle_s, now_s)

    def pack(self, size_bytes: Sequence[int], dtype_code: Sequence[int] | None = None) -> tuple[tuple[int, ...], ...]:
        """Buckets as tuples of positions in ``size_bytes``, the tensors ready since the last cycle in ready order."""
        codes = [0] * len(size_bytes) if dtype_code is None else dtype_code
        padded = [-(-int(size) // HOROVOD_PADDING_BYTES) * HOROVOD_PADDING_BYTES for size in size_bytes]
        if self.threshold_bytes == 0:
            return tuple((i,) for i in range(len(padded)))
        waiting = list(range(len(padded)))
        buckets = []
        while waiting:
            first = waiting[0]
            bucket, passed, total = [first], [], padded[first]
            for i in waiting[1:]:
                if codes[i] == codes[first] and total + padded[i] <= self.threshold_bytes:
                    bucket.append(i)
                    total += padded[i]
                else:
                    passed.append(i)
            buckets.append(tuple(bucket))
            waiting = passed
        return tuple(buckets)


def horovod(tensors: GradientTensors, threshold_bytes: float) -> Ints:
    """Refuses: the buckets are decided while running, by ``HorovodCycle``."""
    static = [name for name, rule in FUSION_RULES.items() if not rule.while_running]
    raise ConfigError(
        "fusion rule 'horovod' decides its buckets while running",
        allowed=", ".join(static),
        remedy="call dpsim.lowering.horovod.HorovodCycle on the tensors of each cycle",
    )
