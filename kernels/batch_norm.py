"""Batch normalisation: statistics of rows, the normalisation itself, and both halves of its backward pass.

Meaning: ``channel_moments`` and ``channel_normalise*`` of ``NumpyOps`` in dpsim.nn.
Memory passes: each array that is named is read once and ``out`` is written once. Sums are taken over blocks of rows,
and those of the blocks one after another, so that float32 keeps its accuracy over long columns.
Legend: C channels; G groups of neighbouring rows, as many in each, with means and sums of their own (one: [C] will do).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from dpsim.kernels.cache import compiled
from dpsim.kernels.vector import Kernel, Value, Variable

Array = NDArray[Any]
_VECTORS = 4  # of channels at once
_BLOCK = 64  # rows: with four vectors of channels they fill half of an L1 cache
_Parts = list[tuple[Value, int]]


def channel_moments(x: Array, mean_GC: Array, squares_GC: Array) -> None:
    """mean = the mean of the rows of x, squares = the sum of their squared distances from it; a channel at a time.

    Each block of rows is read from memory once: its own mean and squares are joined to those of the blocks before it
    (Chan, Golub and LeVeque 1983), which is as exact as two passes.
    """
    _moments(x.dtype.name, x.shape[-1])(x, mean_GC, squares_GC, *_rows_and_groups(x, mean_GC))


def channel_normalise(x: Array, mean_GC: Array, scale_GC: Array, shift_C: Array, out: Array) -> None:
    """out = (x - mean) scale + shift."""
    _normalise(x.dtype.name, x.shape[-1])(x, mean_GC, scale_GC, shift_C, out, *_rows_and_groups(x, mean_GC))


def channel_normalise_sums(grad: Array, x: Array, mean_GC: Array, dot_GC: Array, sum_GC: Array) -> None:
    """dot = sum over rows of grad (x - mean), sum = sum over rows of grad."""
    _sums(x.dtype.name, x.shape[-1])(grad, x, mean_GC, dot_GC, sum_GC, *_rows_and_groups(x, mean_GC))


def channel_normalise_backward(grad: Array, x: Array, mean_GC: Array, a_GC: Array, b_GC: Array, c_GC: Array) -> None:
    """grad = a grad + b (x - mean) + c, in place."""
    _backward(x.dtype.name, x.shape[-1])(grad, x, mean_GC, a_GC, b_GC, c_GC, *_rows_and_groups(x, mean_GC))


def _rows_and_groups(x: Array, mean_GC: Array) -> tuple[int, int]:
    """Return (rows of a group, groups)."""
    groups = mean_GC.size // x.shape[-1]
    return x.size // mean_GC.size, groups


def _for_groups(k: Kernel, channels: int, body: Callable[[_Parts, Value], None]) -> None:
    """Call ``body(parts, group)`` for each group; parts are vectors of channels, as (first channel, lanes in use)."""
    with k.loop(0, k["groups"]) as group:

        def part(first: Value, count: int) -> None:
            body([(first + at, min(k.lanes, count - at)) for at in range(0, count, k.lanes)], group)

        k.in_parts(channels, _VECTORS * k.lanes, part)


def _for_rows(k: Kernel, first: Value, end: Value, at_once: int, body: Callable[[Value, int], None]) -> None:
    """Call ``body(row, number)`` for all rows; ``at_once`` together, each with sums of its own, by their number."""
    full_end = first + (end - first) // at_once * at_once
    with k.loop(first, full_end, at_once) as row:
        for number in range(at_once):
            body(row + number, number)
    with k.loop(full_end, end) as row:
        body(row, 0)


def _total(sums: list[Variable]) -> Value:
    """Return the total of 1, 2 or 4 sums, added pair by pair."""
    values = [variable.get() for variable in sums]
    while len(values) > 1:
        values = [values[i] + values[i + 1] for i in range(0, len(values), 2)]
    return values[0]


@compiled
def _moments(dtype: str, channels: int) -> Kernel:
    k = Kernel(dtype, ("x", "mean", "squares"), ("rows", "groups"))
    rows = k["rows"]

    def body(parts: _Parts, group: Value) -> None:
        at_once = 4 if len(parts) == 1 else 2
        first_row, own = group * rows, group * channels
        means, squares = ([k.variable() for _ in parts] for _ in range(2))
        with k.loop(0, rows, _BLOCK) as start:
            end = (start + _BLOCK).at_most(rows)
            count, before, after = (end - start).as_number(), start.as_number(), end.as_number()
            share, weight = k.vector(count / after), k.vector(before * count / after)
            sums = [[k.variable() for _ in range(at_once)] for _ in parts]

            def add(row: Value, number: int) -> None:
                for (at, n), total in zip(parts, sums, strict=True):
                    total[number].add(k.load(k["x"], (first_row + row) * channels + at, n))

            _for_rows(k, start, end, at_once, add)
            centres = [_total(total) / k.vector(count) for total in sums]
            distances = [[k.variable() for _ in range(at_once)] for _ in parts]

            def add_square(row: Value, number: int) -> None:
                for (at, n), centre, total in zip(parts, centres, distances, strict=True):
                    distance = k.load(k["x"], (first_row + row) * channels + at, n) - centre
                    total[number].add_product(distance, distance)

            _for_rows(k, start, end, at_once, add_square)
            for mean, square, centre, total in zip(means, squares, centres, distances, strict=True):
                gap = centre - mean.get()
                square.set(square.get() + (_total(total) + gap * gap * weight))
                mean.set(mean.get() + gap * share)
        for (at, n), mean, square in zip(parts, means, squares, strict=True):
            k.store(k["mean"], own + at, mean.get(), n)
            k.store(k["squares"], own + at, square.get(), n)

    _for_groups(k, channels, body)
    return k


def _each_element(
    k: Kernel,
    channels: int,
    out: str,
    constants: Callable[[Value, Value, int], list[Value]],
    result: Callable[..., Value],
) -> None:
    """``out`` = ``result(place, count, *constants)`` for every vector of channels of every row.

    ``constants(first, channel, count)`` are those of a vector of channels; a group's own values begin at ``first``.
    """

    def body(parts: _Parts, group: Value) -> None:
        first_row, first = group * k["rows"], group * channels
        values = [constants(first, channel, count) for channel, count in parts]
        with k.loop(first_row, first_row + k["rows"]) as row:
            for (channel, count), own in zip(parts, values, strict=True):
                offset = row * channels + channel
                k.store(k[out], offset, result(offset, count, *own), count)

    _for_groups(k, channels, body)


@compiled
def _normalise(dtype: str, channels: int) -> Kernel:
    k = Kernel(dtype, ("x", "mean", "scale", "shift", "out"), ("rows", "groups"))

    def constants(first: Value, channel: Value, count: int) -> list[Value]:
        own = [k.load(k[name], first + channel, count) for name in ("mean", "scale")]
        return [*own, k.load(k["shift"], channel, count)]

    def result(offset: Value, count: int, mean: Value, scale: Value, shift: Value) -> Value:
        return k.fma(k.load(k["x"], offset, count) - mean, scale, shift)

    _each_element(k, channels, "out", constants, result)
    return k


@compiled
def _sums(dtype: str, channels: int) -> Kernel:
    k = Kernel(dtype, ("grad", "x", "mean", "dot", "sum"), ("rows", "groups"))
    rows = k["rows"]

    def body(parts: _Parts, group: Value) -> None:
        at_once = 4 if len(parts) == 1 else 2 if len(parts) == 2 else 1
        first_row, own = group * rows, group * channels
        means = [k.load(k["mean"], own + at, n) for at, n in parts]
        dots, totals = ([k.variable() for _ in parts] for _ in range(2))
        with k.loop(0, rows, _BLOCK) as start:
            block_dots, block_totals = ([[k.variable() for _ in range(at_once)] for _ in parts] for _ in range(2))

            def add(row: Value, number: int) -> None:
                for (at, n), mean, dot, total in zip(parts, means, block_dots, block_totals, strict=True):
                    at_row = (first_row + row) * channels + at
                    grad = k.load(k["grad"], at_row, n)
                    dot[number].add_product(grad, k.load(k["x"], at_row, n) - mean)
                    total[number].add(grad)

            _for_rows(k, start, (start + _BLOCK).at_most(rows), at_once, add)
            for all_of, block in zip(dots + totals, block_dots + block_totals, strict=True):
                all_of.add(_total(block))
        for (at, n), dot, total in zip(parts, dots, totals, strict=True):
            k.store(k["dot"], own + at, dot.get(), n)
            k.store(k["sum"], own + at, total.get(), n)

    _for_groups(k, channels, body)
    return k


@compiled
def _backward(dtype: str, channels: int) -> Kernel:
    k = Kernel(dtype, ("grad", "x", "mean", "a", "b", "c"), ("rows", "groups"))

    def constants(first: Value, channel: Value, count: int) -> list[Value]:
        return [k.load(k[name], first + channel, count) for name in ("mean", "a", "b", "c")]

    def result(offset: Value, count: int, mean: Value, a: Value, b: Value, c: Value) -> Value:
        centred = k.load(k["x"], offset, count) - mean
        return k.fma(a, k.load(k["grad"], offset, count), k.fma(b, centred, c))

    _each_element(k, channels, "grad", constants, result)
    return k
