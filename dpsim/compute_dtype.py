"""``ComputeDtype``: what the operands of matrix products and convolutions are rounded to."""

from __future__ import annotations

from typing import Literal, get_args

ComputeDtype = Literal["float32", "bfloat16"]
COMPUTE_DTYPES: tuple[ComputeDtype, ...] = get_args(ComputeDtype)
"""With ``bfloat16`` weights, activations and output gradients are rounded to it where they are multiplied, and products
are added in float32. Parameters, gradients, activations between layers and optimizer state are float32 in both."""


def in_dtype(dtype: ComputeDtype) -> str:
    """What the name of a training ends with: nothing in float32, which is how models are trained by default."""
    return "" if dtype == "float32" else f", products in {dtype}"
