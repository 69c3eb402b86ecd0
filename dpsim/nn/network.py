"""``Network``: a chain of layers and a softmax cross-entropy; the project's own ``Replica``."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpsim.choices import Choices, Problem
from dpsim.dtypes import ComputeDtype
from dpsim.errors import ConfigError
from dpsim.memory import Memory
from dpsim.nn.batch_norm import BatchNorm
from dpsim.nn.column_blocks import BlockSum, Pair
from dpsim.nn.device_ops import DeviceOps
from dpsim.nn.diagnosis import is_finite, leaf_difference, nonfinite_forward, nonfinite_gradient, observe
from dpsim.nn.implementations import Timing, committed
from dpsim.nn.layer import Buffers, Layer, Shape, slot_parts, tree_sum
from dpsim.nn.layers import ReLU
from dpsim.nn.losses import softmax_cross_entropy
from dpsim.nn.ops import Ops
from dpsim.nn.residual import Join, layers_read
from dpsim.nn.stage import Stage, twins
from dpsim.records.checks import check_label_smoothing
from dpsim.replica import (
    EVALUATION_SAMPLES,
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
    StageEvents,
    StepEvents,
)


class NoEvents:
    """Step events that have no listener."""

    def forward_done(self, layer: int) -> None: ...

    def loss_done(self) -> None: ...

    def gradients_ready(self, layer: int) -> None: ...

    def backward_done(self, layer: int) -> None: ...

    def recompute_done(self, layer: int) -> None: ...


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
        self._specs = tuple(
            msgspec.structs.replace(layer.spec, depends_on=read)
            for layer, read in zip(self.chain, layers_read(self.chain), strict=True)
        )
        self.buffers = Buffers(ops, self.dtype)
        self._stage = Stage(self.chain, self.buffers, range(len(self.chain)))
        self._extra_slots: tuple[Slot, ...] = ()
        self.least_leaves = 1
        """The least number of leaves of a batch: every bound slot needs one."""

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
        self._stage.bind(parameters, gradients, extra_slots)

    @property
    def work_bytes(self) -> int:
        """See ``SizedReplica``."""
        arrays = self.buffers.size_bytes + sum(layer.buffers.size_bytes for layer in self.chain)
        return arrays + self._stage.size_bytes + self.chain[0].ops.work_bytes

    def layer_work_bytes(self, leaves: Leaves) -> tuple[int, ...]:
        """See ``SizedReplica``. Computes a step of zeros in arrays that are given up again."""
        buffers, layers = Buffers(self.ops, self.dtype), twins(self.chain)
        for layer in layers:
            if isinstance(layer, BatchNorm):
                layer.mode = "leaf" if layer.mode == "global" else layer.mode
                layer.running_mean, layer.running_var = layer.running_mean.copy(), layer.running_var.copy()
        stage = Stage(layers, buffers, range(len(layers)))
        tensors = [tensor for layer in layers for tensor in layer.tensors]
        zeros = {tensor.name: self.ops.zeros(tensor.shape, tensor.dtype) for tensor in tensors}
        stage.bind(zeros, zeros)
        x, labels = self.ops.zeros((leaves[-1], *self.input_shape), self.dtype), self.ops.zeros(leaves[-1:], np.int64)
        batch, (slot,) = Batch(x=x, labels=labels, leaves=leaves), stage.slots
        with self.ops.tolerate_overflow():
            logits = stage.forward(slot, x, batch, NoEvents().forward_done)
            _, grad = softmax_cross_entropy(self.ops, buffers, logits, labels, leaves, self.label_smoothing)
            stage.backward(slot, grad, batch, NoEvents())
        return *(layer.buffers.size_bytes for layer in layers), buffers.size_bytes

    def take_layers(
        self, own: Sequence[int], in_flight: int = 1, recompute: bool = False, add: OrderedSum | None = None
    ) -> None:
        """See ``StagedReplica``."""
        self._stage = Stage(self.chain, self.buffers, own, in_flight, recompute=recompute)
        of_blocks = [layer.column_block for layer in self._stage.layers if layer.column_block >= 0]
        for pair in self._pairs if add is not None and of_blocks else ():
            pair.take(range(min(of_blocks), max(of_blocks) + 1), add)

    @property
    def _pairs(self) -> list[Pair]:
        return [layer.pair for layer in self.chain if isinstance(layer, BlockSum)]

    def boundary(self, layer: int) -> tuple[Shape, np.dtype[Any]]:
        return self.chain[layer].output_shape, self.chain[layer].dtype

    @property
    def _every_layer(self) -> list[Layer]:
        """The layers of the model, and the copies of them that micro-batches in flight have."""
        return [*self.chain, *self._stage.copies]

    def problems(self, rows: int, *, training: bool) -> list[Problem]:
        """See ``TunableReplica``; an evaluation has forward passes of at most 128 samples."""
        full, rest = (0, rows) if training else divmod(rows, EVALUATION_SAMPLES)
        passes = [EVALUATION_SAMPLES] * min(full, 1) + [rest] * min(rest, 1)
        every: list[Problem] = []
        for samples in passes:
            for number, layer in zip(self._stage.numbers, self._stage.layers, strict=True):
                parts, gradient = layer.problems(samples), self._stage.hands_back(number, layer)
                every += parts[: (3 if gradient else 2) if training else 1]
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
                remedy="build the model with dtype float32, or leave compute_dtype out",
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
        stage = self._stage
        self.take_layers(stage.numbers, len(stage.slots), stage.recompute)

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
        parameters = {name: self.ops.xp.asarray(value) for name, value in initial.items()}
        for layer in self.chain:
            layer.bind(parameters, gradients)
        self.train_in_leaves(True, None)
        self.normalise_batches("leaf", tree_sum)
        fetch = self.ops.memory.fetch
        with self._alone_without_trace(), self.ops.tolerate_overflow():
            return leaf_difference(self.chain, self._loss_gradient, replace(batch, x=x, labels=labels), fetch)

    def _loss_gradient(self, logits: Array, labels: Array, leaves: Leaves) -> Array:
        return softmax_cross_entropy(self.ops, self.buffers, logits, labels, leaves, self.label_smoothing)[1]

    def train_in_leaves(self, in_leaves: bool, rounding: Rounding | None) -> None:
        ops = self.ops.in_leaves() if in_leaves else self.ops
        for layer in self._every_layer:
            layer.ops = ops
            layer.rounding = rounding

    def normalise_batches(self, mode: str, ordered_sum: OrderedSum) -> None:
        for layer in self._batch_norms:
            layer.mode, layer.ordered_sum = mode, ordered_sum

    @property
    def _batch_norms(self) -> list[BatchNorm]:
        return [layer for layer in self._every_layer if isinstance(layer, BatchNorm)]

    @contextlib.contextmanager
    def _alone_without_trace(self) -> Iterator[None]:
        """Compute without other ranks meanwhile (batch norm has ``leaf`` for ``global``, sums of blocks are partial).

        At the end the state is restored.
        """
        add = [pair.add for pair in self._pairs]
        of_all_ranks = [layer for layer in self._batch_norms if layer.mode == "global"]
        state = {name: array.copy() for name, array in self.state().items()}
        try:
            for layer in of_all_ranks:
                layer.mode = "leaf"
            for pair in self._pairs:
                pair.add = None
            yield
        finally:
            for pair, of_ranks in zip(self._pairs, add, strict=True):
                pair.add = of_ranks
            for layer in of_all_ranks:
                layer.mode = "global"
            for name, array in self.state().items():
                array[...] = state[name]

    def warm_up(self) -> None:
        """Forward and backward of one sample of zeros, which compiles every kernel."""
        stage, labels = self._stage, self.ops.zeros((1,), np.int64)
        x = self.ops.zeros((1, *stage.input_shape), self.dtype)
        batch = Batch(x=x, labels=labels, leaves=(0, *[1] * self.least_leaves))
        with self._alone_without_trace():
            self.forward_stage(0, batch, x if stage.first else None, NoEvents())
            if stage.last:
                self.loss_stage(0, batch, NoEvents())
            grad = None if stage.last else self.ops.zeros((1, *stage.output_shape), self.dtype)
            self.backward_stage(0, batch, grad, NoEvents())

    def first_nonfinite_layer(self, x: Array, labels: NDArray[np.int64]) -> str | None:
        """See ``DiagnosticReplica``; random layers draw the numbers of the last batch that was trained on.

        In this order: the input, each layer's parameters and output, the loss, the gradients from the last layer to the
        first. One stage of several looks at the input and the gradients alone.
        """
        if not is_finite(x):
            return "the input batch"
        if len(self._stage.layers) < len(self.chain):
            return nonfinite_gradient(self._stage.layers)
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
        observe(self._every_layer, observer)

    def leaf_statistics(self) -> list[Array]:
        """See ``BatchNormReplica``; without batch norms in the stage, arrays of no element."""
        statistics = [layer.leaf_statistics() for layer in self._stage.recent_norms]
        if not statistics:
            return [self.ops.zeros((0,), np.float64) for _ in range(1 + len(self._extra_slots))]
        return [tree_sum(slot) for slot in slot_parts(self.ops.xp.hstack(statistics), self._extra_slots)]

    def update_statistics(self, total: Array) -> None:
        start = 0
        for layer in self._stage.recent_norms:
            stop = start + 1 + 2 * layer.batch_norm_channels
            layer.update_statistics(total[start:stop])
            start = stop

    def state(self) -> dict[str, Array]:
        return {name: array for layer in self._stage.layers for name, array in layer.state().items()}

    def forward_backward(self, batch: Batch, events: StepEvents) -> BatchSums | DeferredSums:
        """Write the gradients of the summed loss into the bound arrays; a rank without samples writes zeros.

        A layer's own gradients are computed before its input gradient, so that they can be sent meanwhile. Infinities
        and NaN raise no warning: check the loss, and call ``first_nonfinite_layer`` for their origin.
        Raises ``ConfigError`` for a batch of the wrong shape or dtype.
        """
        self.forward_stage(0, batch, None, events)
        sums = self.loss_stage(0, batch, events)
        self.backward_stage(0, batch, None, events)
        return sums

    def forward_stage(self, slot: int, batch: Batch, x: Array | None, events: StepEvents) -> Array:
        """See ``StagedReplica``. Raises ``ConfigError`` for a batch of the wrong shape or dtype."""
        stage, leaves = self._stage, batch.leaves
        self._check(batch.x if x is None else x, batch.labels, leaves, stage.input_shape)
        if len(leaves) <= self.least_leaves:
            raise ConfigError(
                f"leaves {leaves} for {1 + len(self._extra_slots)} slots", allowed="a leaf or more a slot"
            )
        held = stage.slots[slot]
        held.input = held.keep("input", x) if stage.recompute and x is not None else x
        with self.ops.tolerate_overflow():
            stage_input = self._stage_input(slot, batch)
            y = stage.forward(held, stage_input, batch, events.forward_done)
            aliased = not stage.last and self.ops.xp.may_share_memory(y, stage_input)
            held.output = held.keep("output", y) if stage.recompute or aliased else y
        return held.output

    def _stage_input(self, slot: int, batch: Batch) -> Array:
        """Return what the stage before handed on, or the samples of the batch."""
        stage_input = self._stage.slots[slot].input
        if stage_input is not None:
            return stage_input
        return self.ops.upload("x" if self._stage.recompute or not slot else f"x {slot}", batch.x)

    def loss_stage(self, slot: int, batch: Batch, events: StepEvents) -> BatchSums | DeferredSums:
        """See ``StagedReplica``."""
        held = self._stage.slots[slot]
        sums: BatchSums | DeferredSums
        if held.output is None or not batch.leaves[-1]:
            sums, held.logits_gradient = self._zero_sums(), held.output
        else:
            labels = self.ops.upload("labels", batch.labels)
            with self.ops.tolerate_overflow():
                sums, held.logits_gradient = softmax_cross_entropy(
                    self.ops, held.buffers, held.output, labels, batch.leaves, self.label_smoothing, self._extra_slots
                )
        events.loss_done()
        return sums

    def _zero_sums(self) -> BatchSums:
        return BatchSums(loss=0.0, correct=0, samples=0, slot_losses=(0.0,) * (1 + len(self._extra_slots)))

    def recompute_stage(self, slot: int, batch: Batch, events: StageEvents) -> None:
        """See ``StagedReplica``."""
        with self.ops.tolerate_overflow():
            held, x = self._stage.slots[slot], self._stage_input(slot, batch)
            self._stage.recompute_forward(held, x, batch, events.recompute_done)

    def backward_stage(self, slot: int, batch: Batch, grad: Array | None, events: StepEvents) -> Array | None:
        """See ``StagedReplica``."""
        held = self._stage.slots[slot]
        grad = held.logits_gradient if grad is None else grad
        if grad is None:
            raise ConfigError("a backward pass without a gradient", allowed="one after the loss, or with a gradient")
        with self.ops.tolerate_overflow():
            handed_back = self._stage.backward(held, grad, batch, events)
            if handed_back is None:
                return None
            if self._stage.recompute or self.ops.xp.may_share_memory(handed_back, grad):
                return held.keep("input gradient", handed_back)  # slots share layers, or the caller's array is in use
            return handed_back

    def evaluate(self, x: Array, labels: NDArray[np.int64]) -> BatchSums:
        """Forward only, with running statistics, 128 samples at a time. Raises ``ConfigError`` as forward_backward."""
        self._check(x, labels, (0, len(x)), self.input_shape)
        loss, correct = 0.0, 0
        for start in range(0, len(x), EVALUATION_SAMPLES):
            samples = slice(start, start + EVALUATION_SAMPLES)
            sums = self.evaluate_logits(self.evaluate_stage(self.ops.upload("x", x[samples])), labels[samples])
            loss, correct = loss + sums.loss, correct + sums.correct
        return BatchSums(loss=loss, correct=correct, samples=len(x))

    def evaluate_stage(self, x: Array) -> Array:
        """See ``StagedReplica``."""
        with self.ops.tolerate_overflow():
            for layer in self._stage.layers:
                x = layer.forward(x, (0, len(x)), training=False)
        return x

    def evaluate_logits(self, logits: Array, labels: NDArray[np.int64]) -> BatchSums:
        """See ``StagedReplica``."""
        labels, leaves = self.ops.upload("labels", labels), (0, len(logits))
        with self.ops.tolerate_overflow():
            return softmax_cross_entropy(self.ops, self.buffers, logits, labels, leaves)[0].fetch()

    def _check(self, x: Array, labels: NDArray[np.int64], leaves: Leaves, input_shape: Shape) -> None:
        if x.shape[1:] != input_shape or x.dtype != self.dtype:
            raise ConfigError(
                f"a batch of shape {x.shape} and dtype {x.dtype}",
                allowed=f"samples of shape {input_shape} and dtype {self.dtype}",
                remedy="build the model for the data set's shape, and load the data set in the model's dtype",
            )
        if len(labels) != len(x):
            raise ConfigError(f"{len(x)} samples with {len(labels)} labels", allowed="one label a sample")
        if len(leaves) < 2 or leaves[0] != 0 or leaves[-1] != len(x) or list(leaves) != sorted(leaves):
            raise ConfigError(f"leaves {leaves} of {len(x)} samples", allowed=f"boundaries from 0 up to {len(x)}")
