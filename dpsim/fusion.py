"""Gradient tensors -> buckets: every published fusion rule, pure. Tensors stand in the order backward makes them final.

The static rules are one function, ``fuse``; Horovod's rule decides while running and is the policy ``HorovodCycle``,
which the runtime and the model both call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from dpsim.errors import ConfigError, unknown
from dpsim.plan import FUSION_RULES

DDP_FIRST_BUCKET_BYTES = float(2**20)
HOROVOD_PADDING_BYTES = 16
STATIC_RULES = tuple(rule for rule in FUSION_RULES if rule != "horovod")

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def fuse(
    size_bytes: Ints,
    rule: str,
    threshold_bytes: float,
    *,
    ready_s: Floats | None = None,
    alpha_s: float | None = None,
    beta_s_per_byte: float | None = None,
    dtype_code: Ints | None = None,
) -> Ints:
    """``bucket_start`` (length buckets + 1): bucket k holds tensors ``bucket_start[k]:bucket_start[k + 1]``.

    tarantella   a bucket closes once its size >= threshold (0: one a tensor, inf: one a step)
    ddp          the same with the first bucket's limit min(1 MiB, threshold); inf still closes the first at 1 MiB
    per-tensor   one bucket a tensor
    one          one bucket a step
    mg-wfbp      merges a bucket into the next tensor l - 1 iff r[l-1] < tau[l] + t_c(l) and
                 (tau[l] > r[l-1] or r[l-1] - tau[l] < alpha), with t_c = alpha_s + beta_s_per_byte * bytes,
                 tau[l] = max(tau[l+1] + t_c(l+1), r[l]) and r = ``ready_s``

    ``size_bytes`` (length tensors) and ``ready_s`` (seconds, ascending) stand in backward-ready order, which for
    PyTorch DDP is the reversed parameter order. A bucket never mixes dtypes: where ``dtype_code`` changes, it closes
    (for one dtype this is DDP's series exactly; DDP's first limit holds once a dtype). ``threshold_bytes`` is ignored
    by the rules that take none. Raises ``ConfigError``.

    Sources: Tarantella ``FusedTensorInfo.cpp``; PyTorch ``reducer.cpp`` compute_bucket_assignment_by_size;
    HKBU-HPML/MG-WFBP ``distributed_optimizer.py`` _generate_groups_mgwfbp.
    """
    if dtype_code is None:
        dtype_code = np.zeros(len(size_bytes), np.int64)
    if rule == "mg-wfbp":
        if ready_s is None or alpha_s is None or beta_s_per_byte is None:
            raise ConfigError(
                "fusion rule 'mg-wfbp' without ready times or without the latency and bandwidth of an allreduce",
                allowed="ready_s, alpha_s and beta_s_per_byte",
                remedy="give a machine (dpsim.predict.alpha_beta fits its alpha and beta), or choose another rule",
            )
        if len(ready_s) != len(size_bytes):
            raise ConfigError(f"{len(ready_s)} ready times for {len(size_bytes)} tensors", allowed="one a tensor")
        starts: Ints = _merge_mg_wfbp(size_bytes, ready_s, float(alpha_s), float(beta_s_per_byte), dtype_code)
        return starts
    if rule == "per-tensor":
        first = limit = 0.0
    elif rule == "one":
        first = limit = math.inf
    elif rule == "tarantella":
        first = limit = float(threshold_bytes)
    elif rule == "ddp":
        limit = float(threshold_bytes)
        first = min(DDP_FIRST_BUCKET_BYTES, limit)
    elif rule == "horovod":
        raise ConfigError(
            "fusion rule 'horovod' decides its buckets while running",
            allowed=", ".join(STATIC_RULES),
            remedy="call dpsim.fusion.HorovodCycle on the tensors of each cycle",
        )
    else:
        raise unknown("fusion rule", rule, FUSION_RULES)
    if not limit >= 0:
        raise ConfigError(f"fusion threshold is {threshold_bytes}", allowed="0 or more bytes, or inf")
    starts = _close_at(size_bytes, first, limit, dtype_code)
    return starts


@numba.njit(cache=True, nogil=True)
def _close_at(size_bytes, first, limit, dtype_code):  # type: ignore[no-untyped-def]
    """Add a tensor, then close the bucket when its size >= its limit (``first`` until a dtype's first bucket fills)."""
    tensors = len(size_bytes)
    starts = np.zeros(tensors + 1, np.int64)
    full = np.zeros(1 if tensors == 0 else dtype_code.max() + 1, np.bool_)
    buckets = 0
    size = np.int64(0)
    for i in range(tensors):
        size += size_bytes[i]
        code = dtype_code[i]
        enough = size >= (limit if full[code] else first)
        if enough:
            full[code] = True
        if enough or i + 1 == tensors or dtype_code[i + 1] != code:
            buckets += 1
            starts[buckets] = i + 1
            size = np.int64(0)
    return starts[: buckets + 1].copy()


@numba.njit(cache=True, nogil=True)
def _merge_mg_wfbp(size_bytes, ready_s, alpha, beta, dtype_code):  # type: ignore[no-untyped-def]
    """The published merge in one pass: a merge at l changes tau only from l - 1 on, so nothing is computed again."""
    tensors = len(size_bytes)
    starts = np.zeros(tensors + 1, np.int64)
    if tensors == 0:
        return starts
    buckets = 0
    size = size_bytes[0]
    tau = ready_s[0]
    for i in range(1, tensors):
        cost = alpha + beta * size
        ready = ready_s[i]
        merge = ready < tau + cost and (tau > ready or ready - tau < alpha) and dtype_code[i] == dtype_code[i - 1]
        if merge:
            size += size_bytes[i]
            tau = max(tau, ready)
        else:
            buckets += 1
            starts[buckets] = i
            size = size_bytes[i]
            tau = max(tau + cost, ready)
    buckets += 1
    starts[buckets] = tensors
    return starts[: buckets + 1].copy()


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
