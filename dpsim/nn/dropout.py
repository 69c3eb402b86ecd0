"""Dropout whose mask belongs to the sample: the same on any number of devices and in any micro-batch."""

from __future__ import annotations

import math

from numpy.typing import DTypeLike

from dpsim.errors import ConfigError
from dpsim.nn.layer import Layer, Shape
from dpsim.nn.ops import Ops
from dpsim.replica import Array, Batch, Leaves

_LEVELS = 1 << 16


class Dropout(Layer):
    """y = x / (1 - rate) where the mask keeps an element, 0 elsewhere; in evaluation y = x.

    The mask of a sample is a function of the layer's name, the seed, the step and the sample's place in the global
    batch. An element takes 16 random bits, so ``rate`` is rounded to a multiple of 2**-16, which the scale follows.
    Keeps one byte an element, whether it was kept. Source: Srivastava et al., JMLR 15 (2014), in its inverted form.
    """

    kind = "dropout"

    def __init__(self, name: str, ops: Ops, shape: Shape, dtype: DTypeLike, rate: float) -> None:
        check_rate(rate)
        super().__init__(name, ops, shape, shape, dtype)
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
        self.ops.random_mask(
            f"dropout {self.name}", self._seed, self._step, self._first_sample, self._dropped, out=self._mask
        )
        y = self.buffers.take("y", x.shape)
        self.ops.scale_where(x, self._mask, self._scale, out=y)
        return y

    def input_gradient(self, grad: Array, leaves: Leaves) -> Array:
        self.ops.scale_where(grad, self._mask, self._scale, out=grad)
        return grad


def check_rate(rate: float) -> None:
    """Raises ``ConfigError`` unless 0 <= rate < 1."""
    if not 0 <= rate < 1:
        raise ConfigError(f"a dropout rate of {rate}", allowed="0 or more, and less than 1")
