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

from dpsim.kernels.allreduce.cuda.kernels import SIMULATED, THREADS, kernel_of, memory, registers, threadless
from dpsim.kernels.column_sums_cuda import COLUMNS, column_total

_ROWS_A_THREAD = 2 if SIMULATED else 8
_MOST_BLOCKS = 2 if SIMULATED else 512
_SHARED = 2 * THREADS


def blocks_of(rows: int, vectors: int) -> int:
    """Return blocks that add up a group of rows of so many vectors of channels."""
    return min(max(1, -(-rows // (rows_at_once(vectors) * _ROWS_A_THREAD))), _MOST_BLOCKS)


def rows_at_once(vectors: int) -> int:
    """Return rows that a block works on at once."""
    return THREADS // min(vectors, THREADS)


def _one_by_one(lanes: int) -> Any:
    """load(address) of parameters, which lie anywhere: other arrays' rows of four channels begin at 16 bytes."""
    load_single = memory.load("float32", 1)
    if lanes == 1:
        return load_single

    @threadless
    def load(address):  # type: ignore[no-untyped-def]
        return load_single(address) + load_single(address + 4) + load_single(address + 8) + load_single(address + 12)

    return load


@functools.cache
def sums_of_blocks(backward: bool, rectified: bool, lanes: int) -> Any:
    """kernel(reads, (out,), (rows, channels, blocks)): out float64 [G, blocks, 2, C], two sums over a block's rows.

    Forward of (x,): x and x^2. Backward of (grad, x): grad and grad x; if ``rectified`` of (grad, x, mean_GC, scale_GC,
    shift_C), with grad 0 where the normalised x is not > 0. The grid is (blocks, G for each ``THREADS`` vectors).
    """
    load, store = memory.load("float32", lanes), memory.store("float64", 1)
    widen, add, multiply = registers.widen, registers.add, registers.multiply
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
                for index in range(thread, shared, THREADS):
                    sums[index] += sums[index + half * wide]
            left = half
        if working and own == 0:
            to = writes[0] + 8 * ((group * blocks + cuda.blockIdx.x) * 2 * channels + vector * lanes)
            for lane in range(lanes):
                store(to + 8 * lane, (sums[2 * lane * THREADS + thread],))
                store(to + 8 * (channels + lane), (sums[(2 * lane + 1) * THREADS + thread],))

    return kernel


def _channel_kernel(work: Any) -> Any:
    """kernel(reads, writes, (rows, channels, blocks, ...)): ``work`` for each channel; the grid is (columns, G).

    ``work(reads, writes, numbers, at, total, product)``: ``at`` is the place of the channel's numbers in arrays [G, C],
    in bytes, and what follows its two sums over the rows. ``reads[0]`` are the sums of blocks.
    """
    add_up = column_total("float64")

    @kernel_of()
    def kernel(reads, writes, numbers):  # type: ignore[no-untyped-def]
        channels, blocks = numbers[1], numbers[2]
        shared = cuda.shared.array(_SHARED, np.float64)
        group, column = cuda.blockIdx.y, cuda.blockIdx.x * COLUMNS + cuda.threadIdx.x % COLUMNS
        first = reads[0] + 8 * (group * blocks * 2 * channels + min(column, channels - 1))
        total = add_up(first, blocks, 16 * channels, shared[:THREADS])
        product = add_up(first + 8 * channels, blocks, 16 * channels, shared[THREADS:])
        if column < channels and cuda.threadIdx.x < COLUMNS:
            work(reads, writes, numbers, 4 * (group * channels + column), (total,), (product,))

    return kernel


@functools.cache
def moments() -> Any:
    """kernel((sums of blocks,), (mean_GC, squares_GC), (rows, channels, blocks))."""
    store, multiply, narrow, minus = memory.store("float32", 1), registers.multiply, registers.narrow, registers.minus

    @threadless
    def work(reads, writes, numbers, at, total, product):  # type: ignore[no-untyped-def]
        mean = (total[0] / numbers[0],)
        store(writes[0] + at, narrow(mean))
        store(writes[1] + at, narrow((max(minus(product, multiply(mean, total))[0], 0.0),)))

    return _channel_kernel(work)


@functools.cache
def local_moments() -> Any:
    """kernel((sums of blocks, gamma), (mean, inverse_std, scale, running mean, running variance), numbers).

    numbers: (rows, channels, blocks, momentum, 1 - momentum, epsilon), these in float32. One group. The running
    statistics move towards the mean and the unbiased variance, scale = gamma inverse_std.
    """
    load, store = memory.load("float32", 1), memory.store("float32", 1)
    add, multiply, narrow, minus = registers.add, registers.multiply, registers.narrow, registers.minus
    divide, root, one = registers.divide, registers.root, (np.float32(1),)

    @threadless
    def move(address, value, momentum, rest):  # type: ignore[no-untyped-def]
        store(address, add(multiply(load(address), rest), multiply(value, momentum)))

    @threadless
    def work(reads, writes, numbers, at, total, product):  # type: ignore[no-untyped-def]
        rows, _, _, momentum, rest, epsilon = numbers
        exact = (total[0] / rows,)
        squares = max(minus(product, multiply(exact, total))[0], 0.0)
        mean, variance = narrow(exact), narrow((squares / rows,))
        inverse = divide(one, root(add(variance, epsilon)))
        store(writes[0] + at, mean)
        store(writes[1] + at, inverse)
        store(writes[2] + at, multiply(load(reads[1] + at), inverse))
        move(writes[3] + at, mean, momentum, rest)
        move(writes[4] + at, narrow((squares / max(rows - 1, 1),)), momentum, rest)

    return _channel_kernel(work)


@functools.cache
def gradient_sums() -> Any:
    """kernel((sums of blocks, mean_GC), (dot_GC, sum_GC), (rows, channels, blocks))."""
    load, store = memory.load("float32", 1), memory.store("float32", 1)
    multiply, narrow, minus, widen = registers.multiply, registers.narrow, registers.minus, registers.widen

    @threadless
    def work(reads, writes, numbers, at, total, product):  # type: ignore[no-untyped-def]
        store(writes[0] + at, narrow(minus(product, multiply(widen(load(reads[1] + at)), total))))
        store(writes[1] + at, narrow(total))

    return _channel_kernel(work)


@functools.cache
def local_gradients() -> Any:
    """kernel((sums of blocks, mean, inverse_std, scale), (d_gamma, d_beta, slope, shift), numbers).

    numbers: (rows, channels, blocks, 1 / rows in float32). One group. With ``slope`` and ``shift``, ``backward`` gives
    the input gradient scale (grad - d_beta / rows - (x - mean) inverse_std d_gamma / rows).
    """
    load, store = memory.load("float32", 1), memory.store("float32", 1)
    multiply, narrow, minus, widen = registers.multiply, registers.narrow, registers.minus, registers.widen

    @threadless
    def work(reads, writes, numbers, at, total, product):  # type: ignore[no-untyped-def]
        mean, inverse = widen(load(reads[1] + at)), load(reads[2] + at)
        d_gamma, d_beta = multiply(narrow(minus(product, multiply(mean, total))), inverse), narrow(total)
        per_row = multiply(load(reads[3] + at), -numbers[3])
        store(writes[0] + at, d_gamma)
        store(writes[1] + at, d_beta)
        store(writes[2] + at, multiply(multiply(per_row, inverse), d_gamma))
        store(writes[3] + at, multiply(per_row, d_beta))

    return _channel_kernel(work)


def _row_kernel(work: Any, lanes: int) -> Any:
    """kernel(reads, writes, (rows, channels)): ``work`` for each ``lanes`` channels of a row; the grid is (blocks, G).

    ``work(reads, writes, at, own, shift)``: the places, in bytes, of the numbers themselves in [G, rows, C], of their
    channels in [G, C] and in [C].
    """

    @kernel_of()
    def kernel(reads, writes, numbers):  # type: ignore[no-untyped-def]
        rows, channels = numbers
        group, vectors = cuda.blockIdx.y, channels // lanes
        pack = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        while pack < rows * vectors:
            shift = 4 * (pack % vectors * lanes)
            work(reads, writes, 4 * (group * rows * channels + pack * lanes), 4 * group * channels + shift, shift)
            pack += cuda.gridDim.x * THREADS

    return kernel


@functools.cache
def normalise(rectified: bool, lanes: int) -> Any:
    """kernel((x, mean_GC, scale_GC, shift_C), (out,), (rows, channels)): out = (x - mean) scale + shift.

    ``rectified``: max(out, 0).
    """
    load, store, load_each = memory.load("float32", lanes), memory.store("float32", lanes), _one_by_one(lanes)
    add, multiply, minus, rectify = registers.add, registers.multiply, registers.minus, registers.rectify

    @threadless
    def work(reads, writes, at, own, shift):  # type: ignore[no-untyped-def]
        scaled = multiply(minus(load(reads[0] + at), load(reads[1] + own)), load(reads[2] + own))
        result = add(scaled, load_each(reads[3] + shift))
        store(writes[0] + at, rectify(result) if rectified else result)

    return _row_kernel(work, lanes)


@functools.cache
def backward(rectified: bool, lanes: int) -> Any:
    """kernel((grad, x, mean, a, b, c[, shift]), (grad,), (rows, channels)): grad = a grad + b (x - mean) + c.

    ``rectified``: with grad 0 where a (x - mean) + shift is not > 0.
    """
    load, store, load_each = memory.load("float32", lanes), memory.store("float32", lanes), _one_by_one(lanes)
    add, multiply, minus, keep_positive = registers.add, registers.multiply, registers.minus, registers.keep_positive

    @threadless
    def whole(reads, at, centred, a, shift):  # type: ignore[no-untyped-def]
        return load(reads[0] + at)

    @threadless
    def kept(reads, at, centred, a, shift):  # type: ignore[no-untyped-def]
        return keep_positive(load(reads[0] + at), add(multiply(centred, a), load_each(reads[6] + shift)))

    gradient = kept if rectified else whole

    @threadless
    def work(reads, writes, at, own, shift):  # type: ignore[no-untyped-def]
        centred, a = minus(load(reads[1] + at), load(reads[2] + own)), load(reads[3] + own)
        moved = add(multiply(centred, load(reads[4] + own)), load(reads[5] + own))
        store(writes[0] + at, add(multiply(gradient(reads, at, centred, a, shift), a), moved))

    return _row_kernel(work, lanes)
