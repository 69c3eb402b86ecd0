"""Arithmetic on tuples of numbers in a thread's registers, as LLVM code; ``memory`` reads and writes them.

Every operation is rounded by itself (``mul.rn``): the compiler joins nothing, but for ``outer``, whose products are
added unrounded (fused multiply-add). ``simulated`` says the same in Python, for numba's simulator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from dpsim.kernels.allreduce.cuda.memory import F32, I64, unpack

_F64 = ir.DoubleType()


def _nearest(operation: str, builder: Any, *operands: Any) -> Any:
    """Return one operation of NVVM, rounded to nearest by itself."""
    number = operands[0].type
    name = f"llvm.nvvm.{operation}.rn.{'f' if number == F32 else 'd'}"
    kind = ir.FunctionType(number, [number] * len(operands))
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, operands)


def _definition(compute: Callable[..., Any], result: Any, *operands: Any) -> Any:
    """Return the signature and code of an operation on tuples, number by number.

    An operand that is one number goes with every one of the first's. ``result``: the type of what it returns, unless it
    is that of the first operand.
    """
    count, number = operands[0].count, operands[0].dtype
    are_tuples = [hasattr(operand, "count") for operand in operands]

    def code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        columns = [unpack(builder, a) if many else [a] * count for a, many in zip(args, are_tuples, strict=True)]
        results = [compute(builder, *each) for each in zip(*columns, strict=True)]
        return context.make_tuple(builder, sig.return_type, results)

    kinds = [operand if many else number for operand, many in zip(operands, are_tuples, strict=True)]
    return signature(types.UniTuple(result or number, count), *kinds), code


def _unary(compute: Callable[..., Any], result: Any = None) -> Any:
    @intrinsic
    def operation(typingctx, values):  # type: ignore[no-untyped-def]
        return _definition(compute, result, values)

    return operation


def _binary(compute: Callable[..., Any]) -> Any:
    @intrinsic
    def operation(typingctx, left, right):  # type: ignore[no-untyped-def]
        return _definition(compute, None, left, right)

    return operation


def _kept_where_positive(builder: Any, value: Any, test: Any) -> Any:
    zero = ir.Constant(F32, 0.0)
    return builder.select(builder.fcmp_ordered(">", test, zero), value, zero)


def _rectified(builder: Any, value: Any) -> Any:
    zero = ir.Constant(F32, 0.0)
    return builder.select(builder.fcmp_ordered("<=", value, zero), zero, value)


add = _binary(lambda builder, left, right: builder.fadd(left, right))
minus = _binary(lambda builder, left, right: builder.fsub(left, right))
multiply = _binary(functools.partial(_nearest, "mul"))
divide = _binary(functools.partial(_nearest, "div"))
root = _unary(functools.partial(_nearest, "sqrt"))
"""The square root of each number."""
widen = _unary(lambda builder, value: builder.fpext(value, _F64), types.float64)
"""The same numbers in float64."""
narrow = _unary(lambda builder, value: builder.fptrunc(value, F32), types.float32)
"""The nearest numbers in float32."""
keep_positive = _binary(_kept_where_positive)
"""Each value whose test is > 0, else 0."""
rectify = _unary(_rectified)
"""max(value, 0) of each; NaN stays NaN."""


@intrinsic
def square_bits(typingctx, value):  # type: ignore[no-untyped-def]
    """Return the bits of the square of a number, in float64."""

    def code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        number = builder.fpext(args[0], ir.DoubleType()) if args[0].type == F32 else args[0]
        return builder.bitcast(_nearest("mul", builder, number, number), I64)

    return signature(types.int64, value), code


@functools.cache
def outer(rows: int, lanes: int, lane: int) -> Any:
    """outer(sums, left, right): sums[r, q] + left[r, lane] right[q], rounded once.

    ``sums`` has ``rows`` times as many numbers as ``right``, and ``left`` has ``rows`` times ``lanes``.
    """

    @intrinsic
    def added(typingctx, sums, left, right):  # type: ignore[no-untyped-def]
        def code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            totals, lefts, rights = (unpack(builder, arg) for arg in args)
            results = [
                _nearest("fma", builder, lefts[row * lanes + lane], number, totals[row * len(rights) + at])
                for row in range(rows)
                for at, number in enumerate(rights)
            ]
            return context.make_tuple(builder, sig.return_type, results)

        return signature(sums, sums, left, right), code

    return added


@functools.cache
def part(first: int, count: int) -> Any:
    """part(values): ``count`` of them from number ``first`` on."""

    @intrinsic
    def taken(typingctx, values):  # type: ignore[no-untyped-def]
        def code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return context.make_tuple(builder, sig.return_type, unpack(builder, args[0])[first : first + count])

        return signature(types.UniTuple(values.dtype, count), values), code

    return taken
