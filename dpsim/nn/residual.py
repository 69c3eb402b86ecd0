"""Residual connections in a flat chain of layers: three layers without tensors that share the branches' arrays."""

from __future__ import annotations

from collections.abc import Sequence

from numpy.typing import DTypeLike

from dpsim.errors import ConfigError
from dpsim.nn.column_blocks import BlockStart, BlockSum, Pair
from dpsim.nn.layer import Layer, Shape
from dpsim.nn.ops import Ops
from dpsim.replica import Array, Leaves


class Branch:
    """The value that waits while the layers of the other branch run: an activation, or in backward a gradient."""

    waiting: Array


def residual(name: str, body: Sequence[Layer], shortcut: Sequence[Layer] = ()) -> list[Layer]:
    """y = body(x) + shortcut(x), as layers one after another; without ``shortcut`` it is x itself.

    Forward runs ``Fork`` body ``Swap`` shortcut ``Join``, backward the reverse: every layer announces its own
    gradients, and residuals nest. Raises ``ConfigError`` where the branches do not fit together.
    """
    if not body:
        raise ConfigError(f"residual {name!r} has no body", allowed="at least one layer")
    before, after = body[0].input_shape, body[-1].output_shape
    ends = (shortcut[0].input_shape, shortcut[-1].output_shape) if shortcut else (before, before)
    if ends != (before, after):
        raise ConfigError(
            f"residual {name!r} has a shortcut from {ends[0]} to {ends[1]}",
            allowed=f"a shortcut from {before} to {after}, as its body",
            remedy="without a shortcut of its own, the body must keep the shape",
        )
    branch, ops, dtype = Branch(), body[0].ops, body[0].dtype
    chain: list[Layer] = [Fork(f"{name}.fork", ops, before, before, dtype, branch), *body]
    if shortcut:
        chain += [Swap(f"{name}.swap", ops, after, before, dtype, branch), *shortcut]
    return [*chain, Join(f"{name}.join", ops, after, after, dtype, branch)]


class _Marker(Layer):
    def __init__(
        self, name: str, ops: Ops, input_shape: Shape, output_shape: Shape, dtype: DTypeLike, branch: Branch
    ) -> None:
        super().__init__(name, ops, input_shape, output_shape, dtype)
        self.branch = branch


class Fork(_Marker):
    """y = x, which also waits for the other branch; its gradient is the sum of both branches' gradients."""

    kind = "fork"

    def forward(self, x: Array, leaves: Leaves, *, training: bool) -> Array:
        self.branch.waiting = x
        return x

    def input_gradient(self, grad: Array, leaves: Leaves) -> Array:
        self.ops.add(grad, self.branch.waiting, out=grad)
        del self.branch.waiting
        return grad


class Swap(_Marker):
    """An exchange: what waited goes on, and what came waits. The end of one branch and the beginning of the other."""

    kind = "swap"

    def forward(self, x: Array, leaves: Leaves, *, training: bool) -> Array:
        x, self.branch.waiting = self.branch.waiting, x
        return x

    def input_gradient(self, grad: Array, leaves: Leaves) -> Array:
        grad, self.branch.waiting = self.branch.waiting, grad
        return grad


class Join(_Marker):
    """y = x + what waited, into an array of its own: the layers before it may need their outputs in backward.

    Both branches get its gradient, one of them a copy, since a layer may overwrite the gradient it is given.
    ``rectifies``: y is max(y, 0), in one kernel with the sum; the rectifier that follows leaves it and its gradient
    alone.
    """

    kind = "join"
    rectifies = False

    def forward(self, x: Array, leaves: Leaves, *, training: bool) -> Array:
        y = self._y = self.buffers.lend("y", x.shape)
        kernels = self.ops.layer_kernels(self.dtype)
        if self.rectifies and kernels is not None:
            kernels.rectified_sum(x, self.branch.waiting, y)
        else:
            self.ops.add(x, self.branch.waiting, out=y)
        return y

    def input_gradient(self, grad: Array, leaves: Leaves) -> Array:
        self.branch.waiting = self.buffers.lend("copy", grad.shape)
        kernels = self.ops.layer_kernels(self.dtype)
        if self.rectifies and kernels is not None:
            kernels.both_gradients(grad, self._y, self.branch.waiting)
        else:
            self.branch.waiting[...] = grad
        return grad


def layers_read(chain: Sequence[Layer]) -> list[tuple[str, ...] | None]:
    """Return the names of the layers that each layer of a chain reads; ``None``: the one before it.

    A fork hands on what it is given, so the other branch reads the layer before it (if it is the first, the fork).
    Every column block of a pair reads the layer before the pair, and their sum the last layer of each.
    """
    waiting: dict[Branch, str] = {}
    entered: dict[Pair, tuple[str, ...]] = {}
    ends: dict[Pair, tuple[str, ...]] = {}
    read: list[tuple[str, ...] | None] = []
    before = chain[0].name
    for number, layer in enumerate(chain):
        read.append(None)
        if isinstance(layer, BlockStart):
            pair = layer.pair
            if layer.column_block:
                ends[pair] = (*ends.get(pair, ()), before)
            entered.setdefault(pair, (before,) if number else ())
            read[-1] = entered[pair]
        elif isinstance(layer, BlockSum):
            read[-1] = (*ends[layer.pair], before)
        if isinstance(layer, _Marker):
            if isinstance(layer, Swap):
                read[-1] = (waiting[layer.branch],)
            elif isinstance(layer, Join):
                read[-1] = (waiting[layer.branch], before)
            waiting[layer.branch] = before
        before = layer.name
    return read


class Subsample(Layer):
    """y[b, h, w, p + c] = x[b, s h, s w, c], and zero in the other channels, p = (outputs - C) // 2 of them in front.

    x [b, H, W, C], y [b, ceil(H/s), ceil(W/s), outputs]: the shortcut without parameters where a residual network
    widens (option A of He et al., arXiv:1512.03385, section 4.2). Keeps nothing.
    """

    kind = "subsample"

    def __init__(
        self, name: str, ops: Ops, input_shape: Shape, outputs: int, dtype: DTypeLike, stride: int = 2
    ) -> None:
        height, width, channels = input_shape
        if outputs < channels or stride < 1:
            raise ConfigError(
                f"layer {name!r} takes {channels} channels to {outputs} with a stride of {stride}",
                allowed="no fewer channels than there were, and a stride of 1 or more",
            )
        super().__init__(name, ops, input_shape, (-(-height // stride), -(-width // stride), outputs), dtype)
        self.stride = stride

    def forward(self, x: Array, leaves: Leaves, *, training: bool) -> Array:
        y = self.buffers.lend("y", (len(x), *self.output_shape))
        self.ops.subsample(x, self.stride, out=y)
        return y

    def input_gradient(self, grad: Array, leaves: Leaves) -> Array:
        dx = self.buffers.lend("dx", (len(grad), *self.input_shape))
        self.ops.subsample_backward(grad, self.stride, out=dx)
        return dx
