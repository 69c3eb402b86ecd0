"""``LayerKernels``: the kernels of layers, called with arrays in the memory of a GPU, in one of numba's streams.

Importing this loads numba-cuda; in its simulator they run on NumPy's arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dpsim.kernels import batch_norm_cuda, conv_cuda, elementwise_cuda
from dpsim.kernels.allreduce.cuda.kernels import SIMULATED, THREADS, blocks_for
from dpsim.kernels.allreduce.cuda.prepare import stage
from dpsim.kernels.column_sums_cuda import COLUMNS, column_sums
from dpsim.kernels.conv_cuda import PIXELS, lanes_of, parts_of

_MOST_BLOCKS = 1 << 12
"""Blocks of a launch; each goes over as many elements as it must."""
_MOST_OUTPUTS = 8
"""Output channels that a thread of a convolution computes at once."""


_bound = functools.lru_cache(maxsize=1 << 13)(stage)
"""Launches; arrays of a training lie where they are from step to step, so each is bound once."""


class LayerKernels:
    """See ``dpsim.memory.LayerKernels``. ``zeros(size_bytes)`` allocates memory of the device, at multiples of 256."""

    def __init__(self, stream: Any, zeros: Callable[[int], Any]) -> None:
        self._stream, self._zeros = stream, zeros
        self._scratch = zeros(0)

    @property
    def size_bytes(self) -> int:
        return int(self._scratch.nbytes)

    def conv2d(self, x: Any, weight: Any, stride: int, out: Any) -> None:
        self._convolve(x, weight, stride, 1, out)

    def conv2d_input_gradient(self, grad: Any, flipped: Any, stride: int, out: Any) -> None:
        self._convolve(grad, flipped, 1, stride, out)

    def _convolve(self, x: Any, weight: Any, stride: int, spread: int, out: Any) -> None:
        (size, _, inputs, channels), (samples, rows, columns, _) = weight.shape, out.shape
        weight = weight if self._aligned(weight) else weight.copy()  # tensors of a bucket stand without gaps
        lanes = lanes_of(inputs, self._aligned(x))
        outputs = lanes_of(channels, self._aligned(weight, out), _MOST_OUTPUTS)
        kernel = conv_cuda.convolution(size, spread, lanes, outputs)
        threads = -(-samples * rows * columns // PIXELS) * (channels // outputs)
        numbers = (*x.shape, rows, columns, channels, stride)
        self.launch(kernel, (_blocks(threads), 1), (x, weight), (out,), numbers)

    def conv2d_weight_gradient(self, x: Any, grad: Any, stride: int, out: Any) -> None:
        (size, _, inputs, channels), (samples, rows, columns, _) = out.shape, grad.shape
        parts = parts_of(samples, out.size)
        of_parts = out if parts == 1 else self._take(parts * out.size, np.float32)
        lanes, outputs = lanes_of(inputs, self._aligned(x)), lanes_of(channels, self._aligned(grad, of_parts), 4)
        threads = out.size // (lanes * outputs)
        numbers = (samples, parts, *x.shape[1:], rows, columns, channels, stride)
        kernel = conv_cuda.weight_gradient(size, lanes, outputs)
        self.launch(kernel, (_blocks(threads * parts), 1), (x, grad), (of_parts,), numbers)
        if parts > 1:
            grid = (-(-out.size // COLUMNS), 1)
            self.launch(column_sums("float32"), grid, (of_parts,), (out,), (parts, out.size))

    def moments(self, x: Any, mean_GC: Any, squares_GC: Any) -> None:
        sums, numbers, grid = self._sums((x,), mean_GC.shape)
        self.launch(batch_norm_cuda.moments(), grid, (sums,), (mean_GC, squares_GC), numbers)

    def local_moments(
        self,
        x: Any,
        gamma: Any,
        running: tuple[Any, Any],
        momentum: float,
        epsilon: float,
        results_1C: tuple[Any, Any, Any],
    ) -> None:
        sums, numbers, grid = self._sums((x,), (1, x.shape[-1]))
        floats = map(np.float32, (momentum, 1 - momentum, epsilon))
        writes = (*results_1C, *running)
        self.launch(batch_norm_cuda.local_moments(), grid, (sums, gamma), writes, (*numbers, *floats))

    def normalise(self, x: Any, mean_GC: Any, scale_GC: Any, shift_C: Any, out: Any, rectified: bool) -> None:
        lanes = self._channel_lanes(x, mean_GC, scale_GC, out)
        groups, kernel = mean_GC.size // x.shape[-1], batch_norm_cuda.normalise(rectified, lanes)
        self._elementwise(kernel, (x, mean_GC, scale_GC, shift_C), out, groups, lanes)

    def sums(
        self, grad: Any, x: Any, mean_GC: Any, dot_GC: Any, sum_GC: Any, rectifier: tuple[Any, Any] | None
    ) -> None:
        sums, numbers, grid = self._gradient_sums(grad, x, mean_GC, rectifier)
        self.launch(batch_norm_cuda.gradient_sums(), grid, (sums, mean_GC), (dot_GC, sum_GC), numbers)

    def local_gradients(
        self,
        grad: Any,
        x: Any,
        statistics_1C: tuple[Any, Any, Any],
        rectifier: tuple[Any, Any] | None,
        results_C: tuple[Any, Any, Any, Any],
    ) -> None:
        sums, numbers, grid = self._gradient_sums(grad, x, statistics_1C[0], rectifier)
        local_numbers = (*numbers, np.float32(1 / numbers[0]))
        self.launch(batch_norm_cuda.local_gradients(), grid, (sums, *statistics_1C), results_C, local_numbers)

    def normalise_backward(
        self, grad: Any, x: Any, mean_GC: Any, a_GC: Any, b_GC: Any, c_GC: Any, shift_C: Any | None
    ) -> None:
        values = (mean_GC, a_GC, b_GC, c_GC) if shift_C is None else (mean_GC, a_GC, b_GC, c_GC, shift_C)
        lanes = self._channel_lanes(grad, x, *values[:4])
        groups, kernel = mean_GC.size // x.shape[-1], batch_norm_cuda.backward(shift_C is not None, lanes)
        self._elementwise(kernel, (grad, x, *values), grad, groups, lanes)

    def rectified_sum(self, a: Any, b: Any, out: Any) -> None:
        lanes = lanes_of(out.size, self._aligned(a, b, out))
        grid = (_blocks(out.size // lanes), 1)
        self.launch(elementwise_cuda.rectified_sum(lanes), grid, (a, b), (out,), (out.size,))

    def both_gradients(self, grad: Any, y: Any, copy: Any) -> None:
        lanes = lanes_of(y.size, self._aligned(grad, y, copy))
        grid = (_blocks(y.size // lanes), 1)
        self.launch(elementwise_cuda.both_gradients(lanes), grid, (grad, y), (grad, copy), (y.size,))

    def tree_sum(self, parts: Sequence[Any], out: Any) -> None:
        lanes = lanes_of(out.size, self._aligned(*parts, out))
        grid = (_blocks(out.size // lanes), 1)
        self.launch(elementwise_cuda.tree_sum(len(parts), lanes), grid, parts, (out,), (out.size,))

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, int],
        reads: Sequence[Any],
        writes: Sequence[Any],
        numbers: tuple[Any, ...],
    ) -> None:
        """Ask the device for one kernel on arrays, each contiguous."""
        arguments = (tuple(map(_address, reads)), tuple(map(_address, writes)), numbers)
        _bound(kernel, grid, arguments)(self._stream)

    def _gradient_sums(self, grad: Any, x: Any, mean_GC: Any, rectifier: tuple[Any, Any] | None) -> Any:
        arrays = (grad, x) if rectifier is None else (grad, x, mean_GC, *rectifier)
        return self._sums(arrays, mean_GC.shape)

    def _sums(self, reads: tuple[Any, ...], shape: tuple[int, int]) -> tuple[Any, tuple[int, int, int], Any]:
        """Return the sums of blocks over rows of the arrays; what the kernel that adds these takes, and its grid."""
        (groups, channels), size = shape, reads[0].size
        rows, lanes = size // (groups * channels), self._channel_lanes(*reads[:4])
        vectors = channels // lanes
        blocks = batch_norm_cuda.blocks_of(rows, vectors)
        sums, numbers = self._take(groups * blocks * 2 * channels, np.float64), (rows, channels, blocks)
        kernel = batch_norm_cuda.sums_of_blocks(len(reads) > 1, len(reads) > 2, lanes)
        self.launch(kernel, (blocks, groups * -(-vectors // THREADS)), reads, (sums,), numbers)
        return sums, numbers, (-(-channels // COLUMNS), groups)

    def _elementwise(self, kernel: Any, reads: tuple[Any, ...], out: Any, groups: int, lanes: int) -> None:
        channels = out.shape[-1]
        rows = out.size // (groups * channels)
        self.launch(kernel, (_blocks(rows * channels // lanes), groups), reads, (out,), (rows, channels))

    def _channel_lanes(self, *arrays: Any) -> int:
        return lanes_of(arrays[0].shape[-1], self._aligned(*arrays))

    def _aligned(self, *arrays: Any) -> bool:
        return all(_address(array) % 16 == 0 for array in arrays)

    def _take(self, count: int, dtype: Any) -> Any:
        """Return numbers of memory that the next kernels write and read, in the order of the stream."""
        size_bytes = count * np.dtype(dtype).itemsize
        if self._scratch.nbytes < size_bytes:
            self._scratch = self._zeros(size_bytes)
        return self._scratch[:size_bytes].view(dtype)


def _blocks(threads: int) -> int:
    return blocks_for(threads, _MOST_BLOCKS)


def _address(array: Any) -> int:
    interface = array.__array_interface__ if SIMULATED else array.__cuda_array_interface__
    return int(interface["data"][0])
