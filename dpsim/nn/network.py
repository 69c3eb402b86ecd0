"""``Network``: layers one after another and a softmax cross-entropy; the project's own ``Replica``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dpsim.choices import Problem
from dpsim.errors import ConfigError
from dpsim.nn.batch_norm import BatchNorm
from dpsim.nn.layer import Buffers, Layer, slot_parts, tree_sum
from dpsim.nn.losses import check_label_smoothing, softmax_cross_entropy
from dpsim.nn.ops import Ops
from dpsim.replica import Array, Batch, BatchSums, LayerSpec, Leaves, OrderedSum, Rounding, Slot, StepEvents

EVALUATE_AT_ONCE = 128
"""Samples of a pass; bounds the work arrays whatever the size of the test set."""


class Network:
    """A chain of layers trained on class labels; implements ``dpsim.replica.LeafReplica`` and ``BatchNormReplica``.

    ``x`` is [b, *input_shape] in the network's dtype, labels [b]. Layers before the first one with tensors, and that
    one itself, compute no input gradient: nobody would use it (in backward, a layer reads from those after it in the
    chain alone, branches or not). The training loss has ``label_smoothing``; evaluation has none.
    """

    def __init__(self, layers: Sequence[Layer], ops: Ops, label_smoothing: float = 0.0) -> None:
        check_label_smoothing(label_smoothing)
        self.label_smoothing = label_smoothing
        self.chain = tuple(layers)
        self.dtype = self.chain[0].dtype
        self.input_shape = self.chain[0].input_shape
        self.ops = ops
        self._specs = tuple(layer.spec for layer in self.chain)
        self.buffers = Buffers(ops, self.dtype)
        self._extra_slots: tuple[Slot, ...] = ()
        self.least_leaves = 1
        """Leaves a batch must have, so that every bound slot has one."""
        self._batch_norms = [layer for layer in self.chain if isinstance(layer, BatchNorm)]
        self._first_trained = next(i for i, layer in enumerate(self.chain) if layer.tensors)

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return self._specs

    def initial_parameters(self, seed: int) -> dict[str, Array]:
        return {name: value for layer in self.chain for name, value in layer.initial_parameters(seed).items()}

    def bind(
        self, parameters: Mapping[str, Array], gradients: Mapping[str, Array], extra_slots: Sequence[Slot] = ()
    ) -> None:
        self._extra_slots = tuple(extra_slots)
        self.least_leaves = 1 + max((slot.first_leaf for slot in extra_slots), default=0)
        for layer in self.chain:
            layer.bind(parameters, gradients, extra_slots)

    def problems(self, rows: int, *, training: bool) -> list[Problem]:
        """The different problems of a pass over so many samples, of which an evaluation has forward alone."""
        every: list[Problem] = []
        for number, layer in enumerate(self.chain):
            parts = layer.problems(rows)
            every += parts[: (3 if number > self._first_trained else 2) if training else 1]
        return list(dict.fromkeys(every))

    def train_in_leaves(self, given: bool, rounding: Rounding | None) -> None:
        for layer in self.chain:
            layer.ops = self.ops.in_leaves() if given else self.ops
            layer.rounding = rounding

    def normalise_batches(self, mode: str, ordered_sum: OrderedSum) -> None:
        for layer in self._batch_norms:
            layer.mode, layer.ordered_sum = mode, ordered_sum

    @contextlib.contextmanager
    def without_other_ranks(self) -> Iterator[None]:
        """Within it, batch norm takes the statistics of leaves where it would ask the other ranks for theirs."""
        together = [layer for layer in self._batch_norms if layer.mode == "global"]
        try:
            for layer in together:
                layer.mode = "leaf"
            yield
        finally:
            for layer in together:
                layer.mode = "global"

    def leaf_statistics(self) -> list[Array]:
        of_leaves = np.hstack([layer.leaf_statistics() for layer in self._batch_norms])
        return [tree_sum(some) for some in slot_parts(of_leaves, self._extra_slots)]

    def update_statistics(self, total: Array) -> None:
        ends = np.cumsum([1 + 2 * layer.batch_norm_channels for layer in self._batch_norms])
        for layer, of_layer in zip(self._batch_norms, np.split(total, ends[:-1]), strict=True):
            layer.update_statistics(of_layer)

    def state(self) -> dict[str, Array]:
        return {name: array for layer in self.chain for name, array in layer.state().items()}

    def forward_backward(self, batch: Batch, events: StepEvents) -> BatchSums:
        """Gradients of the summed loss into the bound arrays; a rank without samples writes zeros.

        A layer's own gradients come before its input gradient, so that they can travel meanwhile. Infinities and NaN
        raise no warning here: look at the loss, and ask ``first_nonfinite_layer`` where they came from.
        Raises ``ConfigError`` for a batch of the wrong shape or dtype.
        """
        x, labels, leaves = batch.x, batch.labels, batch.leaves
        self._check(x, labels, leaves)
        if len(leaves) <= self.least_leaves:
            raise ConfigError(
                f"leaves {leaves} for {1 + len(self._extra_slots)} slots", allowed="a leaf or more a slot"
            )
        if len(x) == 0:
            return self._no_samples(leaves, events)
        with self.ops.tolerate_overflow():
            for layer in self.chain:
                layer.begin(batch)
            for number, layer in enumerate(self.chain):
                x = layer.forward(x, leaves, training=True)
                events.forward_done(number)
            sums, grad = softmax_cross_entropy(
                self.ops, self.buffers, x, labels, leaves, self.label_smoothing, self._extra_slots
            )
            events.loss_done()
            for number in range(len(self.chain) - 1, -1, -1):
                layer = self.chain[number]
                if layer.tensors:
                    layer.write_gradients(grad, leaves)
                    events.gradients_ready(number)
                if number > self._first_trained:
                    grad = layer.input_gradient(grad, leaves)
                events.backward_done(number)
        return sums

    def evaluate(self, x: Array, labels: NDArray[np.int64]) -> BatchSums:
        """Forward only, with running statistics, some samples at a time. Raises ``ConfigError`` as forward_backward."""
        self._check(x, labels, (0, len(x)))
        loss, correct = 0.0, 0
        with self.ops.tolerate_overflow():
            for start in range(0, len(x), EVALUATE_AT_ONCE):
                some, their_labels = x[start : start + EVALUATE_AT_ONCE], labels[start : start + EVALUATE_AT_ONCE]
                leaves = (0, len(some))
                for layer in self.chain:
                    some = layer.forward(some, leaves, training=False)
                sums, _ = softmax_cross_entropy(self.ops, self.buffers, some, their_labels, leaves)
                loss, correct = loss + sums.loss, correct + sums.correct
        return BatchSums(loss=loss, correct=correct, samples=len(x))

    def _no_samples(self, leaves: Leaves, events: StepEvents) -> BatchSums:
        """Zeros; batch norms that are computed by all ranks together take part with none."""
        together = [layer for layer in self._batch_norms if layer.mode != "local"]
        for number, layer in enumerate(self.chain):
            if layer in together:
                layer.forward(self._nothing(layer), leaves, training=True)
            events.forward_done(number)
        events.loss_done()
        for number in range(len(self.chain) - 1, -1, -1):
            layer = self.chain[number]
            if layer.tensors:
                for gradients in layer.slots:
                    for gradient in gradients.values():
                        gradient[...] = 0
                if layer in together:
                    layer.write_gradients(self._nothing(layer), leaves)
                events.gradients_ready(number)
                if layer in together and number > self._first_trained:
                    layer.input_gradient(self._nothing(layer), leaves)
            events.backward_done(number)
        return BatchSums(loss=0.0, correct=0, samples=0, slot_losses=(0.0,) * (1 + len(self._extra_slots)))

    def _nothing(self, layer: Layer) -> Array:
        return self.ops.zeros((0, *layer.output_shape), layer.dtype)

    def _check(self, x: Array, labels: NDArray[np.int64], leaves: Leaves) -> None:
        if x.shape[1:] != self.input_shape or x.dtype != self.dtype:
            raise ConfigError(
                f"a batch of shape {x.shape} and dtype {x.dtype}",
                allowed=f"samples of shape {self.input_shape} and dtype {self.dtype}",
                remedy="build the model for the data set's shape, and load the data set in the model's dtype",
            )
        if len(labels) != len(x):
            raise ConfigError(f"{len(x)} samples with {len(labels)} labels", allowed="one label a sample")
        if len(leaves) < 2 or leaves[0] != 0 or leaves[-1] != len(x) or list(leaves) != sorted(leaves):
            raise ConfigError(f"leaves {leaves} of {len(x)} samples", allowed=f"boundaries from 0 up to {len(x)}")
