"""What kernels do with memory, as LLVM code: 128-bit accesses, sums of several numbers at once.

Addresses are integers (int64). ``lanes`` numbers of one dtype travel together, as a tuple: one, or as many as fill
16-byte accesses, one or more, whose addresses must be multiples of 16. 16-bit numbers are float32 once they are read.
``simulated`` says the same in Python, for numba's simulator.
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from dpsim.kernels.allreduce.tree import Tree, fold
from dpsim.units import ITEM_BYTES

I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
STORED = {"float16": ir.HalfType(), "bfloat16": I16, "float32": F32, "float64": ir.DoubleType()}
PIECE = ir.VectorType(I32, 4)
"""One 16-byte access."""
_SIXTEEN, _UPPER, _LOWER = (ir.Constant(I32, value) for value in (16, 0xFFFF0000, 0xFFFF))
_GLOBAL = 1  # NVVM's number for device memory


def added_in(dtype: str) -> Any:
    """Return the type that numbers of ``dtype`` are added in."""
    return types.float64 if dtype == "float64" else types.float32


def _lanes_of(dtype: str, lanes: int) -> Any:
    return types.UniTuple(added_in(dtype), lanes)


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, ir.PointerType(kind, _GLOBAL))


def _read(builder: Any, address: Any, stored: Any, size: int, lanes: int) -> list[Any]:
    """Read ``lanes`` values of an LLVM type of ``size`` bytes."""
    if lanes == 1:
        return [builder.load(_pointer(builder, address, stored), align=size)]
    values = []
    for piece in range(lanes * size // 16):
        at = builder.add(address, ir.Constant(I64, 16 * piece))
        loaded = builder.load(_pointer(builder, at, PIECE), align=16)
        vector = builder.bitcast(loaded, ir.VectorType(stored, 16 // size))
        values += [builder.extract_element(vector, ir.Constant(I32, i)) for i in range(16 // size)]
    return values


def _write(builder: Any, address: Any, values: list[Any], stored: Any, size: int) -> None:
    if len(values) == 1:
        builder.store(values[0], _pointer(builder, address, stored), align=size)
        return
    per_piece = 16 // size
    for piece in range(len(values) // per_piece):
        vector = ir.Constant(ir.VectorType(stored, per_piece), ir.Undefined)
        for i in range(per_piece):
            vector = builder.insert_element(vector, values[piece * per_piece + i], ir.Constant(I32, i))
        at = builder.add(address, ir.Constant(I64, 16 * piece))
        builder.store(builder.bitcast(vector, PIECE), _pointer(builder, at, PIECE), align=16)


def _words(builder: Any, address: Any, lanes: int) -> list[tuple[Any, Any]]:
    """Return (even, odd) 16-bit values of each 32-bit word, both in an i32's upper half; of one value (value, None).

    Vectors of 16-bit integers are not used: LLVM would split their 16-byte accesses.
    """
    if lanes == 1:
        return [(_shifted(builder, builder.zext(_read(builder, address, I16, 2, 1)[0], I32)), None)]
    words = _read(builder, address, I32, 4, lanes // 2)
    return [(_shifted(builder, word), builder.and_(word, _UPPER)) for word in words]


def _shifted(builder: Any, value: Any) -> Any:
    return builder.shl(value, _SIXTEEN)


def _loaded(builder: Any, dtype: str, lanes: int, address: Any) -> list[Any]:
    """Return numbers as they are added."""
    if dtype == "bfloat16":
        pairs = _words(builder, address, lanes)
        return [builder.bitcast(value, F32) for pair in pairs for value in pair if value is not None]
    values = _read(builder, address, STORED[dtype], ITEM_BYTES[dtype], lanes)
    return [builder.fpext(value, F32) for value in values] if dtype == "float16" else values


def _rounded(builder: Any, dtype: str, values: list[Any]) -> tuple[list[Any], Any, int]:
    """Return what is stored of numbers, its LLVM type and size: the nearest, of two equally near the even one."""
    if dtype == "float16":
        values = [builder.fptrunc(value, ir.HalfType()) for value in values]
    elif dtype == "bfloat16" and len(values) == 1:
        values = [builder.call(_assembly(I16, [F32], "cvt.rn.bf16.f32 $0, $1;", "=h,f"), values)]
    elif dtype == "bfloat16":
        both = _assembly(I32, [F32, F32], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f")
        pairs = zip(values[::2], values[1::2], strict=True)
        return [builder.call(both, [odd, even]) for even, odd in pairs], I32, 4
    return values, STORED[dtype], ITEM_BYTES[dtype]


def _assembly(result: Any, arguments: list[Any], text: str, constraints: str) -> Any:
    return ir.InlineAsm(ir.FunctionType(result, arguments), text, constraints)


def unpack(builder: Any, values: Any) -> list[Any]:
    return [builder.extract_value(values, i) for i in range(values.type.count)]


@functools.cache
def load(dtype: str, lanes: int) -> Any:
    """load(address): the numbers there."""

    @intrinsic
    def read(typingctx, address):  # type: ignore[no-untyped-def]
        def code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return context.make_tuple(builder, sig.return_type, _loaded(builder, dtype, lanes, args[0]))

        return signature(_lanes_of(dtype, lanes), types.int64), code

    return read


@functools.cache
def store(dtype: str, lanes: int) -> Any:
    """store(address, numbers): rounded to ``dtype``."""

    @intrinsic
    def write(typingctx, address, values):  # type: ignore[no-untyped-def]
        def code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            _write(builder, args[0], *_rounded(builder, dtype, unpack(builder, args[1])))
            return context.get_dummy_value()

        return signature(types.void, types.int64, _lanes_of(dtype, lanes)), code

    return write


@functools.cache
def store_each(dtype: str, lanes: int) -> Any:
    """store_each(addresses, offset, numbers): at each address + offset."""

    @intrinsic
    def write(typingctx, addresses, offset, values):  # type: ignore[no-untyped-def]
        def code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            rounded = _rounded(builder, dtype, unpack(builder, args[2]))
            for address in unpack(builder, args[0]):
                _write(builder, builder.add(address, args[1]), *rounded)
            return context.get_dummy_value()

        return signature(types.void, addresses, types.int64, _lanes_of(dtype, lanes)), code

    return write


@functools.cache
def load_halves(lanes: int) -> Any:
    """load_halves(upper, lower): float32 numbers whose upper and lower 16 bits lie apart."""

    @intrinsic
    def read(typingctx, upper, lower):  # type: ignore[no-untyped-def]
        def code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            above, below = (
                [value for pair in _words(builder, address, lanes) for value in pair if value is not None]
                for address in args
            )
            bits = [builder.or_(a, builder.lshr(b, _SIXTEEN)) for a, b in zip(above, below, strict=True)]
            return context.make_tuple(builder, sig.return_type, [builder.bitcast(value, F32) for value in bits])

        return signature(types.UniTuple(types.float32, lanes), types.int64, types.int64), code

    return read


@functools.cache
def store_halves(lanes: int) -> Any:
    """store_halves(upper, lower, numbers): the other way."""

    @intrinsic
    def write(typingctx, upper, lower, values):  # type: ignore[no-untyped-def]
        def code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            bits = [builder.bitcast(value, I32) for value in unpack(builder, args[2])]
            above = [builder.lshr(value, _SIXTEEN) for value in bits]
            below = [builder.and_(value, _LOWER) for value in bits]
            for address, halves in zip(args, (above, below), strict=False):
                if lanes == 1:
                    _write(builder, address, [builder.trunc(halves[0], I16)], I16, 2)
                else:
                    pairs = zip(halves[::2], halves[1::2], strict=True)
                    words = [builder.or_(even, _shifted(builder, odd)) for even, odd in pairs]
                    _write(builder, address, words, I32, 4)
            return context.get_dummy_value()

        return signature(types.void, types.int64, types.int64, types.UniTuple(types.float32, lanes)), code

    return write


def _as_stored(builder: Any, dtype: str, values: list[Any]) -> list[Any]:
    """Return 16-bit numbers as they would be read again after being stored."""
    rounded, _, _ = _rounded(builder, dtype, values)
    if dtype == "float16":
        return [builder.fpext(value, F32) for value in rounded]
    if len(values) == 1:
        return [builder.bitcast(_shifted(builder, builder.zext(rounded[0], I32)), F32)]
    halves = ((_shifted(builder, word), builder.and_(word, _UPPER)) for word in rounded)
    return [builder.bitcast(value, F32) for pair in halves for value in pair]


@functools.cache
def total(dtype: str, lanes: int, tree: Tree, each_sum: bool = False) -> Any:
    """total(addresses, offset): the sum along the tree of what lies at each slot's address + offset.

    With ``each_sum`` the sum of every two is rounded to ``dtype``, which has 16 bits.
    """

    @intrinsic
    def read(typingctx, addresses, offset):  # type: ignore[no-untyped-def]
        def code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            def slot(number: int) -> list[Any]:
                return _loaded(builder, dtype, lanes, builder.add(builder.extract_value(args[0], number), args[1]))

            def add(left: list[Any], right: list[Any]) -> list[Any]:
                sums = [builder.fadd(a, b) for a, b in zip(left, right, strict=True)]
                return _as_stored(builder, dtype, sums) if each_sum else sums

            return context.make_tuple(builder, sig.return_type, fold(tree, slot, add))

        return signature(_lanes_of(dtype, lanes), addresses, types.int64), code

    return read
