"""Layers that reduce or rearrange the picture: maximum pooling, global average pooling, flatten."""

from __future__ import annotations

import math

from numpy.typing import DTypeLike

from dpsim.nn.layer import Layer, Shape
from dpsim.nn.ops import Ops
from dpsim.replica import Array, Leaves


class MaxPool2D(Layer):
    """Maximum over windows of 2 x 2 with stride 2; x [b, H, W, C], y [b, H//2, W//2, C]; an odd edge is left out.

    The first of equal elements (row by row) wins. Keeps two masks that name the winners.
    """

    kind = "max-pool"

    def __init__(self, name: str, ops: Ops, input_shape: Shape, dtype: DTypeLike) -> None:
        height, width, channels = input_shape
        output_shape = (height // 2, width // 2, channels)
        super().__init__(name, ops, input_shape, output_shape, dtype)
        self._row_shape = (2 * output_shape[0], *output_shape[1:])
        self.activation_bytes_per_sample = math.prod(self._row_shape) + math.prod(output_shape)

    def forward(self, x: Array, leaves: Leaves, *, training: bool) -> Array:
        y = self.buffers.take("y", (len(x), *self.output_shape))
        rows = self.buffers.take("rows", (len(x), *self._row_shape))
        self._pick_left = self.buffers.take("pick left", rows.shape, bool)
        self._pick_upper = self.buffers.take("pick upper", y.shape, bool)
        self.ops.max_pool(x, rows, self._pick_left, self._pick_upper, out=y)
        return y

    def input_gradient(self, grad: Array, leaves: Leaves) -> Array:
        dx = self.buffers.take("dx", (len(grad), *self.input_shape))
        rows = self.buffers.take("rows", (len(grad), *self._row_shape))
        self.ops.max_pool_backward(grad, self._pick_left, self._pick_upper, rows, out=dx)
        return dx


class GlobalAveragePool(Layer):
    """y = mean over the picture; x [b, H, W, C], y [b, C]. Keeps nothing."""

    kind = "average-pool"

    def __init__(self, name: str, ops: Ops, input_shape: Shape, dtype: DTypeLike) -> None:
        super().__init__(name, ops, input_shape, input_shape[-1:], dtype)

    def forward(self, x: Array, leaves: Leaves, *, training: bool) -> Array:
        y = self.buffers.take("y", (len(x), *self.output_shape))
        self.ops.spatial_mean(x, out_bC=y)
        return y

    def input_gradient(self, grad: Array, leaves: Leaves) -> Array:
        dx = self.buffers.take("dx", (len(grad), *self.input_shape))
        self.ops.spatial_mean_backward(grad, out_bHWC=dx)
        return dx


class Flatten(Layer):
    """y = the elements of x in one row a sample, without a copy. Keeps nothing."""

    kind = "flatten"

    def __init__(self, name: str, ops: Ops, input_shape: Shape, dtype: DTypeLike) -> None:
        super().__init__(name, ops, input_shape, (math.prod(input_shape),), dtype)

    def forward(self, x: Array, leaves: Leaves, *, training: bool) -> Array:
        return x.reshape(len(x), *self.output_shape)

    def input_gradient(self, grad: Array, leaves: Leaves) -> Array:
        return grad.reshape(len(grad), *self.input_shape)
