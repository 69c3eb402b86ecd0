"""The layers that keep no statistics: products, convolutions, rectifiers, pools, dropout, augmentation."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import DTypeLike

from dpsim import rng
from dpsim.choices import Operation, Problem
from dpsim.errors import ConfigError
from dpsim.nn.layer import Layer, Shape, WeightPart
from dpsim.nn.ops import Ops
from dpsim.replica import Array, Batch, Leaves

_LEVELS = 1 << 16
"""Rates are rounded to a multiple of one over this: a decision takes 16 random bits."""


class Dense(Layer):
    """y = x W + bias; x [b, inputs], W [inputs, outputs]. Keeps its input for backward.

    ``part``: what W is of a larger weight, which decides its initial values. Without ``bias`` y = x W.
    """

    kind = "dense"

    def __init__(
        self,
        name: str,
        ops: Ops,
        inputs: int,
        outputs: int,
        dtype: DTypeLike,
        part: WeightPart | None = None,
        *,
        bias: bool = True,
    ) -> None:
        tensors = {"weight": (inputs, outputs)} | ({"bias": (outputs,)} if bias else {})
        super().__init__(name, ops, (inputs,), (outputs,), dtype, **tensors)
        self._part = WeightPart.of(self) if part is None else part
        self._has_bias = bias
        self.activation_bytes_per_sample = inputs * self.dtype.itemsize

    def initial_parameters(self, seed: int) -> dict[str, Array]:
        weight, *biases = self.tensors
        zeros = {bias.name: np.zeros(bias.shape, bias.dtype) for bias in biases}
        return {weight.name: self._part.he_normal(seed)} | zeros

    def problems(self, rows: int) -> list[Problem]:
        operations: tuple[Operation, ...] = ("product", "transposed_product", "product_with_transposed")
        return [
            Problem(
                operation=operation, dtype=self.dtype.name, rows=rows, sizes=(*self.input_shape, *self.output_shape)
            )
            for operation in operations
        ]

    def forward(self, x: Array, leaves: Leaves, *, training: bool) -> Array:
        self._x = x
        y = self.buffers.lend("y", (len(x), *self.output_shape))
        self.ops.product(x, self.parameters["weight"], leaves, out=y)
        if self._has_bias:
            self.ops.channel_add(y, self.parameters["bias"], out=y)
        return y

    def write_gradients(self, grad: Array, leaves: Leaves) -> None:
        ops, x = self.ops, self._x
        at_once = ops.products_at_once(x, grad, leaves)
        self.leaf_sum("weight", leaves, lambda part, out: ops.transposed_product(x, grad, part, out), at_once)
        if self._has_bias:
            self.leaf_sum("bias", leaves, lambda part, out: ops.leaf_sums(grad, part, out), at_once)

    def input_gradient(self, grad: Array, leaves: Leaves) -> Array:
        dx = self.buffers.lend("dx", (len(grad), *self.input_shape))
        self.ops.product_with_transposed(grad, self.parameters["weight"], leaves, out=dx)
        return dx


class Conv2D(Layer):
    """y[b,h,w,o] = sum over i,j,c of x[b, s h+i-K//2, s w+j-K//2, c] W[i,j,c,o], zero outside; no bias.

    x [b, H, W, C], W [K, K, C, O], y [b, ceil(H/s), ceil(W/s), O], K odd, s the stride. A norm is to follow, hence no
    bias. Keeps its input for backward. ``part``: what W is of a larger weight, which decides its initial values.
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
        part: WeightPart | None = None,
    ) -> None:
        if kernel % 2 == 0:
            raise ConfigError(f"layer {name!r} has a kernel of {kernel}", allowed="an odd kernel size")
        if stride < 1:
            raise ConfigError(f"layer {name!r} has a stride of {stride}", allowed="a stride of 1 or more")
        height, width, inputs = input_shape
        output_shape = (-(-height // stride), -(-width // stride), outputs)
        super().__init__(name, ops, input_shape, output_shape, dtype, weight=(kernel, kernel, inputs, outputs))
        self.kernel, self.stride = kernel, stride
        self._part = WeightPart.of(self) if part is None else part
        self.activation_bytes_per_sample = math.prod(input_shape) * self.dtype.itemsize

    def initial_parameters(self, seed: int) -> dict[str, Array]:
        return {self.tensors[0].name: self._part.he_normal(seed)}

    def problems(self, rows: int) -> list[Problem]:
        sizes = (*self.input_shape, self.output_shape[2], self.kernel, self.stride)
        operations: tuple[Operation, ...] = ("conv2d", "conv2d_weight_gradient", "conv2d_input_gradient")
        return [Problem(operation=name, dtype=self.dtype.name, rows=rows, sizes=sizes) for name in operations]

    def forward(self, x: Array, leaves: Leaves, *, training: bool) -> Array:
        self._x = x
        y = self.buffers.lend("y", (len(x), *self.output_shape))
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
        dx = self.buffers.lend("dx", (len(grad), *self.input_shape))
        self.ops.conv2d_input_gradient(grad, self.parameters["weight"], self.stride, leaves, dx, self.buffers)
        return dx


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
        y = self.buffers.lend("y", x.shape)
        self._mask = self.buffers.take("mask", x.shape, bool)
        self.ops.relu(x, out=y, mask=self._mask)
        return y

    def input_gradient(self, grad: Array, leaves: Leaves) -> Array:
        if not self.done_before:
            self.ops.keep_where(grad, self._mask)
        return grad


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
        y = self.buffers.lend("y", (len(x), *self.output_shape))
        rows = self.buffers.lend("rows", (len(x), *self._row_shape))
        self._pick_left = self.buffers.take("pick left", rows.shape, bool)
        self._pick_upper = self.buffers.take("pick upper", y.shape, bool)
        self.ops.max_pool(x, rows, self._pick_left, self._pick_upper, out=y)
        return y

    def input_gradient(self, grad: Array, leaves: Leaves) -> Array:
        dx = self.buffers.lend("dx", (len(grad), *self.input_shape))
        rows = self.buffers.lend("rows", (len(grad), *self._row_shape))
        self.ops.max_pool_backward(grad, self._pick_left, self._pick_upper, rows, out=dx)
        return dx


class GlobalAveragePool(Layer):
    """y = mean over the picture; x [b, H, W, C], y [b, C]. Keeps nothing."""

    kind = "average-pool"

    def __init__(self, name: str, ops: Ops, input_shape: Shape, dtype: DTypeLike) -> None:
        super().__init__(name, ops, input_shape, input_shape[-1:], dtype)

    def forward(self, x: Array, leaves: Leaves, *, training: bool) -> Array:
        y = self.buffers.lend("y", (len(x), *self.output_shape))
        self.ops.spatial_mean(x, out_bC=y)
        return y

    def input_gradient(self, grad: Array, leaves: Leaves) -> Array:
        dx = self.buffers.lend("dx", (len(grad), *self.input_shape))
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


class Dropout(Layer):
    """y = x / (1 - rate) where the mask keeps an element, 0 elsewhere; in evaluation y = x.

    The mask of a sample is a function of the layer's name, the seed, the step and the sample's position in the global
    batch. An element takes 16 random bits, so ``rate`` is rounded to a multiple of 2**-16, which the scale follows.
    Keeps one byte an element, whether it was kept. ``of``: the name and shape of a larger layer, and the part of its
    last dimension that this one is; its mask is that part of the whole layer's.
    Source: Srivastava et al., JMLR 15 (2014), in its inverted form.
    """

    kind = "dropout"

    def __init__(
        self,
        name: str,
        ops: Ops,
        shape: Shape,
        dtype: DTypeLike,
        rate: float,
        *,
        of: tuple[str, Shape, slice] | None = None,
    ) -> None:
        check_rate(rate)
        super().__init__(name, ops, shape, shape, dtype)
        self.rate, self._of = rate, of
        self._dropped = min(round(rate * _LEVELS), _LEVELS - 1)
        self._scale = _LEVELS / (_LEVELS - self._dropped)
        self._seed, self._step, self._first_sample = 0, 0, 0
        self.activation_bytes_per_sample = math.prod(shape)

    def begin(self, batch: Batch) -> None:
        self._seed, self._step, self._first_sample = batch.seed, batch.step, batch.first_sample

    def forward(self, x: Array, leaves: Leaves, *, training: bool) -> Array:
        if not training:
            return x
        self._mask = self.buffers.take("mask", x.shape, bool)
        name, shape, columns = self._of or (self.name, self.input_shape, slice(None))
        mask = self._mask if self._of is None else self.buffers.take("whole mask", (len(x), *shape), bool)
        self.ops.random_mask(f"dropout {name}", self._seed, self._step, self._first_sample, self._dropped, out=mask)
        if mask is not self._mask:
            self._mask[...] = mask[..., columns]
        y = self.buffers.lend("y", x.shape)
        self.ops.scale_where(x, self._mask, self._scale, out=y)
        return y

    def input_gradient(self, grad: Array, leaves: Leaves) -> Array:
        self.ops.scale_where(grad, self._mask, self._scale, out=grad)
        return grad


def check_rate(rate: float) -> None:
    """Raise ``ConfigError`` unless 0 <= rate < 1."""
    if not 0 <= rate < 1:
        raise ConfigError(f"a dropout rate of {rate}", allowed="0 or more, and less than 1")


class Augment(Layer):
    """In training, each picture moved by up to ``crop`` pixels a side, and mirrored left to right at rate ``flip``.

    Pixels from outside the picture are 0, about the mean of a data set; in evaluation y = x. The move is a function of
    the seed, the step and the sample's position in the global batch. It takes 16 random bits, so rates are multiples of
    2**-16. The layer comes before all layers with parameters and has no gradient. Raises ``ConfigError``.
    Source: He et al., arXiv:1512.03385, section 4.2 (crop 4, flip 0.5).
    """

    kind = "augment"

    def __init__(self, name: str, ops: Ops, shape: Shape, dtype: DTypeLike, crop: int, flip: float) -> None:
        check_crop(crop)
        check_flip(flip)
        if crop >= min(shape[:2]):
            raise ConfigError(
                f"pictures of {shape[0]}x{shape[1]} moved by up to {crop} pixels",
                allowed=f"crop={min(shape[:2]) - 1} at most",
            )
        super().__init__(name, ops, shape, shape, dtype)
        self.crop, self._flipped = crop, round(flip * _LEVELS)
        self._seed, self._step, self._first_sample = 0, 0, 0

    def begin(self, batch: Batch) -> None:
        self._seed, self._step, self._first_sample = batch.seed, batch.step, batch.first_sample

    def forward(self, x: Array, leaves: Leaves, *, training: bool) -> Array:
        if not training:
            return x
        bits = rng.sample_bits(
            f"augment {self.name}", self._seed, (len(x), 3), stream=self._step, first_sample=self._first_sample
        ).astype(int)
        y = self.buffers.lend("y", x.shape)
        self.ops.move_pictures(
            x, self.crop, bits[:, :2] * (2 * self.crop + 1) // _LEVELS, bits[:, 2] < self._flipped, y, self.buffers
        )
        return y


def check_crop(crop: int) -> None:
    """Raise ``ConfigError`` for less than 0 pixels."""
    if crop < 0:
        raise ConfigError(f"crop is {crop}", allowed="0 pixels (none) or more; often 4 of 32")


def check_flip(rate: float) -> None:
    """Raise ``ConfigError`` for a rate outside [0, 1]."""
    if not 0 <= rate <= 1:
        raise ConfigError(f"flip is {rate}", allowed="0 (never) to 1 (always); usually 0.5")
