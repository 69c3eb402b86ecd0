"""Moves and mirrors pictures at random; the same for a sample on any number of devices and in any micro-batch."""

from __future__ import annotations

from numpy.typing import DTypeLike

from dpsim import rng
from dpsim.errors import ConfigError
from dpsim.nn.layer import Layer, Shape
from dpsim.nn.ops import Ops
from dpsim.replica import Array, Batch, Leaves

_LEVELS = 1 << 16


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
        y = self.buffers.take("y", x.shape)
        self.ops.move_pictures(
            x, self.crop, bits[:, :2] * (2 * self.crop + 1) // _LEVELS, bits[:, 2] < self._flipped, y, self.buffers
        )
        return y


def check_crop(crop: int) -> None:
    """Raises ``ConfigError`` for less than 0 pixels."""
    if crop < 0:
        raise ConfigError(f"crop is {crop}", allowed="0 pixels (none) or more; often 4 of 32")


def check_flip(rate: float) -> None:
    """Raises ``ConfigError`` for a rate outside [0, 1]."""
    if not 0 <= rate <= 1:
        raise ConfigError(f"flip is {rate}", allowed="0 (never) to 1 (always); usually 0.5")
