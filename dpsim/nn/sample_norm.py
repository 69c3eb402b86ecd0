"""Normalisations with the statistics of one sample: they do not depend on how a batch is spread over devices."""

from __future__ import annotations

import math

from numpy.typing import DTypeLike

from dpsim.errors import ConfigError
from dpsim.nn.layer import Layer, Shape, unit_scale
from dpsim.nn.ops import Ops
from dpsim.replica import Array, Leaves


class GroupNorm(Layer):
    """y = gamma (x - mean) / sqrt(var + epsilon) + beta over the picture and a group of neighbouring channels.

    x [b, C] or [b, H, W, C]; mean and (biased) variance are of one sample and one of ``groups`` groups of C / groups
    channels, gamma and beta of a channel. The same in training and in evaluation. Keeps the normalised input for
    backward. Source: Wu and He, arXiv:1803.08494.
    """

    kind = "group-norm"
    epsilon = 1e-5

    def __init__(self, name: str, ops: Ops, shape: Shape, dtype: DTypeLike, groups: int) -> None:
        channels, positions = shape[-1], self._positions(shape)
        if groups < 1 or channels % groups:
            raise ConfigError(
                f"layer {name!r} has {groups} groups of {channels} channels", allowed=f"a divisor of {channels}"
            )
        if positions * channels == groups:
            raise ConfigError(
                f"layer {name!r} ({self.kind}) would normalise elements one by one, on data of shape {shape}",
                allowed="two elements or more that are normalised together",
                remedy="choose another norm, or larger pictures or more channels",
            )
        super().__init__(name, ops, shape, shape, dtype, gamma=(channels,), beta=(channels,))
        self.groups, self._row_shape = groups, (positions, channels)
        self._rows_per_sample = math.prod(shape) // (positions * channels)
        kept_elements = math.prod(shape) + self._rows_per_sample * groups
        self.activation_bytes_per_sample = kept_elements * self.dtype.itemsize

    def _positions(self, shape: Shape) -> int:
        """Return how many neighbouring pixels are normalised together."""
        return math.prod(shape[:-1])

    def initial_parameters(self, seed: int) -> dict[str, Array]:
        return unit_scale(*self.tensors)

    def forward(self, x: Array, leaves: Leaves, *, training: bool) -> Array:
        y, self._normalised = self.buffers.lend("y", x.shape), self.buffers.lend("normalised", x.shape)
        self._inverse_std = self.buffers.take("inverse std", (len(x) * self._rows_per_sample, self.groups))
        self.ops.normalise(self._rows(x), self.epsilon, out=self._rows(self._normalised), inverse_std=self._inverse_std)
        self.ops.channel_multiply(self._normalised, self.parameters["gamma"], out=y)
        self.ops.channel_add(y, self.parameters["beta"], out=y)
        return y

    def write_gradients(self, grad: Array, leaves: Leaves) -> None:
        ops, normalised = self.ops, self._normalised
        self.leaf_sum(
            "gamma", leaves, lambda leaf, out: ops.channel_dot(grad[slice(*leaf)], normalised[slice(*leaf)], out=out)
        )
        self.leaf_sum("beta", leaves, lambda leaf, out: ops.channel_sum(grad[slice(*leaf)], out=out))

    def input_gradient(self, grad: Array, leaves: Leaves) -> Array:
        """dx = inverse_std (g - mean(g) - n mean(g n)), g = gamma grad, n the normalised input; in place."""
        self.ops.channel_multiply(grad, self.parameters["gamma"], out=grad)
        self.ops.normalise_backward(self._rows(grad), self._rows(self._normalised), self._inverse_std)
        return grad

    def _rows(self, x: Array) -> Array:
        return x.reshape(len(x) * self._rows_per_sample, *self._row_shape)


class InstanceNorm(GroupNorm):
    """Group normalisation with a group a channel: over the picture alone (Ulyanov et al., arXiv:1607.08022)."""

    kind = "instance-norm"

    def __init__(self, name: str, ops: Ops, shape: Shape, dtype: DTypeLike) -> None:
        super().__init__(name, ops, shape, dtype, groups=shape[-1])


class LayerNorm(GroupNorm):
    """The same over the channels (last axis) of each pixel by itself (Ba et al., arXiv:1607.06450, as in ConvNeXt)."""

    kind = "layer-norm"

    def __init__(self, name: str, ops: Ops, shape: Shape, dtype: DTypeLike) -> None:
        super().__init__(name, ops, shape, dtype, groups=1)

    def _positions(self, shape: Shape) -> int:
        return 1
