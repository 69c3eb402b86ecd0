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

    Greedy in ready order, as ``FuseResponses`` in Horovod's ``controller.cc``: a bucket takes its first tensor, then
    every next one of the same dtype while the sum of sizes stays <= ``threshold_bytes`` (a maximum). A tensor that is
    of another dtype, or does not fit, is passed over while the bucket and all that it passed over stay within the
    threshold together; the first one beyond that closes the bucket. What was passed over comes first in the next one.
    Sizes are padded to 16 bytes, as in Horovod's builds for CUDA (``HOROVOD_BATCH_D2D_MEMCOPIES``, on by default). A
    tensor above the threshold goes alone; threshold 0 is one a tensor.
    """

    threshold_bytes: float
    cycle_s: float

    def __post_init__(self) -> None:
        if not self.threshold_bytes >= 0:
            raise ConfigError(f"fusion threshold is {self.threshold_bytes}", allowed="0 or more bytes, or inf")
        if not (math.isfinite(self.cycle_s) and self.cycle_s > 0):
            raise ConfigError(f"cycle_s is {self.cycle_s}", allowed="finite seconds > 0")

    def next_tick_s(self, tick_s: float, now_s: float) -> float:
        """Return the earliest instant of the decision after one at ``now_s``, which was due at ``tick_s``."""
        return max(tick_s + self.cycle_s, now_s)

    def pack(self, size_bytes: Sequence[int], dtype_code: Sequence[int] | None = None) -> tuple[tuple[int, ...], ...]:
        """Return buckets as tuples of positions in ``size_bytes``; tensors are ready since the last cycle, in order."""
        codes = [0] * len(size_bytes) if dtype_code is None else dtype_code
        padded = [-(-int(size) // HOROVOD_PADDING_BYTES) * HOROVOD_PADDING_BYTES for size in size_bytes]
        if self.threshold_bytes == 0:
            return tuple((i,) for i in range(len(padded)))
        waiting = list(range(len(padded)))
        buckets = []
        while waiting:
            first, *others = waiting
            bucket, passed, total, passed_bytes = [first], [], padded[first], 0
            for position, i in enumerate(others):
                if codes[i] == codes[first] and total + padded[i] <= self.threshold_bytes:
                    bucket.append(i)
                    total += padded[i]
                    continue
                passed_bytes += padded[i]
                if total + passed_bytes > self.threshold_bytes:
                    passed += others[position:]
                    break
                passed.append(i)
            buckets.append(tuple(bucket))
            waiting = passed
        return tuple(buckets)


def horovod(tensors: GradientTensors, threshold_bytes: float) -> Ints:
    """Refuse: the buckets are decided while running, by ``HorovodCycle``."""
    static = [name for name, rule in FUSION_RULES.items() if not rule.while_running]
    raise ConfigError(
        "fusion rule 'horovod' decides its buckets while running",
        allowed=", ".join(static),
        remedy="call dpsim.lowering.horovod.HorovodCycle on the tensors of each cycle",
    )
