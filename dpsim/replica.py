"""``Replica``: what the runtime can train. A small protocol; ``dpsim.nn`` is one implementation.

A replica holds no gradients and no parameters of its own: the runtime hands it the memory (``bind``), so that
gradients are produced where they are communicated. All values it returns are sums over samples; the runtime
scales once by 1/B.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dpsim.codec import Noun
from dpsim.workload import Tensor

Array = NDArray[Any]
Leaves = tuple[int, ...]
"""Boundaries of the leaves of a rank's batch: leaf i is samples ``leaves[i]:leaves[i + 1]``; one leaf is ``(0, b)``."""
OrderedSum = Callable[[Sequence[Array]], Array]
"""(one array a slot of this rank) -> the sum over all ranks' slots along the tree; every rank calls it together."""


class Slot(NamedTuple):
    """Where gradients go from leaf ``first_leaf`` of a rank's batch on (see ``dpsim.kernels.allreduce.tree``)."""

    first_leaf: int
    gradients: Mapping[str, Array]


class Rounding(NamedTuple):
    """Rounding to 16 bits (float16 or bfloat16) of numbers times a power of two: ``dpsim.comm.compression``."""

    dtype: str
    scale: float


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
    """Sums over the samples of a batch: cross-entropy in nats, correct predictions, samples.

    ``slot_losses``: the loss of each slot, where there is more than one.
    """

    loss: float
    correct: int
    samples: int
    slot_losses: tuple[float, ...] = ()


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


@runtime_checkable
class LeafReplica(Replica, Protocol):
    """A replica that takes several leaves at once, so that gradients are final layer by layer with leaves too.

    What a leaf gives has the same bits whatever other leaves are computed with it. The runtime gives the leaves to a
    replica without this one after another.
    """

    def bind(
        self, parameters: Mapping[str, Array], gradients: Mapping[str, Array], extra_slots: Sequence[Slot] = ()
    ) -> None:
        """As ``Replica.bind``; the gradients of a slot are the sums along the tree over its leaves.

        The first slot is ``gradients``; ``extra_slots`` follow in the order of their leaves.
        """

    def train_in_leaves(self, given: bool, rounding: Rounding | None) -> None:
        """From now on batches come in leaves of a global batch, also where they have one alone; or they do not.

        With ``rounding`` every leaf's gradient is rounded, and then every sum of two along the tree.
        """


@runtime_checkable
class BatchNormReplica(LeafReplica, Protocol):
    """A replica with batch norm whose statistics may be of more or fewer samples than the device's."""

    def normalise_batches(self, mode: str, ordered_sum: OrderedSum) -> None:
        """Take statistics of each leaf (``leaf``) or of all ranks' samples (``global``); ``local``: of the device's.

        With ``global``, every rank asks for the same sums in the same order in ``forward_backward``, with no samples
        too.
        """

    def leaf_statistics(self) -> list[Array]:
        """With ``leaf``: what the last forward adds to the running statistics, a flat array a slot."""

    def update_statistics(self, total: Array) -> None:
        """Move the running statistics by the sum of ``leaf_statistics`` over all slots and ranks."""
