"""Frameworks whose bucket cap users set: the rule of their buckets, their default cap, the line to paste.

Loads nothing. Units are those of PyTorch's ``DistributedDataParallel`` (bucket_cap_mb in MiB, which may be a fraction),
Horovod's ``docs/tensor-fusion.rst`` (bytes), Tarantella's ``docs/source/advanced_topics.rst`` (kB of 1024 bytes, on its
command line) and DeepSpeed's ``docs/_pages/config-json.md`` (numbers, not bytes).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dpsim.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A framework that reduces gradients in buckets.

    ``rule`` is the fusion rule of its buckets. ``default_numbers`` is its default cap in numbers, where it counts these
    and not the bytes of the rule's default. ``line(cap_bytes, bytes of a number)`` is what sets the cap.
    """

    name: str
    title: str
    rule: str
    default_numbers: int | None
    line: Callable[[float, int], str]


def _ddp(cap_bytes: float, _: int) -> str:
    return f"DistributedDataParallel(model, bucket_cap_mb={cap_bytes / 2**20:.15g})"


def _horovod(cap_bytes: float, _: int) -> str:
    return f"HOROVOD_FUSION_THRESHOLD={math.ceil(cap_bytes)}"


def _tarantella(cap_bytes: float, _: int) -> str:
    return f"tarantella --fusion-threshold={math.ceil(cap_bytes / 2**10)} -- train.py"


def _deepspeed(cap_bytes: float, item_bytes: int) -> str:
    return f'"zero_optimization": {{"reduce_bucket_size": {math.ceil(cap_bytes / item_bytes)}}}'


FRAMEWORKS: Registry[Framework] = Registry("framework", Framework)
for _name, _title, _rule, _numbers, _line in (
    ("ddp", "DDP", "ddp", None, _ddp),
    ("horovod", "Horovod", "horovod", None, _horovod),
    ("tarantella", "Tarantella", "tarantella", None, _tarantella),
    ("deepspeed", "DeepSpeed", "capped", 500_000_000, _deepspeed),
):
    FRAMEWORKS.register(Framework(name=_name, title=_title, rule=_rule, default_numbers=_numbers, line=_line))
