"""``Replica``: what the runtime can train. A small protocol; ``dpsim.nn`` is one implementation.

A replica owns neither parameters nor gradients: the runtime gives it the memory (``bind``), so that gradients are
produced where they are communicated. All values it returns are sums over samples; the runtime scales once by 1/B.
The other protocols are optional: ``Capabilities.of`` finds which of them a replica implements, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dpsim.choices import Choices, Problem
from dpsim.codec import Noun
from dpsim.dtypes import ComputeDtype
from dpsim.errors import ConfigError
from dpsim.memory import Memory
from dpsim.workload import Tensor

Array = NDArray[Any]
Leaves = tuple[int, ...]
"""Boundaries of the leaves of a rank's batch: leaf i is samples ``leaves[i]:leaves[i + 1]``; one leaf is ``(0, b)``."""
OrderedSum = Callable[[Sequence[Array]], Array]
"""(one array a slot of this rank) -> the sum over all ranks' slots along the tree; a collective call.

The sum is valid until the next call.
"""
Observer = Callable[[str, str, Array, Array], None]
"""(``forward`` or ``input_gradient``, the layer's name, its input, its output), called while a replica computes."""


EVALUATION_SAMPLES = 128
"""Samples of one pass of an evaluation; they bound the work arrays whatever the size of the test set."""


class Slot(NamedTuple):
    """Where the gradients of the leaves from ``first_leaf`` on are written (see ``dpsim.kernels.allreduce.tree``)."""

    first_leaf: int
    gradients: Mapping[str, Array]


class Rounding(NamedTuple):
    """Numbers are multiplied by ``scale``, a power of two, and rounded to float16 or bfloat16.

    See ``dpsim.comm.compression``.
    """

    dtype: str
    scale: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """A rank's share of a global batch: inputs [b, ...], class labels [b], and the boundaries of its leaves.

    ``seed``, ``step`` and ``first_sample`` (the position of its first sample in the global batch) identify its samples:
    random numbers must depend on the sample and never on the rank.
    """

    x: Array
    labels: NDArray[np.int64]
    leaves: Leaves
    seed: int = 0
    step: int = 0
    first_sample: int = 0


class LayerSpec(Noun, frozen=True):
    """The properties of a layer that need no measurement; fields as in ``dpsim.workload.Layer``."""

    name: str
    kind: str
    tensors: tuple[Tensor, ...] = ()
    activation_bytes_per_sample: float = 0.0
    batch_norm_channels: int = 0
    depends_on: tuple[str, ...] | None = None
    output_bytes_per_sample: float = 0.0
    column_block: int = -1


class HasColumnBlock(Protocol):
    """A layer that may be a column block."""

    @property
    def column_block(self) -> int: ...


def stage_ends(layers: Sequence[HasColumnBlock], own: Sequence[int]) -> tuple[int, int]:
    """The first layer of the stage that layers ``own`` are of, and the one behind its last one.

    No stage begins within a pair of layers: column blocks before its first layer are computed by other ranks.
    """
    first, stop = (own[0], own[-1] + 1) if own else (0, 0)
    while 0 < first < len(layers) and min(layers[first].column_block, layers[first - 1].column_block) >= 0:
        first -= 1
    return first, stop


class BatchSums(Noun, frozen=True):
    """Sums over the samples of a batch: cross-entropy in nats, correct predictions, samples.

    ``slot_losses``: the loss of each slot, if there are several.
    """

    loss: float
    correct: int
    samples: int
    slot_losses: tuple[float, ...] = ()

    @classmethod
    def of_slots(cls, losses: Iterable[Any], correct: Any, samples: int) -> BatchSums:
        """The sums of a batch from the loss of each slot, numbers of any kind."""
        slot_losses = tuple(map(float, losses))
        return cls(loss=sum(slot_losses), correct=int(correct), samples=samples, slot_losses=slot_losses)

    def fetch(self) -> BatchSums:
        """They are here already."""
        return self


@dataclass(frozen=True, kw_only=True, eq=False)
class DeferredSums:
    """``BatchSums`` that ``memory`` may still be computing, so that nobody waits for them before the end of a step.

    ``values``, float64 [slots + 1]: the loss of each slot, then the correct predictions.
    """

    values: Array
    samples: int
    memory: Memory

    def of(self, values: NDArray[np.float64]) -> BatchSums:
        """The sums, from ``values`` on the host."""
        *losses, correct = values.tolist()
        return BatchSums.of_slots(losses, int(correct), self.samples)

    def fetch(self) -> BatchSums:
        """Wait for the sums."""
        return self.of(*self.memory.fetch([self.values]))


class StepEvents(Protocol):
    """What a replica announces while it computes; layer numbers are positions in ``Replica.layers``."""

    def forward_done(self, layer: int) -> None: ...

    def loss_done(self) -> None: ...

    def gradients_ready(self, layer: int) -> None:
        """All gradients of this layer are final in the bound memory. Called once for each layer with tensors."""

    def backward_done(self, layer: int) -> None: ...


class StageEvents(StepEvents, Protocol):
    """What a replica announces that computes a stage, and its forward pass twice."""

    def recompute_done(self, layer: int) -> None: ...


class Replica(Protocol):
    """Something trainable. Tensor names are unique; ``layers`` is in forward order."""

    @property
    def layers(self) -> tuple[LayerSpec, ...]: ...

    def initial_parameters(self, seed: int) -> dict[str, Array]:
        """Parameter values by tensor name, the same on every rank for one seed."""

    def bind(self, parameters: Mapping[str, Array], gradients: Mapping[str, Array]) -> None:
        """Keep the arrays to read parameters from and to write gradients to (C-contiguous, the tensors' shapes)."""

    def state(self) -> dict[str, Array]:
        """State that is not trained (running statistics), by name: the arrays themselves, which may be overwritten."""

    def forward_backward(self, batch: Batch, events: StepEvents) -> BatchSums | DeferredSums:
        """One pass over a rank's batch; writes (never adds to) the bound gradients, as sums over its samples."""

    def evaluate(self, x: Array, labels: NDArray[np.int64]) -> BatchSums:
        """Forward only, in evaluation mode."""


@runtime_checkable
class DeviceReplica(Replica, Protocol):
    """A replica that can compute in the memory of a device. Batches are given to it in the host's memory all the same.

    An announcement then means that the device has been asked to compute what is announced: what is to happen on the
    device afterwards waits for a mark of the memory.
    """

    def compute_in(self, memory: Memory) -> None:
        """Compute in this memory from now on, with its state there. The arrays to be bound are the memory's."""

    def leaf_difference(self, batch: Batch) -> str | None:
        """The first operation that gives a leaf of this batch other bits alone than amid the others; None if none does.

        Called before anything is bound, in the memory that it computes in.
        """


@runtime_checkable
class RoundingReplica(Replica, Protocol):
    """A replica that can round what it multiplies. Its parameters and gradients keep their dtype."""

    def multiply_in(self, dtype: ComputeDtype) -> None:
        """Round the operands of matrix products and convolutions to this dtype from now on; add in float32.

        Called before anything is bound. Raises ``ConfigError`` if it cannot.
        """


@runtime_checkable
class WarmUpReplica(Replica, Protocol):
    """A replica that has something to compile before its first step is timed."""

    def warm_up(self) -> None:
        """Compute as a step does, alone on this rank. Only the bound gradients may change."""


@runtime_checkable
class DiagnosticReplica(Replica, Protocol):
    """A replica that can find the origin of a NaN or an infinity."""

    def first_nonfinite_layer(self, x: Array, labels: NDArray[np.int64]) -> str | None:
        """Describe the first value of a pass over this batch that is not finite; None if all are.

        Alone on this rank. Parameters, gradients and state stay as they are.
        """


@runtime_checkable
class ObservableReplica(Replica, Protocol):
    """A replica that shows what each of its layers computes."""

    def observe(self, observer: Observer) -> None:
        """Call ``observer`` from now on for every layer; rows of the arrays are samples."""


@runtime_checkable
class SizedReplica(Replica, Protocol):
    """A replica that knows the memory it computes in."""

    @property
    def work_bytes(self) -> int:
        """Bytes of the arrays that it has allocated so far: activations, their gradients, what layers work in."""

    def layer_work_bytes(self, leaves: Leaves) -> tuple[int, ...]:
        """Bytes of these arrays that each layer takes for a micro-batch, and at the end what the loss takes.

        Of the arrays of a layer some grow with the samples and some do not. Whatever is allocated once for all layers
        (operands rounded to bfloat16) is not counted.
        """


@runtime_checkable
class EmulatedCompute(Replica, Protocol):
    """A replica that waits instead of computing. What it trains means nothing; how long it takes is the point."""

    def step_begins(self, batch: Batch) -> None:
        """Called with the first micro-batch of a step, where something is waited for before it is computed.

        What a step computes outside the layers then passes meanwhile.
        """

    def update_begins(self, added_up_s: float, share: float = 1.0) -> None:
        """Called in each step when all gradients are added up, since ``added_up_s`` (0 where nothing was sent).

        ``share`` of the parameters are updated on this rank.
        """

    def update_ends(self, share: float = 1.0) -> None:
        """Wait until that update is done: called before what follows it in the step."""

    def resumes_at(self, arrived_s: float) -> None:
        """Called when computing has waited for communication: what follows begins at ``arrived_s`` at the earliest."""


class Timing(Protocol):
    """Measures the implementations of one problem."""

    def warm_ups(self) -> list[Callable[[], None]]:
        """Functions that run each implementation once, so that it is compiled."""

    def run(self, seconds: float) -> None:
        """Measure for about so long."""

    def ratios(self) -> dict[str, float]:
        """The time of each implementation over that of the fastest, by name."""


class CodeTable(Protocol):
    """A fixed rule that says which implementation computes a problem."""

    @property
    def digest(self) -> str: ...

    def candidate(self, problem: Problem) -> str:
        """The name of the implementation."""


@runtime_checkable
class TunableReplica(Replica, Protocol):
    """A replica with several implementations of an operation, of which the runtime chooses.

    Plain training uses the fastest by measurement. Training in leaves uses a table, since implementations differ in
    bits.
    """

    def problems(self, rows: int, *, training: bool) -> list[Problem]:
        """The distinct problems of a pass over ``rows`` samples: of a step, or of an evaluation."""

    def timing(self, problem: Problem) -> Timing:
        """What measures the implementations of a problem."""

    def code_table(self) -> CodeTable:
        """The table for training in leaves. All ranks use the one of rank 0."""

    def use(self, choices: Choices | None = None, table: CodeTable | None = None) -> None:
        """Compute with these choices in plain training and with this table in leaves; None leaves them as they are."""


@runtime_checkable
class AddingReplica(Replica, Protocol):
    """A replica that can add the gradients of a pass to those that are in the bound arrays already.

    So the runtime adds leaves and micro-batches along their tree without an array and a sum of its own for each.
    """

    def add_gradients(self) -> None:
        """Let the next pass add its gradients, each element by one addition, also where they are 0.

        It holds until the next ``bind``, after which they are written.
        """


@runtime_checkable
class LeafReplica(Replica, Protocol):
    """A replica that computes several leaves in one pass, so that gradients become final layer by layer.

    A leaf's results have the same bits whatever other leaves are computed with it. To other replicas the runtime gives
    one leaf after another.
    """

    def bind(
        self, parameters: Mapping[str, Array], gradients: Mapping[str, Array], extra_slots: Sequence[Slot] = ()
    ) -> None:
        """As ``Replica.bind``; the gradients of a slot are the sums along the tree over its leaves.

        The first slot is ``gradients``; ``extra_slots`` follow in the order of their leaves.
        """

    def train_in_leaves(self, in_leaves: bool, rounding: Rounding | None) -> None:
        """Say whether the batches from now on are leaves of a global batch, even if there is only one leaf in them.

        With ``rounding`` every leaf's gradient is rounded, and then every sum of two along the tree.
        """


@runtime_checkable
class StagedReplica(LeafReplica, Protocol):
    """A replica that can compute some of its layers, as a stage of a pipeline, on several micro-batches in flight.

    A micro-batch in flight has a slot from its forward pass until its backward pass is done. Its ``batch`` is given
    again to each call, and its leaves say how many samples there are; what the replica is bound to may change between
    calls. Announcements are numbers of the whole model's layers. ``forward_backward`` is the same as ``forward_stage``,
    ``loss_stage`` and ``backward_stage`` in slot 0 of a stage that is the whole model.
    """

    def take_layers(
        self, own: Sequence[int], in_flight: int = 1, recompute: bool = False, add: OrderedSum | None = None
    ) -> None:
        """Compute these layers alone from now on, in slots 0 to ``in_flight - 1``.

        They are neighbours, but for column blocks (``LayerSpec.column_block``) that other ranks compute: then every
        rank that has samples calls ``add`` for its partial sums wherever blocks are added up, in evaluation too. All
        but ``layers``, ``boundary`` and ``initial_parameters`` then concerns these layers alone. With ``recompute`` a
        slot keeps no more than the input and the output, and ``recompute_stage`` comes right before ``backward_stage``.
        Called before anything is bound. Raises ``ConfigError`` for layers at whose ends more than one value crosses.
        """

    def boundary(self, layer: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """The shape for one sample, and the dtype, of what a layer hands on to the next."""

    def forward_stage(self, slot: int, batch: Batch, x: Array | None, events: StepEvents) -> Array:
        """Compute forward and return what is handed on, which stays until the slot is used again.

        ``x`` is what the stage before handed on, None in the first stage. It is never written; without ``recompute`` it
        must stay as it is until the slot's backward pass is done. What is returned lies in other memory.
        ``leaf_statistics`` then are those of this pass.
        """

    def loss_stage(self, slot: int, batch: Batch, events: StepEvents) -> BatchSums | DeferredSums:
        """Compute the loss and its gradient, after the last stage's forward pass."""

    def recompute_stage(self, slot: int, batch: Batch, events: StageEvents) -> None:
        """Compute forward again from what the slot keeps; running statistics stay as they are."""

    def backward_stage(self, slot: int, batch: Batch, grad: Array | None, events: StepEvents) -> Array | None:
        """Write the gradients and return that of the stage's input, which stays until the slot is used again.

        ``grad`` is what the stage behind returned, None in the last stage. It may be overwritten; what is returned lies
        in other memory. The first stage returns None.
        """

    def evaluate_stage(self, x: Array) -> Array:
        """Forward in evaluation mode, of ``EVALUATION_SAMPLES`` at most: the stage's input -> what is handed on."""

    def evaluate_logits(self, logits: Array, labels: NDArray[np.int64]) -> BatchSums:
        """The sums of an evaluation, from the last stage's output."""


@runtime_checkable
class BatchNormReplica(LeafReplica, Protocol):
    """A replica with batch norm that can take its statistics from more or fewer samples than the device's own."""

    def normalise_batches(self, mode: str, ordered_sum: OrderedSum) -> None:
        """Take the statistics of each leaf (``leaf``), of all ranks' samples (``global``), or of this rank's.

        With ``global`` every rank calls ``ordered_sum`` for the same sums in the same order in ``forward_backward``,
        even if it has no samples.
        """

    def leaf_statistics(self) -> list[Array]:
        """With ``leaf``: what the last forward pass adds to the running statistics, one flat array a slot."""

    def update_statistics(self, total: Array) -> None:
        """Update the running statistics with the sum of ``leaf_statistics`` over all slots and ranks."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The optional protocols of a replica: under each name the replica itself, or None if it does not implement it."""

    device: DeviceReplica | None
    rounding: RoundingReplica | None
    warm_up: WarmUpReplica | None
    diagnostic: DiagnosticReplica | None
    observable: ObservableReplica | None
    sized: SizedReplica | None
    emulated: EmulatedCompute | None
    tunable: TunableReplica | None
    adding: AddingReplica | None
    leaf: LeafReplica | None
    staged: StagedReplica | None
    batch_norm: BatchNormReplica | None

    @classmethod
    def of(cls, replica: Replica) -> Capabilities:
        """Find what a replica implements."""
        return cls(
            device=replica if isinstance(replica, DeviceReplica) else None,
            rounding=replica if isinstance(replica, RoundingReplica) else None,
            warm_up=replica if isinstance(replica, WarmUpReplica) else None,
            diagnostic=replica if isinstance(replica, DiagnosticReplica) else None,
            observable=replica if isinstance(replica, ObservableReplica) else None,
            sized=replica if isinstance(replica, SizedReplica) else None,
            emulated=replica if isinstance(replica, EmulatedCompute) else None,
            tunable=replica if isinstance(replica, TunableReplica) else None,
            adding=replica if isinstance(replica, AddingReplica) else None,
            leaf=replica if isinstance(replica, LeafReplica) else None,
            staged=replica if isinstance(replica, StagedReplica) else None,
            batch_norm=replica if isinstance(replica, BatchNormReplica) else None,
        )

    def multiply_in(self, dtype: ComputeDtype) -> None:
        """Let the replica multiply in this dtype. Raises ``ConfigError`` if it cannot.

        One that waits instead of computing waits for as long as was profiled, whatever the dtype.
        """
        if self.rounding is not None:
            self.rounding.multiply_in(dtype)
        elif dtype != "float32" and self.emulated is None:
            raise ConfigError(
                f"compute dtype {dtype} for a model of your own, which computes as it is written",
                allowed="float32 with it",
                remedy="leave compute_dtype out, and round the operands in the model, or use a built-in model",
            )
