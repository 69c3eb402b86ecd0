"""The operations of layers in NumPy and its BLAS, on the host: the meaning of all others."""

from __future__ import annotations

import numpy as np

from dpsim.nn.array_ops import ArrayOps
from dpsim.nn.ops import Workspace
from dpsim.replica import Array


class NumpyOps(ArrayOps):
    """The operations in NumPy and BLAS, on the host."""

    def __init__(self) -> None:
        super().__init__(np)

    def _view(self, x: Array, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
        return np.ndarray(shape, x.dtype, buffer=x, strides=strides)  # as_strided takes ten times as long to make it

    def move_pictures(
        self, x_bHWC: Array, most: int, places_b2: Array, flipped_b: Array, out: Array, work: Workspace
    ) -> None:
        """Move picture by picture, which copies runs of neighbouring pixels."""
        _, height, width, _ = x_bHWC.shape
        framed = self._framed(x_bHWC, most, work)
        for picture, (top, left), flipped, moved in zip(
            framed, places_b2.tolist(), flipped_b.tolist(), out, strict=True
        ):
            window = picture[top : top + height, left : left + width]
            moved[...] = window[:, ::-1] if flipped else window
