"""A fully connected layer."""

from __future__ import annotations

from numpy.typing import DTypeLike

from dpsim.choices import Operation, Problem
from dpsim.nn.initial import he_normal, zeros
from dpsim.nn.layer import Layer
from dpsim.nn.ops import Ops
from dpsim.replica import Array, Leaves


class Dense(Layer):
    """y = x W + bias; x [b, inputs], W [inputs, outputs]. Keeps its input for backward."""

    kind = "dense"

    def __init__(self, name: str, ops: Ops, inputs: int, outputs: int, dtype: DTypeLike) -> None:
        super().__init__(name, ops, (inputs,), (outputs,), dtype, weight=(inputs, outputs), bias=(outputs,))
        self.activation_bytes_per_sample = inputs * self.dtype.itemsize

    def initial_parameters(self, seed: int) -> dict[str, Array]:
        weight, bias = self.tensors
        return {weight.name: he_normal(weight, seed, fan_in=weight.shape[0]), bias.name: zeros(bias)}

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
        y = self.buffers.take("y", (len(x), *self.output_shape))
        self.ops.product(x, self.parameters["weight"], leaves, out=y)
        self.ops.channel_add(y, self.parameters["bias"], out=y)
        return y

    def write_gradients(self, grad: Array, leaves: Leaves) -> None:
        ops, x = self.ops, self._x
        at_once = ops.products_at_once(x, grad, leaves)
        self.leaf_sum("weight", leaves, lambda part, out: ops.transposed_product(x, grad, part, out), at_once)
        self.leaf_sum("bias", leaves, lambda part, out: ops.leaf_sums(grad, part, out), at_once)

    def input_gradient(self, grad: Array, leaves: Leaves) -> Array:
        dx = self.buffers.take("dx", (len(grad), *self.input_shape))
        self.ops.product_with_transposed(grad, self.parameters["weight"], leaves, out=dx)
        return dx
