"""Compression: the dtypes that gradients may be sent as."""

from __future__ import annotations

from typing import Literal

WireDtype = Literal["float32", "float64", "float16", "bfloat16"]
SIXTEEN_BITS = ("float16", "bfloat16")
UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The largest relative error of rounding to a dtype: half the relative spacing of its numbers."""
