"""Column blocks: two layers of weights that are computed block by block, so that devices can own whole blocks.

The first layer of a pair is cut into blocks of its columns (output features or channels), the second into blocks of the
same rows; what stands between them treats every channel alike. So block k of the second layer needs no more than block
k of the first, and the pair ends in a sum over blocks: y = sum over k of f(x A_k) B_k. Backward ends in one too, of the
gradients of x. Both sums go along the tree of ``dpsim.kernels.allreduce.tree``, whoever computes the blocks.

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (2019),
section 3; the fixed blocks and their tree are dpsim's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from dpsim.errors import ConfigError
from dpsim.kernels.allreduce.tree import fold, leaf_tree, subtrees
from dpsim.nn.batch_norm import BatchNorm
from dpsim.nn.layer import Layer, Shape, WeightPart
from dpsim.nn.layers import Conv2D, Dense, Dropout, MaxPool2D, ReLU
from dpsim.nn.ops import Ops
from dpsim.replica import Array, Leaves, OrderedSum

LEAST_COLUMNS = 16
"""Columns of the narrowest block: 64 bytes of float32. Layers that would have narrower ones stay whole."""
MOST_BLOCKS = 64
_CHANNELWISE = ReLU | BatchNorm | Dropout | MaxPool2D


class Pair:
    """The data that the blocks of one pair of layers share while they compute.

    ``hands_back``: whether a layer before the pair is trained, so that it needs the gradient of the pair's input. Of
    ``count`` blocks this rank computes those in ``own``; ``add`` adds partial sums over the ranks that have the others.
    """

    x: Array
    gradient: Array

    def __init__(self, count: int, *, hands_back: bool) -> None:
        self.count, self.hands_back = count, hands_back
        self.own = range(count)
        self.add: OrderedSum | None = None
        self.waiting: list[Array] = []
        """What has come out of the blocks so far, in the order in which they are computed."""

    def take(self, own: range, add: OrderedSum | None) -> None:
        """Compute these blocks alone from now on."""
        self.own, self.add = own, add

    def summed(self, ops: Ops, of_blocks: Sequence[Array]) -> Array:
        """Return the sum over all blocks, from those of this rank in their order, which are overwritten."""

        def add(left: Array, right: Array) -> Array:
            ops.add(left, right, out=left)
            return left

        first, partial = self.own.start, []
        for low, high in subtrees(self.count, first, self.own.stop):
            partial.append(fold(leaf_tree(high - low), of_blocks[low - first : high - first].__getitem__, add))
        return partial[0] if self.add is None else self.add(partial)


class BlockStart(Layer):
    """y = x for block ``number``; the gradient of x is the sum of those of all blocks."""

    kind = "block start"

    def __init__(self, name: str, ops: Ops, shape: Shape, dtype: DTypeLike, pair: Pair, number: int) -> None:
        super().__init__(name, ops, shape, shape, dtype)
        self.pair, self.column_block = pair, number

    def forward(self, x: Array, leaves: Leaves, *, training: bool) -> Array:
        pair = self.pair
        if self.column_block == pair.own.start:
            pair.x, pair.waiting = x, []
        else:
            pair.waiting.append(x)
        return pair.x

    def input_gradient(self, grad: Array, leaves: Leaves) -> Array:
        pair = self.pair
        pair.waiting.insert(0, grad)
        if self.column_block > pair.own.start:
            return pair.gradient
        if not pair.hands_back:
            return grad
        total = pair.summed(self.ops, pair.waiting)
        if pair.add is None:
            return total
        dx = self.buffers.lend("dx", total.shape)
        dx[...] = total
        return dx


class BlockSum(Layer):
    """y = the sum of what all blocks computed, plus a bias if the second layer of the pair has one."""

    kind = "block sum"

    def __init__(self, name: str, ops: Ops, shape: Shape, dtype: DTypeLike, pair: Pair, *, bias: bool) -> None:
        super().__init__(name, ops, shape, shape, dtype, **({"bias": shape} if bias else {}))
        self.pair = pair

    def initial_parameters(self, seed: int) -> dict[str, Array]:
        return {tensor.name: np.zeros(tensor.shape, tensor.dtype) for tensor in self.tensors}

    def forward(self, x: Array, leaves: Leaves, *, training: bool) -> Array:
        pair = self.pair
        total = pair.summed(self.ops, [*pair.waiting, x])
        if not self.tensors and pair.add is None:
            return total
        y = self.buffers.lend("y", total.shape)
        if self.tensors:
            self.ops.channel_add(total, self.parameters["bias"], out=y)
        else:
            y[...] = total
        return y

    def write_gradients(self, grad: Array, leaves: Leaves) -> None:
        if self.tensors:
            self.leaf_sum("bias", leaves, lambda part, out: self.ops.leaf_sums(grad, part, out))

    def input_gradient(self, grad: Array, leaves: Leaves) -> Array:
        self.pair.gradient, self.pair.waiting = grad, []
        return grad


@dataclass(frozen=True)
class _Block:
    """Block ``number`` of a pair: the columns that are its part of what the first layer puts out."""

    number: int
    columns: slice

    @property
    def width(self) -> int:
        return int(self.columns.stop - self.columns.start)

    def name(self, layer: Layer) -> str:
        return f"{layer.name}.block{self.number}"

    def shape(self, full_shape: Shape) -> Shape:
        return (*full_shape[:-1], self.width)


def cut_columns(layers: Sequence[Layer], blocks: int) -> list[Layer]:
    """Return the same chain with every pair of layers that can be cut computed in so many column blocks.

    Pairs are made from the front, of two products or of two convolutions with nothing but rectifiers, dropout, batch
    norms and maximum pools between them. The last layer with tensors stays whole, and so does a pair with blocks of
    less than ``LEAST_COLUMNS`` columns. With one block nothing changes.
    """
    if blocks == 1:
        return list(layers)
    chain: list[Layer] = []
    last = max(number for number, layer in enumerate(layers) if layer.tensors)
    number = 0
    while number < len(layers):
        second = _second(layers, number, last)
        if second is None or layers[number].output_shape[-1] < blocks * LEAST_COLUMNS:
            chain.append(layers[number])
            number += 1
            continue
        hands_back = any(layer.tensors for layer in chain)
        chain += _pair(layers[number : second + 1], Pair(blocks, hands_back=hands_back))
        number = second + 1
    return chain


def check_column_blocks(blocks: int) -> None:
    """Raise ``ConfigError`` unless there are 1 to ``MOST_BLOCKS`` blocks."""
    if not 1 <= blocks <= MOST_BLOCKS:
        raise ConfigError(f"column_blocks is {blocks}", allowed=f"1 (whole layers) to {MOST_BLOCKS}")


def _second(layers: Sequence[Layer], first: int, last: int) -> int | None:
    """Return the second layer of the pair that a layer is the first of, or None."""
    kind = next((kind for kind in (Dense, Conv2D) if isinstance(layers[first], kind)), None)
    after = itertools.dropwhile(lambda number: isinstance(layers[number], _CHANNELWISE), range(first + 1, last))
    second = next(after, None)
    return second if kind is not None and second is not None and isinstance(layers[second], kind) else None


def _pair(layers: Sequence[Layer], pair: Pair) -> list[Layer]:
    """Return the layers of a pair, block after block, and their sum."""
    first, second, count = layers[0], layers[-1], pair.count
    outputs = first.output_shape[-1]
    chain: list[Layer] = []
    for number in range(count):
        block = _Block(number, slice(outputs * number // count, outputs * (number + 1) // count))
        start = BlockStart(f"{block.name(first)}.start", first.ops, first.input_shape, first.dtype, pair, number)
        parts = [_columns_of(first, block), *(_channels_of(layer, block) for layer in layers[1:-1])]
        parts[0].reads_samples = not pair.hands_back
        for part in (parts := [*parts, _rows_of(second, block)]):
            part.column_block = number
        chain += [start, *parts]
    bias = any(tensor.name == f"{second.name}.bias" for tensor in second.tensors)
    return [*chain, BlockSum(second.name, second.ops, second.output_shape, second.dtype, pair, bias=bias)]


def _columns_of(layer: Layer, block: _Block) -> Layer:
    part = WeightPart.of(layer, columns=block.columns)
    if isinstance(layer, Conv2D):
        convolution = layer.kernel, layer.stride
        return Conv2D(block.name(layer), layer.ops, layer.input_shape, block.width, layer.dtype, *convolution, part)
    return Dense(block.name(layer), layer.ops, layer.input_shape[0], block.width, layer.dtype, part)


def _rows_of(layer: Layer, block: _Block) -> Layer:
    part, shape = WeightPart.of(layer, rows=block.columns), block.shape(layer.input_shape)
    if isinstance(layer, Conv2D):
        outputs, convolution = layer.output_shape[-1], (layer.kernel, layer.stride)
        return Conv2D(block.name(layer), layer.ops, shape, outputs, layer.dtype, *convolution, part)
    return Dense(block.name(layer), layer.ops, block.width, layer.output_shape[0], layer.dtype, part, bias=False)


def _channels_of(layer: Layer, block: _Block) -> Layer:
    name, ops, shape = block.name(layer), layer.ops, block.shape(layer.input_shape)
    if isinstance(layer, Dropout):
        return Dropout(name, ops, shape, layer.dtype, layer.rate, of=(layer.name, layer.input_shape, block.columns))
    kind = next(kind for kind in (ReLU, BatchNorm, MaxPool2D) if isinstance(layer, kind))
    return kind(name, ops, shape, layer.dtype)
