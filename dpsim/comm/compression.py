"""Compression: the 16-bit codes that an allreduce of float32 numbers sends if the plan asks for float16 or bfloat16.

Without leaves every rank's contribution is rounded once to 16 bits (to nearest, ties to even), its own too; the owner
of a slice adds the rounded contributions in float32 along the tree over the ranks (``kernels.allreduce.tree``); the sum
is rounded once to 16 bits, and every rank, the owner too, keeps that value. So all ranks hold the same bits,
whichever rank owns a slice. In shared memory nothing is sent, and the same numbers come out.

With leaves (reproducible training) every node of the fixed tree is rounded: each leaf's gradient, and each sum of two
nodes, which are added in float32. So all partial sums are numbers of 16 bits, sending them loses nothing, and every
number of devices, also one, every algorithm and every bucket give the same bits. Losses and the statistics of batch
norm, which are not sent in buckets, are not rounded.

Each number is encoded times ``scale``, a power of two, which changes no digit. Gradients are sums over samples;
float16 ends at 65504, so it carries them times 2^-ceil(log2(global batch)): no more than their mean. A mean that
float16 cannot hold becomes infinite. Below 2^-14 float16 rounds to multiples of 2^-24. bfloat16 has float32's range.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsim.dtypes import SIXTEEN_BITS
from dpsim.errors import ConfigError
from dpsim.kernels.rounding import round_array, round_sum
from dpsim.replica import Rounding

Floats = NDArray[np.float32]
Codes = NDArray[np.uint16]


def _kernels(dtype: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """Encode and decode; imported here, since numba takes a third of a second to load."""
    from dpsim.kernels import compression as kernels

    if dtype == "float16":
        return kernels.encode_float16, kernels.decode_float16
    return kernels.encode_bfloat16, kernels.decode_bfloat16


@dataclass(frozen=True)
class Compression:
    """Codes of ``dtype`` (float16 or bfloat16) for float32 numbers, scaled by a power of two."""

    dtype: str
    scale: float = 1.0
    _up: np.float32 = field(init=False, repr=False)
    _down: np.float32 = field(init=False, repr=False)
    _kernels: tuple[Callable[..., None], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_down", np.float32(self.scale))
        object.__setattr__(self, "_up", np.float32(1.0 / self.scale))
        object.__setattr__(self, "_kernels", _kernels(self.dtype))
        values, coded = np.zeros(1, np.float32), np.zeros(1, np.uint16)
        self.encode(values, coded)  # compiled now, not in the first allreduce
        self.decode(coded, values)
        self.add(values, values, values)
        self.round(values, values)

    def add(self, a: Floats, b: Floats, out: Floats) -> None:
        """out = a + b in float32, rounded as encoding and decoding do; ``out`` may be one of them."""
        round_sum(a, b, self.dtype, self.scale, out)

    def round(self, values: Floats, out: Floats) -> None:
        """out = values, rounded as encoding and decoding do; ``out`` may be ``values``."""
        round_array(values, self.dtype, self.scale, out)

    @property
    def rounding(self) -> Rounding:
        """The rounding that encoding and decoding does."""
        return Rounding(self.dtype, self.scale)

    def encode(self, values: Floats, coded: Codes) -> None:
        """coded = the 16-bit codes of values."""
        self._kernels[0](values, coded, self._down)

    def decode(self, coded: Codes, values: Floats) -> None:
        """values = the numbers that the codes stand for."""
        self._kernels[1](coded, values, self._up)


def compression(wire_dtype: str | None, dtype: np.dtype[Any], global_batch: int) -> Compression | None:
    """Return a plan's compression for arrays of ``dtype``; None: they are sent as they are. Raises ``ConfigError``."""
    if wire_dtype is None or wire_dtype == dtype.name:
        return None
    if wire_dtype not in SIXTEEN_BITS or dtype != np.float32:
        raise ConfigError(
            f"wire dtype {wire_dtype} for gradients in {dtype.name}",
            allowed=f"{dtype.name}" + (f", {', '.join(SIXTEEN_BITS)}" if dtype == np.float32 else ""),
        )
    return Compression(wire_dtype, 2.0 ** -(global_batch - 1).bit_length() if wire_dtype == "float16" else 1.0)
