"""``FunctionReplica``: a ``Replica`` from one function that computes loss and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from dpsim.errors import ConfigError
from dpsim.replica import Array, Batch, BatchSums, LayerSpec, StepEvents
from dpsim.workload import Tensor

LossAndGradients = Callable[[Mapping[str, Array], Array, NDArray[np.int64]], tuple[float, int, Mapping[str, Array]]]
"""(parameters, inputs [b, ...], labels [b]) -> (loss, correct predictions, gradients by name), sums over b samples."""


class FunctionReplica:
    """A ``dpsim.replica.Replica`` from initial parameters and a function that computes loss and gradients.

    ``initial`` holds the parameters by name, all of one dtype (float32 or float64); ``function`` must return sums over
    the samples, not means, and a gradient of the same shape for every parameter. All gradients become ready at once:
    for overlap of communication with backward write a ``Replica`` that announces them layer by layer.
    Raises ``ConfigError`` if parameters or gradients have other shapes or dtypes.
    """

    def __init__(self, initial: Mapping[str, Array], function: LossAndGradients) -> None:
        dtypes = sorted({array.dtype.name for array in initial.values()})
        if len(dtypes) != 1 or dtypes[0] not in ("float32", "float64"):
            raise ConfigError(
                f"parameters of dtype {', '.join(dtypes)}" if dtypes else "no parameters",
                allowed="one parameter or more, all float32 or all float64",
                remedy="give each as array.astype('float32')",
            )
        self._initial = {name: np.array(array) for name, array in initial.items()}
        self._function = function
        tensors = tuple(Tensor(name=name, shape=a.shape, dtype=a.dtype.name) for name, a in initial.items())
        self._layers = (LayerSpec(name="function", kind="function", tensors=tensors),)
        self._parameters: dict[str, Array] = {}
        self._gradients: dict[str, Array] = {}

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return self._layers

    def initial_parameters(self, seed: int) -> dict[str, Array]:
        """Return the parameters of the constructor, whatever the seed."""
        return dict(self._initial)

    def bind(self, parameters: Mapping[str, Array], gradients: Mapping[str, Array]) -> None:
        self._parameters, self._gradients = dict(parameters), dict(gradients)

    def state(self) -> dict[str, Array]:
        return {}

    def forward_backward(self, batch: Batch, events: StepEvents) -> BatchSums:
        """Copy the function's gradients into the bound arrays; zeros for a rank without samples."""
        loss, correct, gradients = 0.0, 0, {name: np.zeros_like(a) for name, a in self._initial.items()}
        if len(batch.labels):
            loss, correct, gradients = self._call(batch.x, batch.labels)
        events.forward_done(0)
        events.loss_done()
        for name, bound in self._gradients.items():
            bound[...] = gradients[name]
        events.gradients_ready(0)
        events.backward_done(0)
        return BatchSums(loss=loss, correct=correct, samples=len(batch.labels))

    def evaluate(self, x: Array, labels: NDArray[np.int64]) -> BatchSums:
        loss, correct, _ = self._call(x, labels)
        return BatchSums(loss=loss, correct=correct, samples=len(labels))

    def _call(self, x: Array, labels: NDArray[np.int64]) -> tuple[float, int, dict[str, Array]]:
        loss, correct, gradients = self._function(self._parameters, x, labels)
        shapes = {name: np.shape(array) for name, array in gradients.items()}
        wanted = {name: array.shape for name, array in self._initial.items()}
        if shapes != wanted:
            raise ConfigError(
                f"the model's function returned gradients of shape {_listed(shapes)}",
                allowed=f"one for every parameter, of its shape: {_listed(wanted)}",
            )
        return float(loss), int(correct), {name: np.asarray(array) for name, array in gradients.items()}


def _listed(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items()) or "none"
