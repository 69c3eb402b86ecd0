"""Compression: the dtypes that gradients may be sent as, and which allreduces can send 16 bits."""

from __future__ import annotations

from typing import Literal

from dpsim.algorithms import ALGORITHMS
from dpsim.errors import ConfigError

WireDtype = Literal["float32", "float64", "float16", "bfloat16"]
SIXTEEN_BITS = ("float16", "bfloat16")
UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The largest relative error of rounding to a dtype: half the relative spacing of its numbers."""


def sixteen_bit_algorithms() -> tuple[str, ...]:
    """The algorithms that can send 16 bits without leaves; others would round the partial sums of every round."""
    return tuple(name for name, algorithm in ALGORITHMS.items() if algorithm.sixteen_bits)


def check_compression(wire_dtype: str | None, algorithm: str) -> None:
    """Refuse 16 bits, without leaves, with an algorithm that would round the partial sums of every round."""
    if wire_dtype in SIXTEEN_BITS and not ALGORITHMS.find(algorithm).sixteen_bits:
        raise ConfigError(
            f"algorithm {algorithm!r} cannot send {wire_dtype}: it would round the partial sums of every round",
            allowed=", ".join(sixteen_bit_algorithms()),
            remedy="choose one of them with --algorithm, or leave --wire-dtype out; --reproducible can send it by any",
        )
