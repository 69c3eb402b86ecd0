"""Arithmetic on tuples of float32 numbers in a thread's registers, as LLVM code; ``allreduce.cuda.memory`` has more.

Every operation is rounded by itself, but for ``outer``, whose products are added unrounded (fused multiply-add).
``registers_simulated`` says the same in Python, for numba's simulator.
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from dpsim.kernels.allreduce.cuda.memory import F32

_F64 = ir.DoubleType()


def _unpack(builder: Any, values: Any) -> list[Any]:
    return [builder.extract_value(values, i) for i in range(values.type.count)]


def _each(kind: Any, compute: Any) -> Any:
    """The signature and code of an operation on one or two tuples, number by number; ``kind``: what it returns."""

    def code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        numbers = zip(*(_unpack(builder, arg) for arg in args), strict=True)
        return context.make_tuple(builder, sig.return_type, [compute(builder, *each) for each in numbers])

    return kind, code


@functools.cache
def outer(rows: int, lanes: int, lane: int) -> Any:
    """outer(sums, left, right): sums[r, q] + left[r, lane] right[q], rounded once.

    ``sums`` has ``rows`` times as many numbers as ``right``, and ``left`` has ``rows`` times ``lanes``.
    """

    @intrinsic
    def added(typingctx, sums, left, right):  # type: ignore[no-untyped-def]
        def code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            name = "llvm.nvvm.fma.rn.f"
            function = builder.module.globals.get(name) or ir.Function(
                builder.module, ir.FunctionType(F32, [F32, F32, F32]), name
            )
            totals, lefts, rights = (_unpack(builder, arg) for arg in args)
            results = [
                builder.call(function, [lefts[row * lanes + lane], number, totals[row * len(rights) + place]])
                for row in range(rows)
                for place, number in enumerate(rights)
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
            return context.make_tuple(builder, sig.return_type, _unpack(builder, args[0])[first : first + count])

        return signature(types.UniTuple(values.dtype, count), values), code

    return taken


@intrinsic
def minus(typingctx, left, right):  # type: ignore[no-untyped-def]
    """left - right, number by number."""
    kind, code = _each(left, lambda builder, a, b: builder.fsub(a, b))
    return signature(kind, left, right), code


@intrinsic
def widen(typingctx, values):  # type: ignore[no-untyped-def]
    """The same numbers in float64."""
    kind, code = _each(types.UniTuple(types.float64, values.count), lambda builder, value: builder.fpext(value, _F64))
    return signature(kind, values), code


@intrinsic
def narrow(typingctx, values):  # type: ignore[no-untyped-def]
    """The nearest numbers in float32."""
    kind, code = _each(types.UniTuple(types.float32, values.count), lambda builder, value: builder.fptrunc(value, F32))
    return signature(kind, values), code


@intrinsic
def keep_positive(typingctx, values, tests):  # type: ignore[no-untyped-def]
    """Each value whose test is > 0, else 0."""
    zero = ir.Constant(F32, 0.0)
    kind, code = _each(
        values, lambda builder, value, test: builder.select(builder.fcmp_ordered(">", test, zero), value, zero)
    )
    return signature(kind, values, tests), code


@intrinsic
def rectify(typingctx, values):  # type: ignore[no-untyped-def]
    """max(value, 0) of each; NaN stays NaN."""
    zero = ir.Constant(F32, 0.0)
    kind, code = _each(
        values, lambda builder, value: builder.select(builder.fcmp_ordered("<=", value, zero), zero, value)
    )
    return signature(kind, values), code
