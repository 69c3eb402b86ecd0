"""``Replica``: what the runtime can train. A small protocol; ``dpsim.nn`` is one implementation.

A replica holds no gradients and no parameters of its own: the runtime hands it the memory (``bind``), so that
gradients are produced where they are communicated. All values it returns are sums over samples; the runtime
scales once by 1/B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dpsim.codec import Noun
from dpsim.workload import Tensor

Array = NDArray[Any]
Leaves = tuple[int, ...]
"""Boundaries of the leaves of a rank's batch: leaf i is samples ``leaves[i]:leaves[i + 1]``; one leaf is ``(0, b)``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """A rank's share of a global batch: inputs [b, ...], class labels [b], and the boundaries of its leaves.

    ``seed``, ``step`` and ``first_sample`` (the place of its first sample in the global batch) name its samples for
    random numbers, which must depend on the sample and never on the rank.
    """

    x: Array
    labels: NDArray[np.int64]
    leaves: Leaves
    seed: int = 0
    step: int = 0
    first_sample: int = 0


class LayerSpec(Noun, frozen=True):
    """What is known of a layer without running it; fields as in ``dpsim.workload.Layer``."""

    name: str
    kind: str
    tensors: tuple[Tensor, ...] = ()
    activation_bytes_per_sample: float = 0.0
    batch_norm_channels: int = 0


class BatchSums(Noun, frozen=True):
    """Sums over the samples of a batch: cross-entropy in nats, correct predictions, samples."""

    loss: float
    correct: int
    samples: int


class StepEvents(Protocol):
    """What a replica announces while it computes; layer numbers are positions in ``Replica.layers``."""

    def forward_done(self, layer: int) -> None: ...

    def loss_done(self) -> None: ...

    def gradients_ready(self, layer: int) -> None:
        """All gradients of this layer are final in the bound memory. Called once a layer that has tensors."""

    def backward_done(self, layer: int) -> None: ...


class Replica(Protocol):
    """Something trainable. Tensor names are unique; ``layers`` is in forward order."""

    @property
    def layers(self) -> tuple[LayerSpec, ...]: ...

    def initial_parameters(self, seed: int) -> dict[str, Array]:
        """Parameter values by tensor name, the same on every rank for one seed."""

    def bind(self, parameters: Mapping[str, Array], gradients: Mapping[str, Array]) -> None:
        """Take the memory to read parameters from and to write gradients to (C-contiguous, the tensors' shapes)."""

    def state(self) -> dict[str, Array]:
        """Non-trained state by name (running statistics); the arrays themselves, to be read or overwritten in place."""

    def forward_backward(self, batch: Batch, events: StepEvents) -> BatchSums:
        """One pass over a rank's batch; writes (never adds to) the bound gradients, as sums over its samples."""

    def evaluate(self, x: Array, labels: NDArray[np.int64]) -> BatchSums:
        """Forward only, in evaluation mode."""
