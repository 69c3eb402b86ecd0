"""A compiled function that executes a rank's program: its sums in vector code, its signals and waits as atomics.

Memory ordering. ``Arrive`` stores the rank's flag with release semantics, ``Wait`` loads another's with acquire: what
a rank read or wrote before it arrived has happened before whatever another does after it saw that (C11 5.1.2.4), also
through a third rank. Flags only ever grow, so one that has passed the awaited count stays past it. Gradients
themselves are plain memory: ``steps.programs`` puts an arrival and a wait between any two accesses that collide.
x86 keeps this order by itself and the compiler must too; on other processors LLVM emits what it takes.

A wait gives up after a number of polls and the function returns; called again, it goes on where it was. So no rank
waits in machine code for ever, Ctrl-C works, and an allreduce can make progress between other work.
"""

from __future__ import annotations

import platform
from typing import Any, NamedTuple

import llvmlite.ir as ir
from llvmlite.ir.instructions import StoreAtomicInstr

from dpsim.kernels.allreduce.tree import Tree, fold
from dpsim.kernels.cache import compiled
from dpsim.kernels.rounding import rounded
from dpsim.kernels.vector import Element, Kernel, Value

END, ARRIVE, WAIT, TURN, SUMS = range(5)
"""Operations of a program, each a run of words: END arrivals turn; ARRIVE count; WAIT flag count; TURN skip (jump so
many words in every other turn); SUMS + kind: elements, addresses of the sources and the outputs."""

PLACE, COUNTERS, FLAG, PROGRAM, YIELD, LOOKS_AT, NUMBERS_AT, STATE_WORDS = range(8)
"""Words of a program's state: where in the program it is; the addresses of the group's two counters (arrivals so far,
turn), of this rank's flag, of the program and of a function for a waiting rank to call (0: none); how often a wait
polls before it gives up; the address of the numbers."""

SCALE, UP, DOWN = range(3)
"""The numbers that kinds of sums read: of the scaling, and of the 16-bit wire (``dpsim.comm.compression``)."""

_INDEX, _INT = ir.IntType(64), ir.IntType(32)
_LOOKS_BEFORE_YIELD = 16


class Kind(NamedTuple):
    """A kind of sum as vector code: its tree, how many sources and outputs it has, and what is fused with it.

    ``compression``: 16 bits, to which the sources and the whole sum are rounded; with ``each_sum`` every sum of two is,
    and the sources are already.
    """

    tree: Tree
    sources: int
    outputs: int
    scaled: bool = False
    compression: str = ""
    each_sum: bool = False


@compiled
def interpreter(dtype: str, kinds: tuple[Kind, ...]) -> Kernel:
    """Return ``(address of the state) -> 0 when the program has ended, 1 when a wait gave up``."""
    kernel = Kernel(dtype, ("state",), returns_index=True)
    build = kernel.builder
    state, pointer = kernel["state"].ir, ir.PointerType()

    def word(base: Any, at: Any) -> Any:
        address = build.gep(base, [at if isinstance(at, ir.Value) else ir.Constant(_INDEX, at)], source_etype=_INDEX)
        return build.load(address, typ=_INDEX, align=8)

    def at_address(number: Any) -> Any:
        return build.inttoptr(number, pointer)

    def number(value: int) -> Any:
        return ir.Constant(_INDEX, value)

    program_position = build.alloca(_INDEX)
    build.store(word(state, PLACE), program_position)
    counters, own = at_address(word(state, COUNTERS)), at_address(word(state, FLAG))
    program = at_address(word(state, PROGRAM))
    kernel["numbers"] = Value(kernel, at_address(word(state, NUMBERS_AT)))
    kernel["looks"] = Value(kernel, word(state, LOOKS_AT))
    before, turn = word(counters, 0), word(counters, 1)
    for index, name in ((SCALE, "scale"), (UP, "up"), (DOWN, "down")):
        kernel[name] = kernel.load_number(kernel["numbers"], index)
    head = build.append_basic_block("operation")
    build.branch(head)
    build.position_at_end(head)
    here = build.load(program_position, typ=_INDEX)

    def argument(n: int) -> Any:
        return word(program, build.add(here, number(1 + n)))

    def go_on(words: Any) -> None:
        build.store(build.add(here, words if isinstance(words, ir.Value) else number(words)), program_position)
        build.branch(head)

    blocks = {op: build.append_basic_block() for op in range(END, SUMS + len(kinds))}
    never = build.append_basic_block()
    choice = build.switch(word(program, here), never)
    for op, block in blocks.items():
        choice.add_case(number(op), block)
    build.position_at_end(never)
    build.unreachable()

    build.position_at_end(blocks[END])
    build.store(build.add(before, argument(0)), counters, align=8)
    after = build.gep(counters, [number(1)], source_etype=_INDEX)
    build.store(build.xor(turn, argument(1)), after, align=8)
    build.store(number(0), state, align=8)
    build.ret(number(0))

    build.position_at_end(blocks[ARRIVE])
    _store_release(kernel, build.add(before, argument(0)), own)
    go_on(2)

    build.position_at_end(blocks[WAIT])
    flag, target, others = at_address(argument(0)), build.add(before, argument(1)), word(state, YIELD)
    _wait(kernel, flag, target, others, give_up=(here, state))
    go_on(3)

    build.position_at_end(blocks[TURN])
    odd = build.icmp_unsigned("!=", turn, number(0))
    go_on(build.select(odd, build.add(number(2), argument(0)), number(2)))

    for position, kind in enumerate(kinds):
        build.position_at_end(blocks[SUMS + position])
        names = [*(f"in{i}" for i in range(kind.sources)), *(f"out{i}" for i in range(kind.outputs))]
        for index, name in enumerate(names):
            kernel[name] = Value(kernel, at_address(argument(1 + index)))
        kernel.elementwise(Value(kernel, argument(0)), lambda e, kind=kind: _sum(e, kind))  # type: ignore[misc]
        go_on(2 + len(names))
    return kernel


def _store_release(kernel: Kernel, value: Any, address: Any) -> None:
    """Build a store_atomic for opaque pointers, which llvmlite 0.50 does not know."""
    kernel.builder._insert(StoreAtomicInstr(kernel.builder.block, value, address, "release", 8))


def _wait(kernel: Kernel, flag: Any, target: Any, let_others: Any, give_up: tuple[Any, Any]) -> None:
    """Poll a flag until it has reached the target. After too many polls, store the place in ``give_up`` and return 1.

    ``let_others``: the address of a function to call between polls, after the first few; or 0.
    """
    build = kernel.builder
    entry = build.block
    look, again, over, done = (build.append_basic_block(part) for part in ("look", "again", "over", "done"))
    build.branch(look)
    build.position_at_end(look)
    looks = build.phi(_INDEX)
    looks.add_incoming(ir.Constant(_INDEX, 0), entry)
    seen = build.load_atomic(flag, "acquire", 8, typ=_INDEX)
    build.cbranch(build.icmp_signed(">=", seen, target), done, again)
    build.position_at_end(again)
    _pause(kernel)
    more = build.add(looks, ir.Constant(_INDEX, 1))
    patient = build.icmp_signed(">", more, ir.Constant(_INDEX, _LOOKS_BEFORE_YIELD))
    with build.if_then(build.and_(patient, build.icmp_unsigned("!=", let_others, ir.Constant(_INDEX, 0)))):
        build.call(build.inttoptr(let_others, ir.FunctionType(_INT, []).as_pointer()), [])
    looks.add_incoming(more, build.block)
    build.cbranch(build.icmp_signed("<", more, kernel["looks"].ir), look, over)
    build.position_at_end(over)
    here, state = give_up
    build.store(here, state, align=8)
    build.ret(ir.Constant(_INDEX, 1))
    build.position_at_end(done)


def _pause(kernel: Kernel) -> None:
    """Tell the processor that this is a waiting loop."""
    machine = platform.machine()
    if machine in ("x86_64", "AMD64"):
        kind = ir.FunctionType(ir.VoidType(), [])
        kernel.builder.call(kernel.module.declare_intrinsic("llvm.x86.sse2.pause", (), kind), [])
    elif machine == "aarch64":
        kind = ir.FunctionType(ir.VoidType(), [_INT])
        yield_hint = ir.Constant(_INT, 1)
        kernel.builder.call(kernel.module.declare_intrinsic("llvm.aarch64.hint", (), kind), [yield_hint])


def _sum(e: Element, kind: Kind) -> None:
    """Build the sum of one element of all outputs."""

    def narrow(value: Value) -> Value:
        return rounded(value * e.number("down"), kind.compression) * e.number("up")

    def add(a: Value, b: Value) -> Value:
        return narrow(a + b) if kind.each_sum else a + b

    at_ends = kind.compression and not kind.each_sum
    total = fold(kind.tree, lambda index: narrow(e[f"in{index}"]) if at_ends else e[f"in{index}"], add)
    if at_ends:
        total = narrow(total)
    if kind.scaled:
        total = total * e.number("scale")
    for output in range(kind.outputs):
        e[f"out{output}"] = total
