"""The updates of parameters: of flat arrays element by element, and by LARS of whole tensors or parts of them.

``dpsim.optimizer`` has the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dpsim.kernels import update as on_host
from dpsim.kernels.exact_squares import digits, roots, sums_of_squares
from dpsim.memory import HOST, Memory
from dpsim.optimizer import AdamW, Lars, Sgd
from dpsim.replica import Array


class UpdateKernels(Protocol):
    """The functions of ``dpsim.kernels.update``, for arrays that lie there or elsewhere."""

    @property
    def sgd(self) -> Any: ...

    @property
    def adamw(self) -> Any: ...


def update(
    parameters: Array,
    gradients: Array,
    state: Mapping[str, Array],
    optimizer: Sgd | AdamW,
    learning_rate: float,
    scale: float,
    step: int,
    kernels: UpdateKernels = on_host,
) -> None:
    """Do one step of ``optimizer`` (its docstring has the formula) with g = scale * ``gradients``, in place.

    All arrays are flat, of one dtype and length, which they keep; ``state`` has one for each of the optimizer's
    ``slots``, zero before the first step. ``gradients`` are sums over samples and ``scale`` = 1/B. ``learning_rate``
    is that of this step, in place of the optimizer's own; ``step`` counts from 1. Each element's result depends on
    nothing but that element.
    """
    w, g, rate, scale = parameters, gradients, float(learning_rate), float(scale)
    if isinstance(optimizer, Sgd):
        momentum, decay = optimizer.momentum, optimizer.weight_decay
        kernels.sgd(w, g, state["velocity"], scale, momentum, decay, rate, optimizer.nesterov)
        return
    beta1, beta2 = optimizer.beta1, optimizer.beta2
    kernels.adamw(
        w,
        g,
        state["first_moment"],
        state["second_moment"],
        scale,
        beta1,
        beta2,
        optimizer.epsilon,
        optimizer.weight_decay,
        rate,
        1 - beta1**step,
        1 - beta2**step,
    )


class Part(NamedTuple):
    """``elements`` of one tensor, which begin at ``parameters``, ``gradients`` and ``state`` in these flat arrays.

    ``matrix`` numbers the tensors of two dimensions and more; it is None for a tensor that has trust 1 and no weight
    decay.
    """

    matrix: int | None
    parameters: int
    gradients: int
    elements: int
    state: int


class LarsUpdate:
    """An update of parts of tensors. ``measure`` first, its sums added over all parts of every tensor, then ``apply``.

    The sums are exact (``dpsim.kernels.exact_squares``), so how tensors are divided changes no bit of the result. A
    tensor has one part here at most; ``matrices`` is the number of tensors that have a trust of their own.
    """

    def __init__(
        self,
        parameters: Array,
        gradients: Array,
        velocity: Array,
        parts: Sequence[Part],
        matrices: int,
        settings: Lars,
        memory: Memory = HOST,
    ) -> None:
        self._settings, self._dtype = settings, parameters.dtype
        self._matrices = [part.matrix for part in parts]
        bounds = np.zeros((2, 2, matrices), np.int64)
        for part in parts:
            if part.matrix is not None:
                for array, start in enumerate((part.parameters, part.gradients)):
                    bounds[array, :, part.matrix] = start, start + part.elements
        self._shape = (2, matrices, digits(self._dtype.name))
        executor: type[_OnHost | _OnDevice] = _OnDevice if memory.deferred else _OnHost
        self._arrays: _OnHost | _OnDevice = executor(
            memory, parameters, gradients, velocity, parts, bounds, math.prod(self._shape)
        )

    def measure(self) -> Array:
        """Return the sums of squares of the parameters and gradients of each matrix, as digits; a flat array.

        Every call writes to the same array, which is in the memory of the parameters.
        """
        return self._arrays.measure()

    def apply(self, sums: NDArray[np.float64], rate: float, scale: float) -> None:
        """Do one step at learning rate ``rate``, with g = scale * gradients and the ``sums`` of whole tensors.

        These are on the host, and so are the norms: their quotients have the same bits wherever the tensors are.
        """
        rate, scale = float(rate), float(scale)
        trusted = rate * self._trust(sums, scale)
        rates = np.zeros((len(self._matrices), 2))
        for row, matrix in zip(rates, self._matrices, strict=True):
            row[:] = (rate, 0.0) if matrix is None else (trusted[matrix], self._settings.weight_decay)
        self._arrays.update(rates, scale, self._settings.momentum)

    def _trust(self, sums: NDArray[np.float64], scale: float) -> NDArray[np.float64]:
        of_w, of_g = (roots(squares, self._dtype.name) for squares in sums.reshape(self._shape))
        of_g = scale * of_g
        trust = np.ones(len(of_w))
        both = (of_w > 0) & (of_g > 0)
        size = of_g + self._settings.weight_decay * of_w
        np.divide(self._settings.trust_coefficient * of_w, size, out=trust, where=both)
        return trust


class _OnHost:
    """The arrays of a ``LarsUpdate``. ``size``: the number of digits.

    ``bounds`` [2, 2, matrices]: where each matrix begins and ends in parameters, and in gradients.
    """

    def __init__(
        self,
        memory: Memory,
        parameters: Array,
        gradients: Array,
        velocity: Array,
        parts: Sequence[Part],
        bounds: NDArray[np.int64],
        size: int,
    ) -> None:
        self._flat, self._bounds = (parameters, gradients), bounds
        self._sums = np.zeros(size)
        self._parts = [
            (
                parameters[part.parameters :][: part.elements],
                gradients[part.gradients :][: part.elements],
                velocity[part.state :][: part.elements],
            )
            for part in parts
        ]

    def measure(self) -> Array:
        of_arrays = self._sums.reshape(2, self._bounds.shape[2], -1)
        for flat, (starts, stops), sums in zip(self._flat, self._bounds, of_arrays, strict=True):
            sums_of_squares(flat, starts, stops, sums)
        return self._sums

    def update(self, rates: NDArray[np.float64], scale: float, momentum: float) -> None:
        for (w, g, v), (rate, decay) in zip(self._parts, rates.tolist(), strict=True):
            on_host.lars(w, g, v, scale, momentum, decay, rate)


class _OnDevice:
    """The same in the memory of a device, with the same bits: the host asks for everything, and waits for nothing."""

    def __init__(
        self,
        memory: Memory,
        parameters: Array,
        gradients: Array,
        velocity: Array,
        parts: Sequence[Part],
        bounds: NDArray[np.int64],
        size: int,
    ) -> None:
        from dpsim.kernels.exact_squares_cuda import SumsOfSquares  # loads CUDA
        from dpsim.kernels.update_cuda import Lars as LarsKernel

        self._memory, self._dtype = memory, parameters.dtype
        self._sums = memory.zeros(8 * size).view(np.float64)
        starts, stops = bounds[0].tolist()  # whole gradients lie as the parameters do
        launch = memory.stream.launch
        self._squares = SumsOfSquares((parameters, gradients), starts, stops, self._sums, memory.zeros, launch)
        own = [(part.parameters, part.parameters + part.elements, part.state) for part in parts]
        self._update = LarsKernel(parameters, gradients, velocity, own, launch)

    def measure(self) -> Array:
        self._squares()
        return self._sums

    def update(self, rates: NDArray[np.float64], scale: float, momentum: float) -> None:
        self._update(self._memory.upload("rates of tensors", rates.astype(self._dtype).reshape(-1)), scale, momentum)
