"""``Network``: a chain of layers and a softmax cross-entropy; the project's own ``Replica``."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dpsim.choices import Choices, Problem
from dpsim.dtypes import ComputeDtype
from dpsim.errors import ConfigError
from dpsim.memory import Memory
from dpsim.nn.batch_norm import BatchNorm
from dpsim.nn.device_ops import DeviceOps
from dpsim.nn.diagnosis import is_finite, leaf_difference, nonfinite_forward, nonfinite_gradient, observe
from dpsim.nn.implementations import Timing, committed
from dpsim.nn.layer import Buffers, Layer, slot_parts, tree_sum
from dpsim.nn.layers import ReLU
from dpsim.nn.losses import softmax_cross_entropy
from dpsim.nn.ops import Ops
from dpsim.nn.residual import Join
from dpsim.records.checks import check_label_smoothing
from dpsim.replica import (
    Array,
    Batch,
    BatchSums,
    CodeTable,
    DeferredSums,
    LayerSpec,
    Leaves,
    Observer,
    OrderedSum,
    Rounding,
    Slot,
    StepEvents,
)

_EVALUATION_SAMPLES = 128
"""Samples of one pass of an evaluation; they bound the work arrays whatever the size of the test set."""


class NoEvents:
    """Step events that have no listener."""

    def forward_done(self, layer: int) -> None: ...

    def loss_done(self) -> None: ...

    def gradients_ready(self, layer: int) -> None: ...

    def backward_done(self, layer: int) -> None: ...


class Network:
    """A chain of layers trained on class labels; implements every protocol of ``dpsim.replica``.

    ``x`` is [b, *input_shape] in the network's dtype, labels [b]. The layers up to and including the first with tensors
    compute no input gradient, since no layer needs it (in backward a layer reads only from later layers of the chain,
    with branches too). The training loss has ``label_smoothing``; the evaluation loss has none.
    """

    def __init__(self, layers: Sequence[Layer], ops: Ops, label_smoothing: float = 0.0) -> None:
        check_label_smoothing(label_smoothing)
        self.label_smoothing = label_smoothing
        self.chain = tuple(layers)
        self.dtype = self.chain[0].dtype
        self.input_shape = self.chain[0].input_shape
        self.ops = ops
        self.compute_dtype: ComputeDtype = "float32"
        self._specs = tuple(layer.spec for layer in self.chain)
        self.buffers = Buffers(ops, self.dtype)
        self._extra_slots: tuple[Slot, ...] = ()
        self.least_leaves = 1
        """The least number of leaves of a batch: every bound slot needs one."""
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

    @property
    def work_bytes(self) -> int:
        """See ``SizedReplica``."""
        arrays = self.buffers.size_bytes + sum(layer.buffers.size_bytes for layer in self.chain)
        return arrays + self.chain[0].ops.work_bytes

    def problems(self, rows: int, *, training: bool) -> list[Problem]:
        """See ``TunableReplica``; an evaluation has forward passes of at most 128 samples."""
        whole, rest = (0, rows) if training else divmod(rows, _EVALUATION_SAMPLES)
        passes = [_EVALUATION_SAMPLES] * min(whole, 1) + [rest] * min(rest, 1)
        every: list[Problem] = []
        for samples in passes:
            for number, layer in enumerate(self.chain):
                parts = layer.problems(samples)
                every += parts[: (3 if number > self._first_trained else 2) if training else 1]
        return list(dict.fromkeys(every))

    def timing(self, problem: Problem) -> Timing:
        return Timing(problem)

    def code_table(self) -> CodeTable:
        return committed()

    def use(self, choices: Choices | None = None, table: CodeTable | None = None) -> None:
        self.ops.use(choices, table)

    def multiply_in(self, dtype: ComputeDtype) -> None:
        """See ``RoundingReplica``."""
        if dtype != "float32" and self.dtype != np.float32:
            raise ConfigError(
                f"compute dtype {dtype} for a model of {self.dtype}",
                allowed="a model of float32",
                remedy="build the model with dtype float32, or leave --compute-dtype out",
            )
        self.compute_dtype = dtype
        self.ops.multiply_in(dtype)

    def compute_in(self, memory: Memory) -> None:
        """See ``DeviceReplica``."""
        ops = DeviceOps(memory)
        ops.multiply_in(self.compute_dtype)
        self.ops = ops
        self.buffers = Buffers(self.ops, self.dtype)
        for layer in self.chain:
            layer.compute_with(self.ops)
        self._join_rectifiers(ops.layer_kernels(self.dtype) is not None)

    def _join_rectifiers(self, joined: bool) -> None:
        """Let norms and sums of branches compute the rectifier that follows them, in the same kernels."""
        for layer, after in itertools.pairwise(self.chain):
            if isinstance(layer, BatchNorm | Join) and isinstance(after, ReLU):
                layer.rectifies = after.done_before = joined

    def leaf_difference(self, batch: Batch) -> str | None:
        """See ``DeviceReplica``."""
        x, labels = self.ops.upload("x", batch.x), self.ops.upload("labels", batch.labels)
        initial = self.initial_parameters(batch.seed)
        gradients = {name: self.ops.zeros(value.shape, value.dtype) for name, value in initial.items()}
        self.bind({name: self.ops.xp.asarray(value) for name, value in initial.items()}, gradients)
        self.train_in_leaves(True, None)
        self.normalise_batches("leaf", tree_sum)
        fetch = self.ops.memory.fetch
        with self._alone_without_trace(), self.ops.tolerate_overflow():
            return leaf_difference(self.chain, self._loss_gradient, replace(batch, x=x, labels=labels), fetch)

    def _loss_gradient(self, logits: Array, labels: Array, leaves: Leaves) -> Array:
        return softmax_cross_entropy(self.ops, self.buffers, logits, labels, leaves, self.label_smoothing)[1]

    def train_in_leaves(self, in_leaves: bool, rounding: Rounding | None) -> None:
        ops = self.ops.in_leaves() if in_leaves else self.ops
        for layer in self.chain:
            layer.ops = ops
            layer.rounding = rounding

    def normalise_batches(self, mode: str, ordered_sum: OrderedSum) -> None:
        for layer in self._batch_norms:
            layer.mode, layer.ordered_sum = mode, ordered_sum

    @contextlib.contextmanager
    def _alone_without_trace(self) -> Iterator[None]:
        """While open, batch norm needs no other rank (``leaf`` for ``global``); at the end the state is restored."""
        of_all_ranks = [layer for layer in self._batch_norms if layer.mode == "global"]
        state = {name: array.copy() for name, array in self.state().items()}
        try:
            for layer in of_all_ranks:
                layer.mode = "leaf"
            yield
        finally:
            for layer in of_all_ranks:
                layer.mode = "global"
            for name, array in self.state().items():
                array[...] = state[name]

    def warm_up(self) -> None:
        """Forward and backward of one sample of zeros, which compiles every kernel."""
        x, labels = self.ops.zeros((1, *self.input_shape), self.dtype), self.ops.zeros((1,), np.int64)
        leaves = (0, *[1] * self.least_leaves)
        with self._alone_without_trace():
            self.forward_backward(Batch(x=x, labels=labels, leaves=leaves), NoEvents())

    def first_nonfinite_layer(self, x: Array, labels: NDArray[np.int64]) -> str | None:
        """See ``DiagnosticReplica``; random layers draw the numbers of the last batch that was trained on.

        In this order: the input, each layer's parameters and output, the loss, the gradients from the last layer to the
        first.
        """
        if not is_finite(x):
            return "the input batch"
        origin, x, labels = None, self.ops.upload("x", x), self.ops.upload("labels", labels)
        if len(x):
            with self._alone_without_trace(), self.ops.tolerate_overflow():
                origin, logits = nonfinite_forward(self.chain, x)
                origin = origin or self._nonfinite_loss(logits, labels)
        return origin or nonfinite_gradient(self.chain)

    def _nonfinite_loss(self, logits: Array, labels: NDArray[np.int64]) -> str | None:
        leaves = (0, len(logits))
        sums, _ = softmax_cross_entropy(self.ops, self.buffers, logits, labels, leaves, self.label_smoothing)
        return None if math.isfinite(sums.fetch().loss) else "the loss"

    def observe(self, observer: Observer) -> None:
        observe(self.chain, observer)

    def leaf_statistics(self) -> list[Array]:
        statistics_L = self.ops.xp.hstack([layer.leaf_statistics() for layer in self._batch_norms])
        return [tree_sum(slot) for slot in slot_parts(statistics_L, self._extra_slots)]

    def update_statistics(self, total: Array) -> None:
        start = 0
        for layer in self._batch_norms:
            stop = start + 1 + 2 * layer.batch_norm_channels
            layer.update_statistics(total[start:stop])
            start = stop

    def state(self) -> dict[str, Array]:
        return {name: array for layer in self.chain for name, array in layer.state().items()}

    def forward_backward(self, batch: Batch, events: StepEvents) -> BatchSums | DeferredSums:
        """Write the gradients of the summed loss into the bound arrays; a rank without samples writes zeros.

        A layer's own gradients are computed before its input gradient, so that they can be sent meanwhile. Infinities
        and NaN raise no warning: check the loss, and call ``first_nonfinite_layer`` for their origin.
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
        x, labels = self.ops.upload("x", x), self.ops.upload("labels", labels)
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
        """Forward only, with running statistics, 128 samples at a time. Raises ``ConfigError`` as forward_backward."""
        self._check(x, labels, (0, len(x)))
        loss, correct = 0.0, 0
        with self.ops.tolerate_overflow():
            for start in range(0, len(x), _EVALUATION_SAMPLES):
                samples = slice(start, start + _EVALUATION_SAMPLES)
                values, leaves = self.ops.upload("x", x[samples]), (0, len(x[samples]))
                of_samples = self.ops.upload("labels", labels[samples])
                for layer in self.chain:
                    values = layer.forward(values, leaves, training=False)
                deferred, _ = softmax_cross_entropy(self.ops, self.buffers, values, of_samples, leaves)
                sums = deferred.fetch()
                loss, correct = loss + sums.loss, correct + sums.correct
        return BatchSums(loss=loss, correct=correct, samples=len(x))

    def _no_samples(self, leaves: Leaves, events: StepEvents) -> BatchSums:
        """Write zeros; batch norms over several ranks take part with zero samples."""
        collective = [layer for layer in self._batch_norms if layer.mode != "local"]
        for number, layer in enumerate(self.chain):
            if layer in collective:
                layer.forward(self._empty(layer), leaves, training=True)
            events.forward_done(number)
        events.loss_done()
        for number in range(len(self.chain) - 1, -1, -1):
            layer = self.chain[number]
            if layer.tensors:
                for gradients in layer.slots:
                    for gradient in gradients.values():
                        gradient[...] = 0
                if layer in collective:
                    layer.write_gradients(self._empty(layer), leaves)
                events.gradients_ready(number)
                if layer in collective and number > self._first_trained:
                    layer.input_gradient(self._empty(layer), leaves)
            events.backward_done(number)
        return BatchSums(loss=0.0, correct=0, samples=0, slot_losses=(0.0,) * (1 + len(self._extra_slots)))

    def _empty(self, layer: Layer) -> Array:
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
