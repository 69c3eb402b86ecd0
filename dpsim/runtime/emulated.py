"""``EmulatedReplica``: a replica that waits for as long as a model computes, so that ranks may outnumber cores.

What it announces, and when, is what the model would: every layer's work ends at a moment that is known before the step
begins (``Workload``), and until then the rank sleeps. The moments of a step are absolute, so that waking up late does
not add up. Gradients are written to memory and communicated, parameters are updated; nothing is learnt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dpsim.comm.clock import SLEEP_LEAD_S, now, sharpen_sleep, sleep_until
from dpsim.errors import ConfigError
from dpsim.kernels.allreduce.tree import subtrees
from dpsim.lowering.computation import block_sums
from dpsim.replica import (
    Array,
    Batch,
    BatchSums,
    Capabilities,
    LayerSpec,
    OrderedSum,
    Replica,
    Rounding,
    Slot,
    StagedReplica,
    StageEvents,
    StepEvents,
    stage_ends,
)
from dpsim.rng import random_words
from dpsim.workload import LayerTimes, Workload

_GRADIENT = _PARAMETER = 1e-3
_MOST_STEPS = 2**20
_NORMAL = NormalDist()


@dataclass(frozen=True, kw_only=True)
class Clock:
    """The clock that an emulated replica reads and waits by; a test gives it one of its own."""

    now: Callable[[], float] = now
    sleep_until: Callable[[float], None] = sleep_until


class EmulatedReplica:
    """A ``dpsim.replica.EmulatedCompute`` that waits for the times that ``workload`` has of ``model``'s layers.

    All times of a step are multiplied by a factor that is drawn from the workload's ``step_spread`` for this seed, rank
    and step, to some degree alike on all ranks (``step_correlation``); 1 where the spread is not known. ``lateness_s``
    holds how late each moment of the last step was met. Batch norm over the global batch really sums over the ranks,
    and what follows begins when the sum is there, and so do sums over column blocks; leaves are not emulated. A stage
    hands on zeros of float32.
    """

    def __init__(self, model: Replica, workload: Workload, *, seed: int, rank: int, clock: Clock | None = None) -> None:
        self._model, self._workload = model, workload
        self._staged = Capabilities.of(model).staged
        self._seed, self._rank = seed, rank
        self._clock = clock or Clock()
        if clock is None:
            sharpen_sleep()
        self._gradients: list[list[Array]] = []
        self._stage: Sequence[int] = range(len(model.layers))
        self._add_blocks: OrderedSum | None = None
        self._partial_sums = 0  # over blocks, of this rank
        self._first = 0
        self._crossing: dict[int, Array] = {}
        self._step: int | None = None
        self._factor = 1.0
        self._end_s = -math.inf  # of what is computed so far
        self._update_s = 0.0  # what is still to be added to it
        self._sum: OrderedSum | None = None
        self.lateness_s: list[float] = []

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return self._model.layers

    def initial_parameters(self, seed: int) -> dict[str, Array]:
        return self._model.initial_parameters(seed)

    def bind(
        self, parameters: Mapping[str, Array], gradients: Mapping[str, Array], extra_slots: Sequence[Slot] = ()
    ) -> None:
        self._model.bind(parameters, gradients)
        self._gradients = [
            [gradients[tensor.name] for tensor in layer.tensors if number in self._stage]
            for number, layer in enumerate(self.layers)
        ]

    def train_in_leaves(self, in_leaves: bool, rounding: Rounding | None) -> None:
        """Do nothing: leaves are not emulated (``Setting`` refuses them), so there is nothing to choose."""

    def normalise_batches(self, mode: str, ordered_sum: OrderedSum) -> None:
        """See ``BatchNormReplica``; only ``global`` communicates."""
        self._sum = ordered_sum if mode == "global" else None

    def leaf_statistics(self) -> list[Array]:
        """Return nothing: without leaves there are no statistics."""
        return []

    def update_statistics(self, total: Array) -> None:
        """Leave running statistics as they are, for nothing is learnt."""

    def state(self) -> dict[str, Array]:
        return self._model.state()

    def evaluate(self, x: Array, labels: NDArray[np.int64]) -> BatchSums:
        return self._model.evaluate(x, labels)

    def take_layers(
        self, own: Sequence[int], in_flight: int = 1, recompute: bool = False, add: OrderedSum | None = None
    ) -> None:
        """See ``StagedReplica``; nothing is kept of a micro-batch in flight."""
        of_blocks = [block for layer in own if (block := self.layers[layer].column_block) >= 0]
        self._stage, self._add_blocks = own, add if of_blocks else None
        if of_blocks:
            blocks = subtrees(self._workload.column_blocks, min(of_blocks), max(of_blocks) + 1)
            self._partial_sums = len(blocks)
            self._joins, self._splits = block_sums(self._workload)
        if self._staged is not None:
            self._staged.take_layers(own, add=add)
        self._first, stop = stage_ends(self.layers, own)
        for edge in {self._first, stop} - {0, len(self.layers)}:
            self.boundary(edge - 1)

    def boundary(self, layer: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """See ``StagedReplica``. Raises ``ConfigError`` where the workload does not say what the layer hands on."""
        if self._staged is not None:
            return self._staged.boundary(layer)
        size_bytes = self.layers[layer].output_bytes_per_sample
        if not size_bytes:
            raise ConfigError(
                f"a stage that ends after layer {self.layers[layer].name!r}, whose output is of unknown size",
                allowed="layers with output_bytes_per_sample",
                remedy="profile the model again with dpsim profile, or cut it elsewhere",
            )
        return (math.ceil(size_bytes / np.dtype(np.float32).itemsize),), np.dtype(np.float32)

    def forward_backward(self, batch: Batch, events: StepEvents) -> BatchSums:
        """Announce every layer when the model would have computed it. The loss of what is not computed is 0."""
        self._forward(batch, events.forward_done)
        sums = self.loss_stage(0, batch, events)
        self._backward(batch, events)
        return sums

    def forward_stage(self, slot: int, batch: Batch, x: Array | None, events: StepEvents) -> Array:
        """See ``StagedReplica``."""
        self._forward(batch, events.forward_done)
        last = self._stage[-1]
        return self._handed_on(last, batch) if last + 1 < len(self.layers) else np.empty(0, np.float32)

    def loss_stage(self, slot: int, batch: Batch, events: StepEvents) -> BatchSums:
        """See ``StagedReplica``."""
        times, factor = self._times(batch)
        if times.loss_s:
            self._wait(factor * times.loss_s)
        events.loss_done()
        return BatchSums(loss=0.0, correct=0, samples=len(batch.labels))

    def recompute_stage(self, slot: int, batch: Batch, events: StageEvents) -> None:
        """See ``StagedReplica``."""
        self._forward(batch, events.recompute_done)

    def backward_stage(self, slot: int, batch: Batch, grad: Array | None, events: StepEvents) -> Array | None:
        """See ``StagedReplica``."""
        self._backward(batch, events)
        return self._handed_on(self._first - 1, batch) if self._first else None

    def evaluate_stage(self, x: Array) -> Array:
        """See ``StagedReplica``."""
        return self._evaluating.evaluate_stage(x)

    def evaluate_logits(self, logits: Array, labels: NDArray[np.int64]) -> BatchSums:
        """See ``StagedReplica``."""
        return self._evaluating.evaluate_logits(logits, labels)

    @property
    def _evaluating(self) -> StagedReplica:
        if self._staged is None:
            raise NotImplementedError("a workload says how long its layers compute, not what")
        return self._staged

    def _times(self, batch: Batch) -> tuple[LayerTimes, float]:
        """Return the times of the layers, and their factor: 0 without samples."""
        samples = len(batch.labels)
        times = self._workload.times(max(samples, 1))
        return times, self._begin(batch.step, times.overhead_s) if samples else 0.0

    def _forward(self, batch: Batch, done: Callable[[int], None]) -> None:
        times, factor = self._times(batch)
        forward_s = times.forward_s.tolist()
        for layer in self._stage:
            if self._add_blocks is not None and layer in self._joins:
                self._sum_blocks(self._add_blocks, layer, batch)
            self._wait(factor * forward_s[layer])
            self._sum_statistics(1 + 2 * self.layers[layer].batch_norm_channels, np.float64)
            done(layer)

    def _backward(self, batch: Batch, events: StepEvents) -> None:
        times, factor = self._times(batch)
        ready_s, backward_s = times.gradient_ready_s.tolist(), times.backward_s.tolist()
        for layer in reversed(self._stage):
            if self._add_blocks is not None and layer in self._splits:
                self._sum_blocks(self._add_blocks, layer, batch)
            rest_s = backward_s[layer]
            if self._gradients[layer]:
                for gradient in self._gradients[layer]:
                    gradient[...] = _GRADIENT * len(batch.labels)
                self._wait(factor * ready_s[layer])
                rest_s -= ready_s[layer]
                events.gradients_ready(layer)
            self._wait(factor * rest_s)
            self._sum_statistics(2 * self.layers[layer].batch_norm_channels, np.float32)
            events.backward_done(layer)

    def _handed_on(self, layer: int, batch: Batch) -> Array:
        """Return an array of the size of a layer's output or gradient, which nobody writes."""
        (shape, dtype), samples = self.boundary(layer), len(batch.labels)
        if len(self._crossing.get(layer, ())) < samples:
            self._crossing[layer] = np.zeros((samples, *shape), dtype)
        return self._crossing[layer][:samples] if samples else np.zeros((0, *shape), dtype)

    def replay(self, workload: Workload) -> None:
        """Wait for the times of another workload of the same layers from the next step on."""
        self._workload = workload

    def _sum_statistics(self, values: int, dtype: DTypeLike) -> None:
        """Sum as many values over the ranks as global batch norm does; the next layer begins then."""
        if self._sum is not None and values > 1:
            self._sum([np.zeros(values, dtype)])
            self.resumes_at(self._clock.now())

    def _sum_blocks(self, add: OrderedSum, layer: int, batch: Batch) -> None:
        """Add as many values over the ranks as a layer hands on; what is computed next begins then."""
        values = math.ceil(len(batch.labels) * self.layers[layer].output_bytes_per_sample / 4)
        add([np.zeros(values, np.float32)] * self._partial_sums)
        self.resumes_at(self._clock.now())

    def begin_anew(self) -> None:
        """Let the next step begin when it is called, whatever was before it."""
        self._step, self._end_s = None, -math.inf

    def step_begins(self, batch: Batch) -> None:
        """See ``EmulatedCompute``."""
        self._times(batch)

    def update_begins(self, added_up_s: float, share: float = 1.0) -> None:
        """See ``EmulatedCompute``: the update takes its time from then on, whatever this rank takes for it."""
        self.resumes_at(added_up_s)
        self._update_s = share * self._workload.update_s

    def update_ends(self, share: float = 1.0) -> None:
        """See ``EmulatedCompute``."""
        self._wait(self._factor * share * self._workload.update_s)
        self._update_s = 0.0

    def resumes_at(self, arrived_s: float) -> None:
        """See ``EmulatedCompute``."""
        self._end_s = max(self._end_s, arrived_s)

    def _begin(self, step: int, overhead_s: float) -> float:
        """Return this step's factor, and begin its first micro-batch after the update and the step's overhead.

        A step that begins by more than its own length too late follows something else than the step before it.
        """
        if step == self._step:
            return self._factor
        self._step, self.lateness_s = step, []
        self._factor = step_factor(self._workload, self._seed, self._rank, step)
        self._end_s += self._factor * (self._update_s + overhead_s)
        self._update_s = 0.0
        begin_s = self._clock.now()
        if begin_s - self._end_s > self._length_s:
            self._end_s = begin_s + self._factor * overhead_s
        return self._factor

    @property
    def _length_s(self) -> float:
        """About how long a step computes, at the largest local batch that was profiled."""
        return float(sum(layer.forward_s[-1] + layer.backward_s[-1] for layer in self._workload.layers))

    def _wait(self, seconds: float) -> None:
        """Sleep until ``seconds`` after the moment before."""
        self._end_s += seconds
        clock = self._clock
        if self._end_s - clock.now() > SLEEP_LEAD_S:
            clock.sleep_until(self._end_s - SLEEP_LEAD_S)
        while (late_s := clock.now() - self._end_s) < 0:
            clock.sleep_until(self._end_s)
        self.lateness_s.append(late_s)


def step_factor(workload: Workload, seed: int, rank: int, step: int) -> float:
    """Draw a rank's step time as a multiple of the median; the same in every run of this seed.

    With the workload's ``step_correlation`` rho it is the quantile Phi(sqrt(rho) z + sqrt(1 - rho) e) of the spread,
    with a normal z that all ranks draw alike and an e of each (``dpsim.model.slowest``).
    """
    own = _uniform("emulated step", seed, rank * _MOST_STEPS + step % _MOST_STEPS)
    if correlation := workload.step_correlation:
        common = _uniform("emulated step of all ranks", seed, step % _MOST_STEPS)
        z, e = _NORMAL.inv_cdf(common), _NORMAL.inv_cdf(own)
        own = _NORMAL.cdf(math.sqrt(correlation) * z + math.sqrt(1 - correlation) * e)
    return workload.spread_at(own)


def _uniform(purpose: str, seed: int, stream: int) -> float:
    return (int(random_words(purpose, seed, 1, stream=stream)[0]) + 0.5) / 2**32


class WorkloadReplica:
    """A replica with the layers of ``workload``, for an ``EmulatedReplica``, which waits for as long as they compute.

    Raises ``ConfigError`` for tensors that are not of float32.
    """

    def __init__(self, workload: Workload) -> None:
        check_tensors(workload)
        self.layers = tuple(
            LayerSpec(
                name=layer.name,
                kind=layer.kind,
                tensors=layer.tensors,
                activation_bytes_per_sample=layer.activation_bytes_per_sample,
                batch_norm_channels=layer.batch_norm_channels,
                depends_on=layer.depends_on,
                output_bytes_per_sample=layer.output_bytes_per_sample,
                column_block=layer.column_block,
            )
            for layer in workload.layers
        )

    def initial_parameters(self, seed: int) -> dict[str, Array]:
        """Return parameters that are all the same: nothing is learnt from them."""
        tensors = [tensor for layer in self.layers for tensor in layer.tensors]
        return {tensor.name: np.full(tensor.shape, _PARAMETER, np.float32) for tensor in tensors}

    def bind(self, parameters: Mapping[str, Array], gradients: Mapping[str, Array]) -> None:
        """Do nothing: nothing reads the arrays."""

    def state(self) -> dict[str, Array]:
        return {}

    def forward_backward(self, batch: Batch, events: StepEvents) -> BatchSums:
        raise NotImplementedError("a workload says how long its layers compute, not what")

    def evaluate(self, x: Array, labels: NDArray[np.int64]) -> BatchSums:
        raise NotImplementedError("a workload says how long its layers compute, not what")


def check_tensors(workload: Workload) -> None:
    """Raise ``ConfigError`` unless all gradients are of float32, in which dpsim's runtime trains."""
    others = sorted({tensor.dtype for layer in workload.layers for tensor in layer.tensors} - {"float32"})
    if others:
        raise ConfigError(
            f"dpsim's own runtime with gradients of {', '.join(others)}",
            allowed="float32",
            remedy="measure this script with --set runtime=torch-ddp alone",
        )
