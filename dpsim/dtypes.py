"""Data types: what gradients may be sent as, and what operands of products are rounded to."""

from __future__ import annotations

from typing import Literal, get_args

WireDtype = Literal["float32", "float64", "float16", "bfloat16"]
SIXTEEN_BITS = ("float16", "bfloat16")
UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The largest relative error of rounding to a dtype: half the relative spacing of its numbers."""

ComputeDtype = Literal["float32", "bfloat16"]
COMPUTE_DTYPES: tuple[ComputeDtype, ...] = get_args(ComputeDtype)
"""With ``bfloat16`` weights, activations and output gradients are rounded to it where they are multiplied, and products
are added in float32. Parameters, gradients, activations between layers and optimizer state are float32 in both."""


def in_dtype(dtype: ComputeDtype) -> str:
    """Return what the name of a training ends with: nothing in float32, which is how models are trained by default."""
    return "" if dtype == "float32" else f", products in {dtype}"
