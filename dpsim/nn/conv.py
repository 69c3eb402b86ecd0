"""A convolution as one matrix product over unfolded pictures (im2col)."""

from __future__ import annotations

from numpy.typing import DTypeLike

from dpsim.errors import ConfigError
from dpsim.nn.initial import he_normal
from dpsim.nn.layer import Layer, Shape, leaf_ranges
from dpsim.nn.ops import Ops
from dpsim.replica import Array, Leaves


class Conv2D(Layer):
    """y[b,h,w,o] = sum over i,j,c of x[b, s h+i-K//2, s w+j-K//2, c] W[i,j,c,o], zero outside; no bias.

    x [b, H, W, C], W [K, K, C, O], y [b, ceil(H/s), ceil(W/s), O], K odd, s the stride. A norm is to follow,
    hence no bias. Keeps the unfolded input (K*K times its size) for backward. The input gradient is the same
    operation on the output gradient (zero at pixels left out) with the kernel flipped.
    """

    kind = "conv"

    def __init__(
        self,
        name: str,
        ops: Ops,
        input_shape: Shape,
        outputs: int,
        dtype: DTypeLike,
        kernel: int = 3,
        stride: int = 1,
    ) -> None:
        if kernel % 2 == 0:
            raise ConfigError(f"layer {name!r} has a kernel of {kernel}", allowed="an odd kernel size")
        height, width, inputs = input_shape
        weight = (kernel, kernel, inputs, outputs)
        output_shape = (-(-height // stride), -(-width // stride), outputs)
        super().__init__(name, ops, input_shape, output_shape, dtype, weight=weight)
        self.kernel, self.stride, self._full_shape = kernel, stride, (height, width, outputs)
        self.activation_bytes_per_sample = height * width * kernel * kernel * inputs * self.dtype.itemsize

    def initial_parameters(self, seed: int) -> dict[str, Array]:
        (weight,) = self.tensors
        return {weight.name: he_normal(weight, seed, fan_in=self.kernel * self.kernel * self.input_shape[2])}

    def forward(self, x: Array, leaves: Leaves, *, training: bool) -> Array:
        self._columns = self._unfold("x", x)
        weight = self.parameters["weight"]
        full = self._product("y", self._columns, weight.reshape(-1, weight.shape[-1]), self._full_shape, leaves)
        if self.stride == 1:
            return full
        y = self.buffers.take("strided y", (len(x), *self.output_shape))
        self.ops.subsample(full, self.stride, out=y)
        return y

    def write_gradients(self, grad: Array, leaves: Leaves) -> None:
        ops, columns, flat_grad = self.ops, self._columns, self._full(grad).reshape(-1, grad.shape[-1])
        height, width, _ = self.input_shape
        area = height * width

        def write(start: int, stop: int, out: Array) -> None:
            rows = slice(start * area, stop * area)
            ops.matmul(columns[rows].T, flat_grad[rows], out=out.reshape(-1, out.shape[-1]))

        self.leaf_sum("weight", leaves, write)

    def input_gradient(self, grad: Array, leaves: Leaves) -> Array:
        weight = self.parameters["weight"]
        inputs, outputs = weight.shape[2:]
        flipped = self.buffers.take("flipped", (self.kernel, self.kernel, outputs, inputs))
        self.ops.flip_kernel(weight, flipped)
        full = self._full(grad)
        return self._product("dx", self._unfold("grad", full), flipped.reshape(-1, inputs), self.input_shape, leaves)

    def _full(self, grad: Array) -> Array:
        if self.stride == 1:
            return grad
        full = self.buffers.take("full gradient", (len(grad), *self._full_shape))
        self.ops.subsample_backward(grad, self.stride, out=full)
        return full

    def _unfold(self, name: str, x: Array) -> Array:
        """The windows of x as rows of K*K*C elements, one a pixel."""
        samples, height, width, channels = x.shape
        wide = self.kernel - 1
        padded = self.buffers.take(f"{name} padded", (samples, height + wide, width + wide, channels))
        columns = self.buffers.take(f"{name} columns", (samples * height * width, self.kernel * self.kernel * channels))
        self.ops.unfold(x, self.kernel, padded, columns)
        return columns

    def _product(self, name: str, columns: Array, weight: Array, shape: Shape, leaves: Leaves) -> Array:
        y = self.buffers.take(name, (leaves[-1], *shape))
        flat = y.reshape(-1, shape[-1])
        area = shape[0] * shape[1]
        for start, stop in leaf_ranges(leaves):
            rows = slice(start * area, stop * area)
            self.ops.matmul(columns[rows], weight, out=flat[rows])
        return y
