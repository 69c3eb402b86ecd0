"""The rectifier."""

from __future__ import annotations

import math

from numpy.typing import DTypeLike

from dpsim.nn.layer import Layer, Shape
from dpsim.nn.ops import Ops
from dpsim.replica import Array, Leaves


class ReLU(Layer):
    """y = max(x, 0). Keeps one byte an element, whether x > 0.

    ``done_before``: the layer before does this one's part of forward and backward in its own kernels.
    """

    kind = "relu"
    done_before = False

    def __init__(self, name: str, ops: Ops, shape: Shape, dtype: DTypeLike) -> None:
        super().__init__(name, ops, shape, shape, dtype)
        self.activation_bytes_per_sample = math.prod(shape)

    def forward(self, x: Array, leaves: Leaves, *, training: bool) -> Array:
        if self.done_before:
            return x
        y = self.buffers.take("y", x.shape)
        self._mask = self.buffers.take("mask", x.shape, bool)
        self.ops.relu(x, out=y, mask=self._mask)
        return y

    def input_gradient(self, grad: Array, leaves: Leaves) -> Array:
        if not self.done_before:
            self.ops.keep_where(grad, self._mask)
        return grad
