"""Flags in device memory by which blocks of different ranks wait for each other, and other words that kernels read.

Block b of every rank does the same elements. So only the n blocks b wait for each other, each at a point of its own:
rank r writes the number of the point into word (b, r) of every rank's flags with release, then polls words (b, 0) to
(b, n - 1) of its own flags with acquire. What a block wrote before its release is seen by whoever acquired it. Points
are numbered on from launch to launch, modulo 2^32; word (b, n) keeps how far block b came. A peer can be ahead by one
point, never more: it passes no point before all have come to it. To Python a word is an int64 from 0 to 2^32 - 1.

Before the flags of a rank lie ``HEADER_WORDS`` words. The first is the abort word: as long as it is 0 kernels wait, and
once it is not they end. A kernel that has waited too long writes it on every rank.
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

I32, I64, VOID = ir.IntType(32), ir.IntType(64), ir.VoidType()
_GLOBAL = 1


@functools.cache
def release(scope: str) -> Any:
    """release(address, value): write a flag after everything that this thread, or its block before a barrier, wrote."""

    @intrinsic
    def write(typingctx, address, value):  # type: ignore[no-untyped-def]
        def code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            # blocks that wait for each other must all be running: only a cooperative launch sees to that
            context.active_code_library.use_cooperative = True
            kind = ir.FunctionType(VOID, [I64, I32])
            text = f"st.release.{scope}.global.u32 [$0], $1;"
            address, value = args
            write = ir.InlineAsm(kind, text, "l,r,~{memory}", side_effect=True)
            builder.call(write, [address, builder.trunc(value, I32)])
            return context.get_dummy_value()

        return signature(types.void, types.int64, types.int64), code

    return write


@functools.cache
def acquire(scope: str) -> Any:
    """acquire(address): read a flag before anything that comes after. Never hoisted, never merged."""

    @intrinsic
    def read(typingctx, address):  # type: ignore[no-untyped-def]
        def code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            kind = ir.FunctionType(I32, [I64])
            text = f"ld.acquire.{scope}.global.u32 $0, [$1];"
            seen = builder.call(ir.InlineAsm(kind, text, "=r,l,~{memory}", side_effect=True), args)
            return builder.zext(seen, I64)

        return signature(types.int64, types.int64), code

    return read


@intrinsic
def read_word(typingctx, address):  # type: ignore[no-untyped-def]
    """Read a word, in no order with anything."""

    def code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.zext(builder.load(builder.inttoptr(args[0], ir.PointerType(I32, _GLOBAL)), align=4), I64)

    return signature(types.int64, types.int64), code


@intrinsic
def write_word(typingctx, address, value):  # type: ignore[no-untyped-def]
    """Write a word, in no order with anything."""

    def code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.PointerType(I32, _GLOBAL))
        builder.store(builder.trunc(args[1], I32), pointer, align=4)
        return context.get_dummy_value()

    return signature(types.void, types.int64, types.int64), code


@intrinsic
def read_address(typingctx, address):  # type: ignore[no-untyped-def]
    """Read an int64 of a table."""

    def code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], ir.PointerType(I64, _GLOBAL)), align=8)

    return signature(types.int64, types.int64), code


@intrinsic
def nanoseconds(typingctx):  # type: ignore[no-untyped-def]
    """Return the GPU's clock in nanoseconds; another GPU's may show another time."""

    def code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        read = ir.InlineAsm(ir.FunctionType(I64, []), "mov.u64 $0, %globaltimer;", "=l", side_effect=True)
        return builder.call(read, [])

    return signature(types.int64), code
