"""Rounding float32 numbers to 16 bits in vector code: an array, or the sum of two, read once and written once.

``scale`` is a power of two: numbers are rounded as that many times themselves, which changes no digit, and stay
float32. What is rounded already is not changed (a NaN stays one).
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numpy.typing import NDArray

from dpsim.kernels.cache import compiled
from dpsim.kernels.vector import Element, Kernel, Value

Array = NDArray[Any]

_INT = ir.IntType(32)


def round_array(x: Array, dtype: str, scale: float, out: Array) -> None:
    """out = x rounded to ``dtype``, float16 or bfloat16; ``out`` may be ``x``."""
    _round(dtype)(x, out, x.size, scale, 1 / scale)


def round_sum(a: Array, b: Array, dtype: str, scale: float, out: Array) -> None:
    """out = a + b in float32, rounded to ``dtype``; ``out`` may be one of them."""
    _round_sum(dtype)(a, b, out, a.size, scale, 1 / scale)


@compiled
def _round(dtype: str) -> Kernel:
    kernel = Kernel("float32", ("x", "out"), ("size",), ("down", "up"))

    def body(e: Element) -> None:
        e["out"] = rounded(e["x"] * e.number("down"), dtype) * e.number("up")

    kernel.elementwise(kernel["size"], body)
    return kernel


@compiled
def _round_sum(dtype: str) -> Kernel:
    kernel = Kernel("float32", ("a", "b", "out"), ("size",), ("down", "up"))

    def body(e: Element) -> None:
        e["out"] = rounded((e["a"] + e["b"]) * e.number("down"), dtype) * e.number("up")

    kernel.elementwise(kernel["size"], body)
    return kernel


def rounded(value: Value, compression: str) -> Value:
    """Round float32 numbers to float16 or bfloat16, ties to even, as ``kernels.compression`` encodes and decodes."""
    kernel, build = value.kernel, value.kernel.builder
    vector = isinstance(value.ir.type, ir.VectorType)
    kind = ir.VectorType(_INT, value.ir.type.count) if vector else _INT

    def constant(number: int) -> Any:
        return ir.Constant(kind, [ir.Constant(_INT, number)] * kind.count) if vector else ir.Constant(kind, number)

    def cut(bits: Any, places: int) -> Any:
        """Round away the last ``places`` bits."""
        odd = build.and_(build.lshr(bits, constant(places)), constant(1))
        nearest = build.add(build.add(bits, constant((1 << (places - 1)) - 1)), odd)
        return build.and_(nearest, constant(-(1 << places) & 0xFFFF_FFFF))

    bits = build.bitcast(value.ir, kind)
    size = build.and_(bits, constant(0x7FFF_FFFF))
    sign = build.and_(bits, constant(0x8000_0000))
    nan = build.icmp_unsigned(">", size, constant(0x7F80_0000))
    if compression == "bfloat16":
        quiet = build.and_(build.or_(bits, constant(0x0040_0000)), constant(0xFFFF_0000))
        result = build.select(nan, quiet, cut(bits, 16))
    else:
        large = cut(size, 13)
        infinite = build.icmp_unsigned(">=", large, constant(0x4780_0000))  # 65536: what rounds to it or more
        large = build.select(infinite, constant(0x7F80_0000), large)
        positive = Value(kernel, build.bitcast(size, value.ir.type))
        # adding 0.5, whose last place is 2^-24, rounds a small number to a multiple of that
        small = build.bitcast(((positive + 0.5) - 0.5).ir, kind)
        least_normal = build.icmp_unsigned("<", size, constant(0x3880_0000))
        result = build.select(least_normal, small, large)
        result = build.or_(build.select(nan, constant(0x7FC0_0000), result), sign)
    return Value(kernel, build.bitcast(result, value.ir.type))
