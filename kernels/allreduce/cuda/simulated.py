"""Stand-ins, in Python, for ``memory``, ``registers`` and ``flags`` in numba's CUDA simulator, of the same meanings.

What differs: memory is the host's, read and written at its address; a 16-byte access off a multiple of 16 raises
``ValueError`` where a GPU stops the kernel; numbers are NumPy's, so a NaN has other bits; threads take turns. Flags are
words that processes share, in the order that the host's processor keeps (x86: that of acquire and release). The
simulator runs one block after another, so only ranks that are processes can wait for each other: each is then in its
block of the same number. What order a GPU's memory keeps is not shown here.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from dpsim.kernels.allreduce.reference import from_bfloat16, round_to_bfloat16
from dpsim.kernels.allreduce.tree import Tree, fold

Numbers = tuple[Any, ...]


def _memory(address: int, dtype: Any, count: int) -> Any:
    size = np.dtype(dtype).itemsize
    aligned = min(16, size * count)
    if address % aligned:
        raise ValueError(f"an access of {aligned} bytes at {address}")
    return np.frombuffer((ctypes.c_char * (size * count)).from_address(int(address)), dtype)


def _stored_as(dtype: str) -> str:
    return "uint16" if dtype == "bfloat16" else dtype


@functools.cache
def load(dtype: str, lanes: int) -> Callable[[int], Numbers]:
    def read(address: int) -> Numbers:
        stored = _memory(address, _stored_as(dtype), lanes)
        if dtype == "bfloat16":
            return tuple(from_bfloat16(stored))
        return tuple(stored.astype(np.float64 if dtype == "float64" else np.float32))

    return read


@functools.cache
def store(dtype: str, lanes: int) -> Callable[[int, Numbers], None]:
    def write(address: int, values: Numbers) -> None:
        numbers = np.array(values)
        with np.errstate(over="ignore"):
            rounded = round_to_bfloat16(numbers) if dtype == "bfloat16" else numbers.astype(dtype)
        _memory(address, _stored_as(dtype), lanes)[:] = rounded

    return write


@functools.cache
def store_each(dtype: str, lanes: int) -> Callable[[tuple[int, ...], int, Numbers], None]:
    def write(addresses: tuple[int, ...], offset: int, values: Numbers) -> None:
        for address in addresses:
            store(dtype, lanes)(address + offset, values)

    return write


@functools.cache
def load_halves(lanes: int) -> Callable[[int, int], Numbers]:
    def read(upper: int, lower: int) -> Numbers:
        above, below = (_memory(address, np.uint16, lanes).astype(np.uint32) for address in (upper, lower))
        return tuple((above << np.uint32(16) | below).view(np.float32))

    return read


@functools.cache
def store_halves(lanes: int) -> Callable[[int, int, Numbers], None]:
    def write(upper: int, lower: int, values: Numbers) -> None:
        bits = np.array(values, np.float32).view(np.uint32)
        _memory(upper, np.uint16, lanes)[:] = bits >> np.uint32(16)
        _memory(lower, np.uint16, lanes)[:] = bits & np.uint32(0xFFFF)

    return write


@functools.cache
def total(dtype: str, lanes: int, tree: Tree, each_sum: bool = False) -> Callable[[tuple[int, ...], int], Numbers]:
    def read(addresses: tuple[int, ...], offset: int) -> Numbers:
        return fold(tree, lambda slot: load(dtype, lanes)(addresses[slot] + offset), add_two)

    def add_two(left: Numbers, right: Numbers) -> Numbers:
        return tuple(_rounded(dtype, np.array(add(left, right)))) if each_sum else add(left, right)

    return read


def _rounded(dtype: str, numbers: Any) -> Any:
    """Return 16-bit numbers as they would be read again after being stored."""
    if dtype == "bfloat16":
        return from_bfloat16(round_to_bfloat16(numbers))
    with np.errstate(over="ignore"):
        return numbers.astype(np.float16).astype(np.float32)


def _each(compute: Callable[..., Any]) -> Callable[..., Numbers]:
    def operation(first: Numbers, *others: Any) -> Numbers:
        columns = [other if isinstance(other, tuple) else (other,) * len(first) for other in others]
        with np.errstate(all="ignore"):
            return tuple(map(compute, first, *columns))

    return operation


add, minus, multiply, divide = map(_each, (operator.add, operator.sub, operator.mul, operator.truediv))
root, widen, narrow = _each(np.sqrt), _each(np.float64), _each(np.float32)
keep_positive = _each(lambda value, test: value if test > 0 else np.float32(0))
rectify = _each(lambda value: np.float32(0) if value <= 0 else value)


def square_bits(value: Any) -> int:
    with np.errstate(all="ignore"):
        return int(np.square(np.float64(value)).view(np.int64))


def fused(left: Any, right: Any, added: Any) -> Any:
    """Return left right + added of float32 arrays or numbers, rounded once, as a fused multiply-add does.

    The product is exact in float64. The sum there is rounded to odd, which makes the second rounding the only one
    (Boldo and Melquiond 2008).
    """
    with np.errstate(all="ignore"):
        product = np.multiply(left, right, dtype=np.float64)
        total = np.asarray(product + added)
        low = total - product
        error = (product - (total - low)) + (added - low)
        inexact = np.isfinite(total) & (error != 0) & (total.view(np.int64) & 1 == 0)
        odd = np.where(inexact, np.nextafter(total, np.copysign(np.inf, error)), total)
        return odd.astype(np.float32)


@functools.cache
def outer(rows: int, lanes: int, lane: int) -> Callable[[Numbers, Numbers, Numbers], Numbers]:
    def added(sums: Numbers, left: Numbers, right: Numbers) -> Numbers:
        lefts = np.repeat(np.array(left[lane::lanes], np.float32), len(right))
        return tuple(fused(lefts, np.tile(np.array(right, np.float32), rows), np.array(sums, np.float32)))

    return added


@functools.cache
def part(first: int, count: int) -> Callable[[Numbers], Numbers]:
    def taken(values: Numbers) -> Numbers:
        return values[first : first + count]

    return taken


def read_address(address: int) -> int:
    return int(_memory(address, np.int64, 1)[0])


@functools.cache
def release(scope: str) -> Callable[[int, int], None]:
    return write_word


@functools.cache
def acquire(scope: str) -> Callable[[int], int]:
    def read(address: int) -> int:
        time.sleep(5e-5)  # others are to run, while this one polls
        return read_word(address)

    return read


def read_word(address: int) -> int:
    return int(_memory(address, np.uint32, 1)[0])


def write_word(address: int, value: int) -> None:
    _memory(address, np.uint32, 1)[0] = value


def nanoseconds() -> int:
    return time.perf_counter_ns()
