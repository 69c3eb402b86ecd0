"""A convolution."""

from __future__ import annotations

import math

from numpy.typing import DTypeLike

from dpsim.choices import Operation, Problem
from dpsim.errors import ConfigError
from dpsim.nn.initial import he_normal
from dpsim.nn.layer import Layer, Shape
from dpsim.nn.ops import Ops
from dpsim.replica import Array, Leaves


class Conv2D(Layer):
    """y[b,h,w,o] = sum over i,j,c of x[b, s h+i-K//2, s w+j-K//2, c] W[i,j,c,o], zero outside; no bias.

    x [b, H, W, C], W [K, K, C, O], y [b, ceil(H/s), ceil(W/s), O], K odd, s the stride. A norm is to follow, hence no
    bias. Keeps its input for backward.
    """

    kind = "conv"

    def __init__(
        self, name: str, ops: Ops, input_shape: Shape, outputs: int, dtype: DTypeLike, kernel: int = 3, stride: int = 1
    ) -> None:
        if kernel % 2 == 0:
            raise ConfigError(f"layer {name!r} has a kernel of {kernel}", allowed="an odd kernel size")
        if stride < 1:
            raise ConfigError(f"layer {name!r} has a stride of {stride}", allowed="a stride of 1 or more")
        height, width, inputs = input_shape
        output_shape = (-(-height // stride), -(-width // stride), outputs)
        super().__init__(name, ops, input_shape, output_shape, dtype, weight=(kernel, kernel, inputs, outputs))
        self.kernel, self.stride = kernel, stride
        self.activation_bytes_per_sample = math.prod(input_shape) * self.dtype.itemsize

    def initial_parameters(self, seed: int) -> dict[str, Array]:
        (weight,) = self.tensors
        return {weight.name: he_normal(weight, seed, fan_in=self.kernel * self.kernel * self.input_shape[2])}

    def problems(self, rows: int) -> list[Problem]:
        sizes = (*self.input_shape, self.output_shape[2], self.kernel, self.stride)
        operations: tuple[Operation, ...] = ("conv2d", "conv2d_weight_gradient", "conv2d_input_gradient")
        return [Problem(operation=name, dtype=self.dtype.name, rows=rows, sizes=sizes) for name in operations]

    def forward(self, x: Array, leaves: Leaves, *, training: bool) -> Array:
        self._x = x
        y = self.buffers.take("y", (len(x), *self.output_shape))
        self.ops.conv2d(x, self.parameters["weight"], self.stride, leaves, y, self.buffers)
        return y

    def write_gradients(self, grad: Array, leaves: Leaves) -> None:
        ops, x, stride, work = self.ops, self._x, self.stride, self.buffers
        self.leaf_sum(
            "weight",
            leaves,
            lambda part, out: ops.conv2d_weight_gradient(x, grad, part, stride, out, work),
            ops.conv_at_once(x, self.parameters["weight"], stride, leaves),
        )

    def input_gradient(self, grad: Array, leaves: Leaves) -> Array:
        dx = self.buffers.take("dx", (len(grad), *self.input_shape))
        self.ops.conv2d_input_gradient(grad, self.parameters["weight"], self.stride, leaves, dx, self.buffers)
        return dx
