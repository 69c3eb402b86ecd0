"""What gradients may be sent as, and which allreduces can send 16 bits."""

from __future__ import annotations

from typing import Literal

from dpsim.errors import ConfigError

WireDtype = Literal["float32", "float64", "float16", "bfloat16"]
SIXTEEN_BITS = ("float16", "bfloat16")
SIXTEEN_BIT_MESSAGES = ("mpi", "ring", "recursive-doubling", "halving-doubling", "direct")
"""The algorithms that send all they send as 16 bits, where they can: ``direct``, and with leaves all of them."""
UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Half the relative spacing of their numbers: the largest relative error of a rounding."""
SIXTEEN_BIT_ALGORITHMS = ("auto", "one-shot", "two-shot", "direct", "hierarchical")


def check_wire(wire_dtype: str | None, algorithm: str) -> None:
    """Refuse 16 bits with an algorithm that would round every partial sum on its way, where there are no leaves."""
    if wire_dtype in SIXTEEN_BITS and algorithm not in SIXTEEN_BIT_ALGORITHMS:
        raise ConfigError(
            f"algorithm {algorithm!r} cannot send {wire_dtype}: it would round the partial sums of every round",
            allowed=", ".join(SIXTEEN_BIT_ALGORITHMS),
            remedy="choose one of them with --algorithm, or leave --wire-dtype out; --reproducible can send it by any",
        )
