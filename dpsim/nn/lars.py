"""LARS on tensors, or on the parts of them that a rank updates: ``dpsim.optimizer.Lars`` has the formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpsim.kernels.exact_squares import digits, roots, sums_of_squares
from dpsim.kernels.update import lars
from dpsim.optimizer import Lars
from dpsim.replica import Array


class Part(NamedTuple):
    """Elements ``start`` to ``stop - 1`` of flat parameters and gradients, all of one tensor.

    ``matrix`` numbers the tensors of two dimensions and more; it is None for a tensor that has trust 1 and no weight
    decay. ``state`` is where the part's velocity begins.
    """

    matrix: int | None
    start: int
    stop: int
    state: int


class LarsUpdate:
    """Updates parts of tensors. ``measure`` first, its sums added over all parts of every tensor, then ``apply``.

    The sums are exact (``dpsim.kernels.exact_squares``), so how tensors are divided changes no bit of the result. A
    tensor has one part here at most; ``matrices`` is the number of tensors that have a trust of their own.
    """

    def __init__(
        self, parameters: Array, gradients: Array, velocity: Array, parts: Sequence[Part], matrices: int, settings: Lars
    ) -> None:
        self._parameters, self._gradients, self._settings = parameters, gradients, settings
        self._parts = [
            (part.matrix, parameters[own], gradients[own], velocity[part.state : part.state + part.stop - part.start])
            for part in parts
            for own in [slice(part.start, part.stop)]
        ]
        bounds = np.zeros((2, matrices), np.int64)
        for part in parts:
            if part.matrix is not None:
                bounds[:, part.matrix] = part.start, part.stop
        self._starts, self._stops = bounds
        self._sums = np.zeros((2, matrices, digits(parameters.dtype.name)))

    def measure(self) -> NDArray[np.float64]:
        """The sums of the squares of the parameters and of the gradients of each matrix, as digits; a flat array.

        Every call writes to the same array.
        """
        for flat, sums in zip((self._parameters, self._gradients), self._sums, strict=True):
            sums_of_squares(flat, self._starts, self._stops, sums)
        return self._sums.reshape(-1)

    def apply(self, sums: NDArray[np.float64], rate: float, scale: float) -> None:
        """One step at learning rate ``rate``, with g = scale * gradients and the ``sums`` of whole tensors."""
        settings = self._settings
        rate, scale = float(rate), float(scale)
        rates = rate * self._trust(sums, scale)
        for matrix, w, g, v in self._parts:
            own_rate, decay = (rate, 0.0) if matrix is None else (float(rates[matrix]), settings.weight_decay)
            lars(w, g, v, scale, settings.momentum, decay, own_rate)

    def _trust(self, sums: NDArray[np.float64], scale: float) -> NDArray[np.float64]:
        of_w, of_g = (roots(whole, self._parameters.dtype.name) for whole in sums.reshape(self._sums.shape))
        of_g = scale * of_g
        trust = np.ones(len(of_w))
        both = (of_w > 0) & (of_g > 0)
        size = of_g + self._settings.weight_decay * of_w
        np.divide(self._settings.trust_coefficient * of_w, size, out=trust, where=both)
        return trust
