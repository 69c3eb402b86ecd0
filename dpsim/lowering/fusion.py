"""Gradient tensors -> buckets: every published fusion rule, pure. Tensors stand in the order backward makes them final.

``fuse`` calls the static rules; DDP's is in ``ddp``, and Horovod's, which decides while running, in ``horovod``.
Each is registered in ``dpsim.fusion_rules``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpsim.errors import ConfigError
from dpsim.fusion_rules import FUSION_RULES
from dpsim.jit import Compiled, jit, quickest
from dpsim.registry import load
from dpsim.workload import Workload

_FEW_TENSORS = 1000

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientTensors:
    """The tensors that a rule fuses, in the order in which backward makes them final (DDP: reversed parameters).

    ``ready_s`` (seconds, ascending), ``alpha_s`` and ``beta_s_per_byte`` are given to the rules that need costs. A
    bucket never mixes dtypes: where ``dtype_code`` changes, it closes. ``default_threshold`` is true where nobody has
    set a threshold, so that the rule's own holds.
    """

    size_bytes: Ints
    dtype_code: Ints
    ready_s: Floats | None = None
    alpha_s: float | None = None
    beta_s_per_byte: float | None = None
    default_threshold: bool = False


class Buckets(NamedTuple):
    """Bucket k holds tensors ``start[k]:start[k + 1]`` of the ready order, of ``size_bytes[k]`` together."""

    start: Ints
    size_bytes: Ints

    @classmethod
    def at(cls, workload: Workload, start: Ints) -> Buckets:
        """Return the buckets that begin there, with their sizes."""
        ends = workload.ready_order.cumulative_bytes[start]
        return cls(start, ends[1:] - ends[:-1])


def fuse(
    size_bytes: Ints,
    rule: str,
    threshold_bytes: float | None = None,
    *,
    ready_s: Floats | None = None,
    alpha_s: float | None = None,
    beta_s_per_byte: float | None = None,
    dtype_code: Ints | None = None,
) -> Ints:
    """Return ``bucket_start`` (length buckets + 1): bucket k holds ``bucket_start[k]:bucket_start[k + 1]``.

    The arguments are those of ``GradientTensors``. Without ``threshold_bytes`` the rule's default holds; the rules that
    take none ignore it. Raises ``ConfigError``.
    """
    kind = FUSION_RULES.find(rule)
    default = threshold_bytes is None
    if threshold_bytes is None:
        threshold_bytes = kind.default_threshold_bytes or 0.0
    if kind.default_threshold_bytes is not None and not threshold_bytes >= 0:
        raise ConfigError(f"fusion threshold is {threshold_bytes}", allowed="0 or more bytes, or inf")
    tensors = GradientTensors(
        size_bytes=size_bytes,
        dtype_code=np.zeros(len(size_bytes), np.int64) if dtype_code is None else dtype_code,
        ready_s=ready_s,
        alpha_s=alpha_s,
        beta_s_per_byte=beta_s_per_byte,
        default_threshold=default,
    )
    starts: Ints = load(kind.buckets)(tensors, float(threshold_bytes))
    return starts if str(kind.buckets).startswith("dpsim.") else _checked(starts, rule, tensors.dtype_code)


def _checked(starts: object, rule: str, dtype_code: Ints) -> Ints:
    """Return what a rule that dpsim did not write says, as integers. Raises ``ConfigError`` if it is no partition."""
    count = len(dtype_code)
    found = np.asarray(starts)
    fault = ""
    if found.ndim != 1 or len(found) < 2 or not np.issubdtype(found.dtype, np.integer):
        fault = "no array of whole numbers"
    elif found[0] != 0 or found[-1] != count:
        fault = f"it begins with {found[0]} and ends with {found[-1]}"
    elif np.any(backward := np.diff(found) <= 0):
        bucket = int(np.argmax(backward))
        fault = f"bucket {bucket} would begin at tensor {found[bucket]} and end before tensor {found[bucket + 1]}"
    else:
        mixed = [k for k, (a, b) in enumerate(pairwise(found)) if np.any(dtype_code[a:b] != dtype_code[a])]
        fault = f"bucket {mixed[0]} would mix data types" if mixed else ""
    if fault:
        text = np.array2string(found, threshold=12, separator=", ")
        raise ConfigError(
            f"fusion rule {rule!r} returned {text} for {count} gradient tensors: {fault}",
            allowed=f"the first tensor of each bucket in growing order from 0 on, then {count}; one data type a bucket",
            remedy="correct the rule's function; docs/extend.md has one",
        )
    return found.astype(np.int64)


def tarantella(tensors: GradientTensors, threshold_bytes: float) -> Ints:
    """Return the buckets that close once their size >= threshold (0: one per tensor, inf: one per step).

    Source: Tarantella ``FusedTensorInfo.cpp``.
    """
    return closed_at(tensors, threshold_bytes)


def per_tensor(tensors: GradientTensors, threshold_bytes: float) -> Ints:
    """Return one bucket per tensor."""
    return closed_at(tensors, 0.0)


def fsdp(tensors: GradientTensors, threshold_bytes: float) -> Ints:
    """Return one bucket per tensor, which of a script's ``fully_shard`` is a unit."""
    return per_tensor(tensors, threshold_bytes)


def one(tensors: GradientTensors, threshold_bytes: float) -> Ints:
    """Return one bucket per step."""
    return closed_at(tensors, math.inf)


def capped(tensors: GradientTensors, threshold_bytes: float) -> Ints:
    """Return the buckets that close before a tensor would make them larger than the threshold (0: one per tensor).

    A tensor larger than the threshold is a bucket of its own. PyTorch's bucket cap is no such maximum: ``ddp`` adds the
    tensor first. Trainers that fill buffers of a fixed size do this; the default is DDP's ``bucket_cap_mb``, 25 MiB.
    """
    starts: Ints = _loop(_close_before, tensors)(tensors.size_bytes, threshold_bytes, tensors.dtype_code)
    return starts


def capped_forward(tensors: GradientTensors, threshold_bytes: float) -> Ints:
    """Close as ``capped``, in the parameters' order, so that what is left over is in the last layers' bucket.

    Source: PyTorch ``benchmarks/distributed/ddp/compare/python_ddp.py`` _build_buckets_for_params.
    """
    return from_first_layer(capped, tensors, threshold_bytes)


def from_first_layer(rule: Callable[..., Ints], tensors: GradientTensors, threshold_bytes: float) -> Ints:
    """Return ``rule``'s buckets of the tensors in the order of the parameters, in the order they are ready.

    A bucket is ready when the gradient of its first parameter is, which backward makes final last.
    """
    forward = replace(tensors, size_bytes=tensors.size_bytes[::-1].copy(), dtype_code=tensors.dtype_code[::-1].copy())
    starts: Ints = len(tensors.size_bytes) - rule(forward, threshold_bytes)[::-1]
    return starts


def mg_wfbp(tensors: GradientTensors, threshold_bytes: float) -> Ints:
    """Merge a bucket into the next tensor l - 1 iff r[l-1] < tau[l] + t_c(l) and (tau[l] > r[l-1] or
    r[l-1] - tau[l] < alpha), with t_c = alpha_s + beta_s_per_byte * bytes, tau[l] = max(tau[l+1] + t_c(l+1), r[l]) and
    r = ``ready_s``.

    Source: HKBU-HPML/MG-WFBP ``distributed_optimizer.py`` _generate_groups_mgwfbp. Raises ``ConfigError``.
    """
    ready_s, alpha_s, beta = tensors.ready_s, tensors.alpha_s, tensors.beta_s_per_byte
    if ready_s is None or alpha_s is None or beta is None:
        raise ConfigError(
            "fusion rule 'mg-wfbp' without ready times or without the latency and bandwidth of an allreduce",
            allowed="ready_s, alpha_s and beta_s_per_byte",
            remedy="give a machine (dpsim.model.alpha_beta fits its alpha and beta), or choose another rule",
        )
    if len(ready_s) != len(tensors.size_bytes):
        raise ConfigError(
            f"{len(ready_s)} ready times for {len(tensors.size_bytes)} tensors", allowed="one for each tensor"
        )
    starts: Ints = _loop(_merge_mg_wfbp, tensors)(
        tensors.size_bytes, ready_s, float(alpha_s), float(beta), tensors.dtype_code
    )
    return starts


def _loop(compiled: Compiled, tensors: GradientTensors) -> Callable[..., Ints]:
    """Return the loop, compiled unless numba would be loaded for a few tensors: training fuses once."""
    return quickest(compiled, few=len(tensors.size_bytes) <= _FEW_TENSORS)


def closed_at(tensors: GradientTensors, *limits_bytes: float) -> Ints:
    """Add a tensor, then close the bucket when its size >= its limit: the first limit until a dtype's first bucket is
    full, and so on; the last one holds for all that follow.
    """
    return _loop(_close_at, tensors)(tensors.size_bytes, np.array(limits_bytes), tensors.dtype_code)


@jit
def _close_at(size_bytes, limits, dtype_code):  # type: ignore[no-untyped-def]
    tensors = len(size_bytes)
    starts = np.zeros(tensors + 1, np.int64)
    full = np.zeros(1 if tensors == 0 else dtype_code.max() + 1, np.int64)
    buckets = 0
    size = np.int64(0)
    for i in range(tensors):
        size += size_bytes[i]
        code = dtype_code[i]
        enough = size >= limits[min(full[code], len(limits) - 1)]
        if enough:
            full[code] += 1
        if enough or i + 1 == tensors or dtype_code[i + 1] != code:
            buckets += 1
            starts[buckets] = i + 1
            size = np.int64(0)
    return starts[: buckets + 1].copy()


@jit
def _close_before(size_bytes, limit, dtype_code):  # type: ignore[no-untyped-def]
    tensors = len(size_bytes)
    starts = np.zeros(tensors + 1, np.int64)
    buckets = 0
    size = np.int64(0)
    for i in range(tensors):
        full = limit == 0 or size + size_bytes[i] > limit
        if i > 0 and (full or dtype_code[i] != dtype_code[i - 1]):
            buckets += 1
            starts[buckets] = i
            size = np.int64(0)
        size += size_bytes[i]
    if tensors > 0:
        buckets += 1
        starts[buckets] = tensors
    return starts[: buckets + 1].copy()


@jit
def _merge_mg_wfbp(size_bytes, ready_s, alpha, beta, dtype_code):  # type: ignore[no-untyped-def]
    """Do the published merge in one pass: a merge at l changes tau only from l - 1 on, so nothing is computed again."""
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
