"""Convolutions in the memory of a GPU that copy no windows: each operand is read from device memory about once.

Meaning: ``conv2d`` and its gradients of ``dpsim.nn.ops``, in float32. A sum over a window or over pixels is one chain
of fused multiply-adds in the order of the loops below, whatever the batch: a sample has the same bits in all of them.
Importing this loads numba-cuda; in its simulator the kernels run on NumPy's arrays.

A kernel takes (addresses that it reads, addresses that it writes, numbers).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import cuda

from dpsim.kernels.allreduce.cuda.kernels import SIMULATED, THREADS, kernel_of, memory, registers, threadless

PIXELS = 4
"""Neighbouring pixels that a thread of ``convolution`` computes at once: so often it uses each weight it reads."""
_AT_ONCE = 4
"""Input channels that are read at once."""
_ELEMENTS = 1 << (6 if SIMULATED else 20)
"""About how many elements are computed for a weight gradient: where it has fewer, the samples are divided."""


def lanes_of(count: int, aligned: bool, most: int = _AT_ONCE) -> int:
    """Return the channels at once, of ``count``: 1, or a power of two from 4 to ``most`` that divides them."""
    return next((lanes for lanes in (8, 4) if aligned and lanes <= most and count % lanes == 0), 1)


def parts_of(samples: int, elements: int) -> int:
    """Return parts of a leaf's samples whose weight gradients, of so many elements, are added afterwards."""
    return max(1, min(samples, _ELEMENTS // elements))


@functools.cache
def convolution(size: int, spread: int, lanes: int, outputs: int) -> Any:
    """kernel((x, weight), (out,), (samples, height, width, inputs, rows, columns, channels, stride)).

    out[b, h, w] = sum over i, j, c of x[b, stride h + i - size // 2, stride w + j - size // 2, c] weight[i, j, c], with
    ``spread`` - 1 zeros between the pixels of x: so it is the input gradient as well. A thread computes ``outputs``
    channels of ``PIXELS`` pixels, and reads ``lanes`` channels of x at once.
    """
    border, store, add = size // 2, memory.store("float32", outputs), _added(lanes, outputs)
    first, second, third, fourth = (registers.part(pixel * outputs, outputs) for pixel in range(PIXELS))
    nothing = (np.float32(0),) * (PIXELS * outputs)

    @kernel_of(1)
    def kernel(reads, writes, numbers):  # type: ignore[no-untyped-def]
        x, weight = reads
        samples, height, width, inputs, rows, columns, channels, stride = numbers
        across, pixels = channels // outputs, samples * rows * columns
        top = cuda.local.array(PIXELS, np.int32)
        left = cuda.local.array(PIXELS, np.int32)
        sample = cuda.local.array(PIXELS, np.int32)  # 64 bits would take more registers than there are
        window = cuda.local.array(PIXELS, np.int64)
        tile = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        while tile < (pixels + PIXELS - 1) // PIXELS * across:
            begin, channel = tile // across * PIXELS, tile % across * outputs
            column, row, number = begin % columns, begin // columns % rows, begin // columns // rows
            for pixel in range(PIXELS):
                top[pixel], left[pixel] = row * stride - border, column * stride - border
                sample[pixel] = number if begin + pixel < pixels else -1
                column += 1
                if column == columns:
                    column = 0
                    row += 1
                if row == rows:
                    row = 0
                    number += 1
            sums = nothing
            for tap in range(size * size):
                for pixel in range(PIXELS):
                    y, z = int(top[pixel]) + tap // size, int(left[pixel]) + tap % size
                    inside = 0 <= y < height * spread and 0 <= z < width * spread and sample[pixel] >= 0
                    inside = inside and y % spread == 0 and z % spread == 0
                    at = (int(sample[pixel]) * height + y // spread) * width + z // spread
                    window[pixel] = x + 4 * at * inputs if inside else 0
                addresses = (window[0], window[1], window[2], window[3])
                own = weight + 4 * (tap * inputs * channels + channel)
                for c in range(0, inputs, lanes):
                    sums = add(sums, addresses, 4 * c, own, 4 * channels)
                    own += 4 * lanes * channels
            to = writes[0] + 4 * (begin * channels + channel)
            store(to, first(sums))
            if begin + 1 < pixels:
                store(to + 4 * channels, second(sums))
            if begin + 2 < pixels:
                store(to + 8 * channels, third(sums))
            if begin + 3 < pixels:
                store(to + 12 * channels, fourth(sums))
            tile += cuda.gridDim.x * THREADS

    return kernel


def _added(lanes: int, outputs: int) -> Any:
    """add(sums, addresses, offset, weight, pitch): the products of ``lanes`` channels added, one after another.

    Those of a pixel lie at its address + ``offset``, zeros where that is 0; the weights of each at ``weight`` and
    multiples of ``pitch`` from there.
    """
    load, load_weights = memory.load("float32", lanes), memory.load("float32", outputs)
    products = [registers.outer(PIXELS, lanes, lane) for lane in range(lanes)]
    outside = (np.float32(0),) * lanes

    @threadless
    def read(address, offset):  # type: ignore[no-untyped-def]
        values = outside
        if address != 0:
            values = load(address + offset)
        return values

    @threadless
    def window(addresses, offset):  # type: ignore[no-untyped-def]
        first, second, third, fourth = addresses
        return read(first, offset) + read(second, offset) + read(third, offset) + read(fourth, offset)

    if lanes == 1:
        (only,) = products

        @threadless
        def add(sums, addresses, offset, weight, pitch):  # type: ignore[no-untyped-def]
            return only(sums, window(addresses, offset), load_weights(weight))

        return add
    one, two, three, four = products

    @threadless
    def add_four(sums, addresses, offset, weight, pitch):  # type: ignore[no-untyped-def]
        values = window(addresses, offset)
        sums = one(sums, values, load_weights(weight))
        sums = two(sums, values, load_weights(weight + pitch))
        sums = three(sums, values, load_weights(weight + 2 * pitch))
        return four(sums, values, load_weights(weight + 3 * pitch))

    return add_four


@functools.cache
def weight_gradient(size: int, lanes: int, outputs: int) -> Any:
    """kernel((x, grad), (out,), (samples, parts, height, width, inputs, rows, columns, channels, stride)).

    out [parts, size, size, inputs, channels]: the gradient of the weights by each part of the samples. A thread
    computes ``lanes`` times ``outputs`` elements of one part.
    """
    border, add = size // 2, registers.outer(lanes, 1, 0)
    load, load_grad, store = memory.load("float32", lanes), memory.load("float32", outputs), _rows(lanes, outputs)
    nothing = (np.float32(0),) * (lanes * outputs)

    @kernel_of(1)
    def kernel(reads, writes, numbers):  # type: ignore[no-untyped-def]
        x, grad = reads
        samples, parts, height, width, inputs, rows, columns, channels, stride = numbers
        across, deep = channels // outputs, inputs // lanes
        index = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        while index < size * size * deep * across * parts:
            tap, number = index // across // deep % (size * size), index // across // deep // (size * size)
            c, o = index // across % deep * lanes, index % across * outputs
            i, j = tap // size - border, tap % size - border
            sums = nothing
            for sample in range(samples * number // parts, samples * (number + 1) // parts):
                for row in range(rows):
                    y = row * stride + i
                    if 0 <= y < height:
                        line = x + 4 * ((sample * height + y) * width * inputs + c)
                        of_row = grad + 4 * ((sample * rows + row) * columns * channels + o)
                        for column in range(columns):
                            z = column * stride + j
                            if 0 <= z < width:
                                values = load_grad(of_row + 4 * column * channels)
                                sums = add(sums, load(line + 4 * z * inputs), values)
            store(writes[0] + 4 * (((number * size * size + tap) * inputs + c) * channels + o), 4 * channels, sums)
            index += cuda.gridDim.x * THREADS

    return kernel


def _rows(rows: int, columns: int) -> Any:
    """store(to, pitch, numbers): one or four rows of ``columns`` numbers, ``pitch`` bytes apart."""
    store = memory.store("float32", columns)
    if rows == 1:

        @threadless
        def one_row(to, pitch, numbers):  # type: ignore[no-untyped-def]
            store(to, numbers)

        return one_row
    first, second, third, fourth = (registers.part(row * columns, columns) for row in range(rows))

    @threadless
    def four_rows(to, pitch, numbers):  # type: ignore[no-untyped-def]
        store(to, first(numbers))
        store(to + pitch, second(numbers))
        store(to + 2 * pitch, third(numbers))
        store(to + 3 * pitch, fourth(numbers))

    return four_rows
