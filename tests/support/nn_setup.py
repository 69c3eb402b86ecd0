"""What the tests of dpsim.nn share: a network with memory bound to it, and a recorder of announcements."""

from __future__ import annotations

import numpy as np

from dpsim.nn import Network
from dpsim.replica import Array, Batch


class Recorder:
    """Step events as a list of (what, layer); optionally a call at each."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def forward_done(self, layer: int) -> None:
        self.events.append(("forward", layer))

    def loss_done(self) -> None:
        self.events.append(("loss", -1))

    def gradients_ready(self, layer: int) -> None:
        self.events.append(("ready", layer))

    def backward_done(self, layer: int) -> None:
        self.events.append(("backward", layer))

    def recompute_done(self, layer: int) -> None:
        self.events.append(("recompute", layer))


def bound(network: Network, seed: int = 0) -> tuple[dict[str, Array], dict[str, Array]]:
    """Initial parameters, and gradients filled with NaN so that what is not written shows."""
    parameters = network.initial_parameters(seed)
    gradients = {name: np.full_like(value, np.nan) for name, value in parameters.items()}
    network.bind(parameters, gradients)
    return parameters, gradients


def batch_for(network: Network, samples: int, classes: int = 3, seed: int = 0) -> tuple[Array, Array]:
    random = np.random.default_rng(seed)
    x = random.standard_normal((samples, *network.input_shape)).astype(network.dtype)
    return x, random.integers(0, classes, samples)


def gradients_of(network: Network, x: Array, labels: Array, leaves: tuple[int, ...] | None = None) -> dict[str, Array]:
    """Copies of the gradients of one batch."""
    _, gradients = bound(network)
    network.forward_backward(Batch(x=x, labels=labels, leaves=leaves or (0, len(x))), Recorder())
    return {name: value.copy() for name, value in gradients.items()}
