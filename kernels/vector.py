"""Writes a kernel in vector code: Python that runs once, and in which arithmetic on ``Value``s emits LLVM instructions.

LLVM vectorises few of the loops that matter here (a convolution left to it runs 25 times slower), so a kernel says
itself what lies in a vector register. Its text depends on its specification and the width of a register alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import llvmlite.ir as ir
import numpy as np
from numpy.typing import DTypeLike

from dpsim import processor

_INDEX = ir.IntType(64)
_BYTE = ir.IntType(8)
_NUMBERS = {"float32": ir.FloatType(), "float64": ir.DoubleType()}
_NAME = "the kernel"
_FEATURES = processor.features()
_VECTOR_BYTES = 64 if _FEATURES.get("avx512f") else 32 if _FEATURES.get("avx2") else 16

ACCUMULATORS = 16 if _VECTOR_BYTES == 64 else 12
"""Sums a kernel may keep in registers at once, of the 32 or 16 there are."""


WIDE = _VECTOR_BYTES == 64
"""Whether there are 32 vector registers of 64 bytes, not 16 of fewer."""


def lanes(dtype: DTypeLike) -> int:
    """Return numbers in a vector register."""
    return _VECTOR_BYTES // np.dtype(dtype).itemsize


def balanced(total: int, most: int) -> int:
    """Return the size of the fewest equal parts of ``total`` of at most ``most``; 5 in parts of up to 4: 3."""
    parts = -(-total // most)
    return -(-total // parts)


def even_parts(total: int, most: int) -> list[tuple[int, int, int]]:
    """Return (start, end, size) of runs of parts of ``total``: as few as possible, sizes differing by 1 at most.

    32 in parts of up to 6 are two of 6 and four of 5: (0, 12, 6) and (12, 32, 5).
    """
    parts = -(-total // most)
    size, larger = divmod(total, parts)
    end = larger * (size + 1)
    return [run for run in ((0, end, size + 1), (end, total, size)) if run[0] < run[1]]


class Value:
    """An index, a number, a vector of numbers or a mask, known when the kernel runs."""

    def __init__(self, kernel: Kernel, value: Any) -> None:
        self.kernel, self.ir = kernel, value

    def _binary(self, other: Value | float, index_operation: str, operation: str) -> Value:
        right = self.kernel.constant(other, self.ir.type)
        name = index_operation if self.ir.type == _INDEX else operation
        return Value(self.kernel, getattr(self.kernel.builder, name)(self.ir, right))

    def __add__(self, other: Value | float) -> Value:
        return self._binary(other, "add", "fadd")

    def __sub__(self, other: Value | float) -> Value:
        return self._binary(other, "sub", "fsub")

    def __mul__(self, other: Value | float) -> Value:
        return self._binary(other, "mul", "fmul")

    def __truediv__(self, other: Value | float) -> Value:
        return self._binary(other, "", "fdiv")

    def __floordiv__(self, other: Value | int) -> Value:
        """Of indices that are not negative."""
        return self._binary(other, "sdiv", "")

    def __mod__(self, other: Value | int) -> Value:
        """Of indices that are not negative."""
        return self._binary(other, "srem", "")

    def _compare(self, sign: str, other: Value | float) -> Value:
        build, right = self.kernel.builder, self.kernel.constant(other, self.ir.type)
        compare = build.icmp_signed if self.ir.type == _INDEX else build.fcmp_ordered
        return Value(self.kernel, compare(sign, self.ir, right))

    def __lt__(self, other: Value | float) -> Value:
        return self._compare("<", other)

    def __gt__(self, other: Value | float) -> Value:
        """False where either is NaN."""
        return self._compare(">", other)

    def __le__(self, other: Value | float) -> Value:
        """False where either is NaN."""
        return self._compare("<=", other)

    def choose(self, yes: Value | float, no: Value | float) -> Value:
        """Return ``yes`` where this mask is set, else ``no``; one of them is a ``Value``."""
        kind = yes.ir.type if isinstance(yes, Value) else no.ir.type  # type: ignore[union-attr]
        yes, no = self.kernel.constant(yes, kind), self.kernel.constant(no, kind)
        return Value(self.kernel, self.kernel.builder.select(self.ir, yes, no))

    def at_least(self, other: Value | int) -> Value:
        """Return the larger of two indices."""
        return (self < other).choose(other, self)

    def at_most(self, other: Value | int) -> Value:
        """Return the smaller of two indices."""
        return (self > other).choose(other, self)

    def sqrt(self) -> Value:
        return self.kernel.square_root(self)

    def as_number(self) -> Value:
        """Return an index as a floating-point number."""
        return Value(self.kernel, self.kernel.builder.sitofp(self.ir, self.kernel.number))


class Variable:
    """A value that changes while the kernel runs, such as a sum; it lives in a register."""

    def __init__(self, kernel: Kernel, first: Value) -> None:
        self._kernel, self._type = kernel, first.ir.type
        with kernel.builder.goto_entry_block():
            self._place = kernel.builder.alloca(self._type)
        self.set(first)

    def set(self, value: Value) -> None:
        self._kernel.builder.store(value.ir, self._place)

    def get(self) -> Value:
        return Value(self._kernel, self._kernel.builder.load(self._place, typ=self._type))

    def add(self, value: Value) -> None:
        self.set(self.get() + value)

    def add_product(self, a: Value, b: Value) -> None:
        """Add a * b, rounded once."""
        self.set(self._kernel.fma(a, b, self.get()))


class Kernel:
    """A function being written. Its arguments are arrays of ``dtype``, then indices, then numbers of ``dtype``.

    One that ``returns_index`` ends its blocks itself.
    """

    def __init__(
        self,
        dtype: DTypeLike,
        arrays: tuple[str, ...],
        indices: tuple[str, ...] = (),
        numbers: tuple[str, ...] = (),
        *,
        returns_index: bool = False,
    ) -> None:
        self.dtype = np.dtype(dtype)
        self.lanes = lanes(dtype)
        self.number = _NUMBERS[self.dtype.name]
        self._vector = ir.VectorType(self.number, self.lanes)
        self._alignment = ir.Constant(ir.IntType(32), self.dtype.itemsize)
        """An argument of masked loads and stores up to LLVM 21; newer ones read it as well."""
        self.signature = "p" * len(arrays) + "i" * len(indices) + self.dtype.char * len(numbers) + ">i" * returns_index
        types = [*[ir.PointerType()] * len(arrays), *[_INDEX] * len(indices), *[self.number] * len(numbers)]
        """Types of the arguments, a letter each: p pointer, i index, f and d numbers; after > that of the result."""
        self.module = ir.Module()
        self._result = _INDEX if returns_index else ir.VoidType()
        function = ir.Function(self.module, ir.FunctionType(self._result, types), _NAME)
        self.builder = ir.IRBuilder(function.append_basic_block("entry"))
        names = (*arrays, *indices, *numbers)
        self._arguments = {n: Value(self, argument) for n, argument in zip(names, function.args, strict=True)}

    def text(self, symbol: str) -> str:
        """Return the finished kernel as LLVM assembly, a function of that name. Write nothing more to it."""
        if self._result != _INDEX:
            self.builder.ret_void()
        return str(self.module).replace(f'@"{_NAME}"', f'@"{symbol}"')

    def __getitem__(self, argument: str) -> Value:
        return self._arguments[argument]

    def __setitem__(self, argument: str, value: Value) -> None:
        """Give a value a name, as if it were an argument."""
        self._arguments[argument] = value

    def constant(self, value: Value | float, kind: Any) -> Any:
        """Return ``value`` as an LLVM value of a type; a number fills all lanes of a vector."""
        if isinstance(value, Value):
            return value.ir
        if isinstance(kind, ir.VectorType):
            return ir.Constant(kind, [ir.Constant(kind.element, value)] * kind.count)
        return ir.Constant(kind, value)

    def vector(self, value: Value | float) -> Value:
        """Return a vector with ``value`` in every lane."""
        if not isinstance(value, Value):
            return Value(self, self.constant(value, self._vector))
        lane, nothing = ir.IntType(32), ir.Constant(self._vector, ir.Undefined)
        first = self.builder.insert_element(nothing, value.ir, ir.Constant(lane, 0))
        every = ir.Constant(ir.VectorType(lane, self.lanes), None)
        return Value(self, self.builder.shuffle_vector(first, nothing, every))

    def variable(self, first: Value | float = 0.0) -> Variable:
        """Return a variable; a Python number makes it a vector."""
        return Variable(self, first if isinstance(first, Value) else self.vector(first))

    def load(self, array: Value, at: Value | int, count: int | None = None) -> Value:
        """Load ``array[at : at + lanes]`` as a vector; of a smaller ``count`` only so many, the others are zero."""
        return Value(self, self._load(self._vector, array, at, count))

    def load_number(self, array: Value, at: Value | int) -> Value:
        return Value(self, self._load(self.number, array, at, None))

    def scratch(self, elements: int) -> Value:
        """Return an array of the call's own, not zeroed."""
        with self.builder.goto_entry_block():
            allocated = self.builder.alloca(ir.ArrayType(self.number, elements))
            allocated.align = _VECTOR_BYTES
        return Value(self, self.builder.inttoptr(self.builder.ptrtoint(allocated, _INDEX), ir.PointerType()))

    def index(self, value: int) -> Value:
        return Value(self, ir.Constant(_INDEX, value))

    def load_index(self, array: Value, at: Value | int) -> Value:
        """Load from an array of int64."""
        address = self.builder.gep(array.ir, [self.constant(at, _INDEX)], inbounds=True, source_etype=_INDEX)
        return Value(self, self.builder.load(address, typ=_INDEX, align=8))

    def part(self, array: Value, at: Value | int) -> Value:
        """Return ``array[at:]``."""
        return Value(self, self._address(array, at))

    def _load(self, kind: Any, array: Value, at: Value | int, count: int | None) -> Any:
        address = self._address(array, at)
        if count is None or count == self.lanes:
            return self.builder.load(address, typ=kind, align=self.dtype.itemsize)
        mask = self._first(count)
        return self._call("masked.load", kind, [address, self._alignment, mask, self.constant(0.0, kind)], ".p0")

    def store(
        self, array: Value, at: Value | int, value: Value, count: int | None = None, *, past_caches: bool = False
    ) -> None:
        """Write a number, or a vector; of a smaller ``count`` only its first so many lanes.

        ``past_caches`` writes a whole vector to an aligned place without reading its cache line first; a ``fence`` must
        follow before others may read it.
        """
        address = self._address(array, at)
        if past_caches:
            written = self.builder.store(value.ir, address, align=_VECTOR_BYTES)
            written.set_metadata("nontemporal", self.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        elif count is None or count == self.lanes:
            self.builder.store(value.ir, address, align=self.dtype.itemsize)
        else:
            self._call("masked.store", ir.VoidType(), [value.ir, address, self._alignment, self._first(count)], ".p0")

    def fence(self) -> None:
        """Order writes: what was written is seen by other cores before anything that is written after this."""
        self.builder.fence("seq_cst")

    def prefetch(self, array: Value, at: Value | int) -> None:
        """Ask for the cache line of ``array[at]``, which may lie outside of the array, to be brought nearer."""
        kind, near, of_data = ir.IntType(32), 2, 1
        signature = ir.FunctionType(ir.VoidType(), [ir.PointerType(), kind, kind, kind])
        prefetch = self.module.declare_intrinsic("llvm.prefetch.p0", (), signature)
        constants = [ir.Constant(kind, value) for value in (0, near, of_data)]
        self.builder.call(prefetch, [self._address(array, at), *constants])

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """Return a * b + c, rounded once where the processor has such an instruction (all of them or none)."""
        if _VECTOR_BYTES == 16 and not _FEATURES.get("fma") and not _FEATURES.get("neon"):
            return a * b + c
        return Value(self, self._call("fma", a.ir.type, [a.ir, b.ir, c.ir]))

    def square_root(self, x: Value) -> Value:
        return Value(self, self._call("sqrt", x.ir.type, [x.ir]))

    def sum_of_lanes(self, vector: Value) -> Value:
        """Return the lanes' sum as a number: the upper half is added to the lower, again and again."""
        build, lane, total = self.builder, ir.IntType(32), vector.ir
        while (half := total.type.count // 2) >= 1:
            parts = [
                build.shuffle_vector(
                    total,
                    ir.Constant(total.type, ir.Undefined),
                    ir.Constant(ir.VectorType(lane, half), [ir.Constant(lane, first + i) for i in range(half)]),
                )
                for first in (0, half)
            ]
            total = build.fadd(*parts)
        return Value(self, build.extract_element(total, ir.Constant(lane, 0)))

    def transposed(self, rows: list[Value]) -> list[Value]:
        """Return the columns of a square of as many vectors as a vector has lanes.

        In each step halves of ever smaller blocks change places between two vectors: log2(lanes) steps.
        """
        build, lane, count = self.builder, ir.IntType(32), self.lanes
        columns, distance = [row.ir for row in rows], count // 2
        while distance:
            mixed = list(columns)
            for i in range(count):
                if i & distance == 0:
                    first, second = columns[i], columns[i + distance]
                    low = [j if j & distance == 0 else count + j - distance for j in range(count)]
                    high = [j + distance if j & distance == 0 else count + j for j in range(count)]
                    mixed[i], mixed[i + distance] = (
                        build.shuffle_vector(
                            first,
                            second,
                            ir.Constant(ir.VectorType(lane, count), [ir.Constant(lane, p) for p in places]),
                        )
                        for places in (low, high)
                    )
            columns, distance = mixed, distance // 2
        return [Value(self, column) for column in columns]

    def _call(self, name: str, result: Any, arguments: list[Any], suffix: str = "") -> Any:
        """Call an LLVM function that is overloaded on the type of this kernel's vectors or numbers."""
        kind = self.number if self.number in (result, arguments[0].type) else self._vector
        lanes_name = f"v{self.lanes}" if kind == self._vector else ""
        full = f"llvm.{name}.{lanes_name}f{8 * self.dtype.itemsize}{suffix}"
        kinds = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.builder.call(self.module.declare_intrinsic(full, (), kinds), arguments)

    def _address(self, array: Value, at: Value | int) -> Any:
        return self.builder.gep(array.ir, [self.constant(at, _INDEX)], inbounds=True, source_etype=self.number)

    def _first(self, count: int) -> Any:
        bit = ir.IntType(1)
        return ir.Constant(ir.VectorType(bit, self.lanes), [ir.Constant(bit, i < count) for i in range(self.lanes)])

    @contextlib.contextmanager
    def loop(self, start: Value | int, stop: Value | int, step: int = 1) -> Iterator[Value]:
        """Write ``for i in range(start, stop, step)``."""
        build, before = self.builder, self.builder.block
        head, body, after = (build.append_basic_block(part) for part in ("head", "body", "after"))
        build.branch(head)
        build.position_at_end(head)
        i = build.phi(_INDEX)
        i.add_incoming(self.constant(start, _INDEX), before)
        build.cbranch(build.icmp_signed("<", i, self.constant(stop, _INDEX)), body, after)
        build.position_at_end(body)
        yield Value(self, i)
        i.add_incoming(build.add(i, ir.Constant(_INDEX, step)), build.block)
        build.branch(head)
        build.position_at_end(after)

    @contextlib.contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """Write ``if condition:``."""
        with self.builder.if_then(condition.ir):
            yield

    def in_parts(self, total: int, size: int, body: Callable[[Value, int], None]) -> None:
        """Call ``body(start, count)`` for parts of ``size`` in a loop, and once more for what is left of ``total``."""
        full = total // size * size
        if full:
            with self.loop(0, full, size) as start:
                body(start, size)
        if total > full:
            body(Value(self, ir.Constant(_INDEX, full)), total - full)

    def in_tiles(self, total: Value, sizes: tuple[int, ...], body: Callable[[Value, int], None]) -> None:
        """Call ``body(start, size)`` for tiles of the first size while they fit, then the next; the last divides."""
        start = Value(self, ir.Constant(_INDEX, 0))
        for size in sizes:
            end = start + (total - start) // size * size
            with self.loop(start, end, size) as at:
                body(at, size)
            start = end

    def elementwise(self, n: Value, body: Callable[[Element], None]) -> None:
        """Call ``body`` for each of ``n`` elements of flat arrays: vector by vector, then number by number, alike."""
        full = n // self.lanes * self.lanes
        with self.loop(0, full, self.lanes) as i:
            body(Element(self, i, vector=True))
        with self.loop(full, n) as i:
            body(Element(self, i, vector=False))


class Element:
    """One place of flat arrays, in an ``elementwise`` kernel."""

    def __init__(self, kernel: Kernel, at: Value, *, vector: bool) -> None:
        self._kernel, self._at, self._vector = kernel, at, vector

    def __getitem__(self, array: str) -> Value:
        load = self._kernel.load if self._vector else self._kernel.load_number
        return load(self._kernel[array], self._at)

    def __setitem__(self, array: str, value: Value) -> None:
        self._kernel.store(self._kernel[array], self._at, value)

    def set_zero(self, array: str) -> None:
        kernel = self._kernel
        kind = kernel.vector(0.0).ir.type if self._vector else kernel.number
        self[array] = Value(kernel, ir.Constant(kind, None))

    def mask(self, array: str) -> Value:
        """Load a mask from an array with a byte an element, 0 or 1."""
        build = self._kernel.builder
        kind = self._bytes()
        byte = build.load(self._byte_address(array), typ=kind, align=1)
        return Value(self._kernel, build.icmp_unsigned("!=", byte, ir.Constant(kind, None)))

    def set_mask(self, array: str, mask: Value) -> None:
        build = self._kernel.builder
        build.store(build.zext(mask.ir, self._bytes()), self._byte_address(array), align=1)

    def _bytes(self) -> Any:
        return ir.VectorType(_BYTE, self._kernel.lanes) if self._vector else _BYTE

    def _byte_address(self, array: str) -> Any:
        kernel = self._kernel
        return kernel.builder.gep(kernel[array].ir, [self._at.ir], inbounds=True, source_etype=_BYTE)

    def number(self, argument: str) -> Value:
        """Return an argument that is one number, as wide as the element."""
        value = self._kernel[argument]
        return self._kernel.vector(value) if self._vector else value
