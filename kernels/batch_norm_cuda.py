"""Batch normalisation in the memory of a GPU: statistics, normalisation and both halves of its backward pass.

Meaning: ``channel_moments`` and ``channel_normalise*`` of ``dpsim.nn.ops``, in float32. Sums are taken in float64, in
which a product of float32 numbers is exact, in an order that depends on the rows of a group alone; all else is rounded
operation by operation. Memory passes: each array that is named is read once and written once.
Importing this loads numba-cuda; in its simulator the kernels run on NumPy's arrays.

A kernel takes (addresses that it reads, addresses that it writes, numbers). Legend: C channels; G groups of
neighbouring rows, as many in each, with means and sums of their own.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import cuda

from dpsim.kernels.allreduce.cuda.kernels import SIMULATED, THREADS, inline, kernel_of, memory, threadless
from dpsim.kernels.column_sums_cuda import COLUMNS, column_total
from dpsim.kernels.conv_cuda import registers

_ROWS_A_THREAD = 2 if SIMULATED else 8
_MOST_BLOCKS = 2 if SIMULATED else 512
_SHARED = 2 * THREADS


def blocks_of(rows: int, vectors: int) -> int:
    """Blocks that add up a group of rows of so many vectors of channels."""
    return min(max(1, -(-rows // (rows_at_once(vectors) * _ROWS_A_THREAD))), _MOST_BLOCKS)


def rows_at_once(vectors: int) -> int:
    """Rows that a block works on at once."""
    return THREADS // min(vectors, THREADS)


def _one_by_one(lanes: int) -> Any:
    """load(address) of parameters, which lie anywhere: other arrays' rows of four channels begin at 16 bytes."""
    one = memory.load("float32", 1)
    if lanes == 1:
        return one

    @threadless
    def load(address):  # type: ignore[no-untyped-def]
        return one(address) + one(address + 4) + one(address + 8) + one(address + 12)

    return load


@functools.cache
def sums_of_blocks(backward: bool, rectified: bool, lanes: int) -> Any:
    """kernel(reads, (out,), (rows, channels, blocks)): out float64 [G, blocks, 2, C], two sums over a block's rows.

    Forward of (x,): x and x^2. Backward of (grad, x): grad and grad x; if ``rectified`` of (grad, x, mean_GC, scale_GC,
    shift_C), with grad 0 where the normalised x is not > 0. The grid is (blocks, G for each ``THREADS`` vectors).
    """
    load, store = memory.load("float32", lanes), memory.store("float64", 1)
    widen, add, multiply = registers.widen, memory.add, memory.multiply
    minus, keep_positive, load_each = registers.minus, registers.keep_positive, _one_by_one(lanes)
    shared, zeros = 2 * THREADS * lanes, (np.float64(0),) * lanes

    @threadless
    def forward_pair(reads, at, group, channel, channels):  # type: ignore[no-untyped-def]
        x = widen(load(reads[0] + at))
        return x, multiply(x, x)

    @threadless
    def backward_pair(reads, at, group, channel, channels):  # type: ignore[no-untyped-def]
        grad = widen(load(reads[0] + at))
        return grad, multiply(grad, widen(load(reads[1] + at)))

    @threadless
    def rectified_pair(reads, at, group, channel, channels):  # type: ignore[no-untyped-def]
        own = 4 * (group * channels + channel)
        x = load(reads[1] + at)
        scaled = multiply(minus(x, load(reads[2] + own)), load(reads[3] + own))
        grad = widen(keep_positive(load(reads[0] + at), add(scaled, load_each(reads[4] + 4 * channel))))
        return grad, multiply(grad, widen(x))

    pair = (rectified_pair if rectified else backward_pair) if backward else forward_pair

    @kernel_of(1 if rectified else 2)
    def kernel(reads, writes, numbers):  # type: ignore[no-untyped-def]
        rows, channels, blocks = numbers
        sums = cuda.shared.array(shared, np.float64)
        thread, vectors = cuda.threadIdx.x, channels // lanes
        wide = min(vectors, THREADS)
        sections = (vectors + wide - 1) // wide
        group, vector = cuda.blockIdx.y // sections, cuda.blockIdx.y % sections * wide + thread % wide
        at_once, own = THREADS // wide, thread // wide
        working = own < at_once and vector < vectors
        totals, products = zeros, zeros
        if working:
            channel = vector * lanes
            for row in range(cuda.blockIdx.x * at_once + own, rows, blocks * at_once):
                at = 4 * ((group * rows + row) * channels + channel)
                value, product = pair(reads, at, group, channel, channels)
                totals, products = add(totals, value), add(products, product)
        for lane in range(lanes):
            sums[2 * lane * THREADS + thread] = totals[lane]
            sums[(2 * lane + 1) * THREADS + thread] = products[lane]
        left = at_once
        while left > 1:
            cuda.syncthreads()
            half = (left + 1) // 2
            if own + half < left:
                for place in range(thread, shared, THREADS):
                    sums[place] += sums[place + half * wide]
            left = half
        if working and own == 0:
            to = writes[0] + 8 * ((group * blocks + cuda.blockIdx.x) * 2 * channels + vector * lanes)
            for lane in range(lanes):
                store(to + 8 * lane, (sums[2 * lane * THREADS + thread],))
                store(to + 8 * (channels + lane), (sums[(2 * lane + 1) * THREADS + thread],))

    return kernel


@functools.cache
def moments() -> Any:
    """kernel((sums of blocks,), (mean_GC, squares_GC), (rows, channels, blocks)); the grid is (columns, G)."""
    pair, store = _pair(), memory.store("float32", 1)
    multiply, narrow, minus = memory.multiply, registers.narrow, registers.minus

    @kernel_of()
    def kernel(reads, writes, numbers):  # type: ignore[no-untyped-def]
        rows, channels, blocks = numbers
        shared = cuda.shared.array(_SHARED, np.float64)
        group, channel, total, product = pair(reads[0], channels, blocks, shared)
        if channel >= 0:
            to, mean = 4 * (group * channels + channel), (total / rows,)
            squares = minus((product,), multiply(mean, (total,)))[0]
            store(writes[0] + to, narrow(mean))
            store(writes[1] + to, narrow((max(squares, 0.0),)))

    return kernel


@functools.cache
def local_moments() -> Any:
    """kernel((sums of blocks, gamma), (mean, inverse_std, scale, running mean, running variance), numbers).

    numbers: (rows, channels, blocks, momentum, 1 - momentum, epsilon), these in float32. One group. The running
    statistics move towards the mean and the unbiased variance, scale = gamma inverse_std.
    """
    pair, load, store = _pair(), memory.load("float32", 1), memory.store("float32", 1)
    add, multiply, times, plus = memory.add, memory.multiply, memory.times, memory.plus
    narrow, minus, divide, root = registers.narrow, registers.minus, memory.divide, memory.root
    one = (np.float32(1),)

    @threadless
    def move(address, value, momentum, rest):  # type: ignore[no-untyped-def]
        store(address, add(times(load(address), rest), times(value, momentum)))

    @kernel_of()
    def kernel(reads, writes, numbers):  # type: ignore[no-untyped-def]
        rows, channels, blocks, momentum, rest, epsilon = numbers
        shared = cuda.shared.array(_SHARED, np.float64)
        _, channel, total, product = pair(reads[0], channels, blocks, shared)
        if channel >= 0:
            exact, to = (total / rows,), 4 * channel
            squares = max(minus((product,), multiply(exact, (total,)))[0], 0.0)
            mean, variance = narrow(exact), narrow((squares / rows,))
            inverse = divide(one, root(plus(variance, epsilon)))
            store(writes[0] + to, mean)
            store(writes[1] + to, inverse)
            store(writes[2] + to, multiply(load(reads[1] + to), inverse))
            move(writes[3] + to, mean, momentum, rest)
            move(writes[4] + to, narrow((squares / max(rows - 1, 1),)), momentum, rest)

    return kernel


@functools.cache
def gradient_sums() -> Any:
    """kernel((sums of blocks, mean_GC), (dot_GC, sum_GC), (rows, channels, blocks)); the grid is (columns, G)."""
    pair, load, store = _pair(), memory.load("float32", 1), memory.store("float32", 1)
    multiply, narrow, minus, widen = memory.multiply, registers.narrow, registers.minus, registers.widen

    @kernel_of()
    def kernel(reads, writes, numbers):  # type: ignore[no-untyped-def]
        _, channels, blocks = numbers
        shared = cuda.shared.array(_SHARED, np.float64)
        group, channel, total, product = pair(reads[0], channels, blocks, shared)
        if channel >= 0:
            to = 4 * (group * channels + channel)
            mean = widen(load(reads[1] + to))
            store(writes[0] + to, narrow(minus((product,), multiply(mean, (total,)))))
            store(writes[1] + to, narrow((total,)))

    return kernel


@functools.cache
def local_gradients() -> Any:
    """kernel((sums of blocks, mean, inverse_std, scale), (d_gamma, d_beta, slope, shift), numbers).

    numbers: (rows, channels, blocks, 1 / rows in float32). One group. With ``slope`` and ``shift``, ``backward`` gives
    the input gradient scale (grad - d_beta / rows - (x - mean) inverse_std d_gamma / rows).
    """
    pair, load, store = _pair(), memory.load("float32", 1), memory.store("float32", 1)
    multiply, times = memory.multiply, memory.times
    narrow, minus, widen = registers.narrow, registers.minus, registers.widen

    @kernel_of()
    def kernel(reads, writes, numbers):  # type: ignore[no-untyped-def]
        _, channels, blocks, a_row = numbers
        shared = cuda.shared.array(_SHARED, np.float64)
        _, channel, total, product = pair(reads[0], channels, blocks, shared)
        if channel >= 0:
            to = 4 * channel
            mean, inverse = widen(load(reads[1] + to)), load(reads[2] + to)
            dot = narrow(minus((product,), multiply(mean, (total,))))
            d_gamma, d_beta = multiply(dot, inverse), narrow((total,))
            per_row = times(load(reads[3] + to), -a_row)
            store(writes[0] + to, d_gamma)
            store(writes[1] + to, d_beta)
            store(writes[2] + to, multiply(multiply(per_row, inverse), d_gamma))
            store(writes[3] + to, multiply(per_row, d_beta))

    return kernel


def _pair() -> Any:
    """pair(sums of blocks, channels, blocks, shared): (group, channel, two totals), channel -1 for idle threads."""
    total = column_total("float64")

    @inline
    def both(sums, channels, blocks, shared):  # type: ignore[no-untyped-def]
        group, column = cuda.blockIdx.y, cuda.blockIdx.x * COLUMNS + cuda.threadIdx.x % COLUMNS
        first = sums + 8 * (group * blocks * 2 * channels + min(column, channels - 1))
        number = total(first, blocks, 16 * channels, shared[:THREADS])
        product = total(first + 8 * channels, blocks, 16 * channels, shared[THREADS:])
        working = column < channels and cuda.threadIdx.x < COLUMNS
        return group, column if working else -1, number, product

    return both


@functools.cache
def normalise(rectified: bool, lanes: int) -> Any:
    """kernel((x, mean_GC, scale_GC, shift_C), (out,), (rows, channels)): out = (x - mean) scale + shift, or max(., 0).

    The grid is (blocks, G).
    """
    load, store = memory.load("float32", lanes), memory.store("float32", lanes)
    add, multiply, minus, rectify = memory.add, memory.multiply, registers.minus, registers.rectify
    load_each = _one_by_one(lanes)

    @kernel_of()
    def kernel(reads, writes, numbers):  # type: ignore[no-untyped-def]
        rows, channels = numbers
        group, vectors = cuda.blockIdx.y, channels // lanes
        place = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        while place < rows * vectors:
            at, shift = 4 * (group * rows * channels + place * lanes), 4 * (place % vectors * lanes)
            own = 4 * group * channels + shift
            scaled = multiply(minus(load(reads[0] + at), load(reads[1] + own)), load(reads[2] + own))
            result = add(scaled, load_each(reads[3] + shift))
            store(writes[0] + at, rectify(result) if rectified else result)
            place += cuda.gridDim.x * THREADS

    return kernel


@functools.cache
def backward(rectified: bool, lanes: int) -> Any:
    """kernel((grad, x, mean, a, b, c[, shift]), (grad,), (rows, channels)): grad = a grad + b (x - mean) + c.

    ``rectified``: with grad 0 where a (x - mean) + shift is not > 0. The grid is (blocks, G).
    """
    load, store = memory.load("float32", lanes), memory.store("float32", lanes)
    add, multiply, minus, keep_positive = memory.add, memory.multiply, registers.minus, registers.keep_positive
    load_each = _one_by_one(lanes)

    @threadless
    def whole(reads, at, centred, a, shift):  # type: ignore[no-untyped-def]
        return load(reads[0] + at)

    @threadless
    def kept(reads, at, centred, a, shift):  # type: ignore[no-untyped-def]
        return keep_positive(load(reads[0] + at), add(multiply(centred, a), load_each(reads[6] + shift)))

    gradient = kept if rectified else whole

    @kernel_of()
    def kernel(reads, writes, numbers):  # type: ignore[no-untyped-def]
        rows, channels = numbers
        group, vectors = cuda.blockIdx.y, channels // lanes
        place = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        while place < rows * vectors:
            at, shift = 4 * (group * rows * channels + place * lanes), 4 * (place % vectors * lanes)
            own = 4 * group * channels + shift
            centred = minus(load(reads[1] + at), load(reads[2] + own))
            a = load(reads[3] + own)
            moved = add(multiply(centred, load(reads[4] + own)), load(reads[5] + own))
            store(writes[0] + at, add(multiply(gradient(reads, at, centred, a, shift), a), moved))
            place += cuda.gridDim.x * THREADS

    return kernel
