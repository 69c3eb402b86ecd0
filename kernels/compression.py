"""16-bit codes of float32 numbers on the wire: float16 and bfloat16, rounded to nearest, ties to even.

Integer arithmetic in one pass each, without a branch, so that LLVM makes it vector code: NumPy's own float16
conversions take ten times as long, and NumPy has no bfloat16. A NaN stays one (a quiet one). What an operation is
given to scale by must be a power of two; then scaling is exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dpsim.jit import jit

F16_LEAST_NORMAL = np.uint32(0x38800000)
"""2^-14 as float32 bits; below it float16 has multiples of 2^-24."""
F32_INFINITY = np.uint32(0x7F800000)


@jit
def encode_float16(values: Any, coded: Any, scale: Any) -> None:
    """coded = float16(values * scale), as bits: uint16 [N] from float32 [N]."""
    for i in range(values.size):
        scaled = np.float32(values[i] * scale)
        bits = scaled.view(np.uint32)
        size = np.uint32(bits & np.uint32(0x7FFFFFFF))
        # rebias the exponent by 127 - 15 and round away 13 bits; too large a number ends at infinity
        odd = np.uint32((size >> np.uint32(13)) & np.uint32(1))
        code = np.uint32((size - np.uint32(0x38000000) + np.uint32(0xFFF) + odd) >> np.uint32(13))
        code = min(code, np.uint32(0x7C00))
        # adding 0.5, whose last place is 2^-24, rounds a small number to a multiple of that
        small = (np.abs(scaled) + np.float32(0.5)) - np.float32(0.5)
        code = np.uint32(np.int32(small * np.float32(2.0**24))) if size < F16_LEAST_NORMAL else code
        code = np.uint32(0x7E00) if size > F32_INFINITY else code
        coded[i] = np.uint16(code | ((bits >> np.uint32(16)) & np.uint32(0x8000)))


@jit
def _float16(code: Any) -> Any:
    """Return the float32 with the value of a float16 code."""
    size = np.uint32(code & np.uint32(0x7FFF))
    bits = np.uint32((size << np.uint32(13)) + np.uint32(0x38000000))
    bits = np.uint32(bits + np.uint32(0x38000000)) if size >= np.uint32(0x7C00) else bits
    small = np.float32(np.float32(np.int32(size)) * np.float32(2.0**-24)).view(np.uint32)
    bits = small if size < np.uint32(0x400) else bits
    return np.uint32(bits | ((code & np.uint32(0x8000)) << np.uint32(16))).view(np.float32)


@jit
def decode_float16(coded: Any, values: Any, scale: Any) -> None:
    """values = float32(coded) * scale."""
    for i in range(values.size):
        values[i] = _float16(np.uint32(coded[i])) * scale


@jit
def encode_bfloat16(values: Any, coded: Any, scale: Any) -> None:
    """coded = bfloat16(values * scale), as bits: uint16 [N] from float32 [N]."""
    for i in range(values.size):
        bits = np.float32(values[i] * scale).view(np.uint32)
        odd = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
        code = np.uint32((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))
        quiet = np.uint32((bits >> np.uint32(16)) | np.uint32(0x40))
        coded[i] = np.uint16(quiet if np.uint32(bits & np.uint32(0x7FFFFFFF)) > F32_INFINITY else code)


@jit
def decode_bfloat16(coded: Any, values: Any, scale: Any) -> None:
    """values = float32(coded) * scale."""
    for i in range(values.size):
        values[i] = np.uint32(np.uint32(coded[i]) << np.uint32(16)).view(np.float32) * scale
