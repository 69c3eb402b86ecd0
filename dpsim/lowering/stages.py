"""Where a pipeline cuts the layers of a workload into stages, so that the largest stage is as small as possible."""

from __future__ import annotations

import math
from typing import cast

import numpy as np
from numpy.typing import NDArray

from dpsim.errors import ConfigError
from dpsim.lowering.computation import inputs_of, readers_of
from dpsim.memo import remember
from dpsim.plan import Plan
from dpsim.strategy import Pipeline
from dpsim.workload import Workload

_MOST_STAGES = 127  # ``Schedule.rank_class`` has one byte

Floats = NDArray[np.float64]


@remember
def possible_cuts(workload: Workload) -> tuple[int, ...]:
    """Return the layers that may begin a stage, ascending: only the output of the layer before crosses there.

    Nothing from there on reads any other layer before it. A layer that reads no layer reads the samples, which only the
    first stage has; the loss reads all layers that no layer reads. A column block hands on a part of a sum alone.
    """
    layers = len(workload.layers)
    edges = [(source, number) for number, sources in enumerate(inputs_of(workload)) for source in sources or [-1]]
    edges += [(number, layers) for number, readers in enumerate(readers_of(workload)) if not readers]
    blocked = np.zeros(layers + 2, np.int64)  # an edge (a, b) blocks the cuts a + 2, ..., b
    for source, number in edges:
        if number >= source + 2:
            blocked[source + 2] += 1
            blocked[number + 1] -= 1
    cuts = (np.flatnonzero(np.cumsum(blocked)[1:layers] == 0) + 1).tolist()
    return tuple(cut for cut in cuts if workload.layers[cut - 1].column_block < 0)


@remember
def stage_bounds(workload: Workload, plan: Plan) -> tuple[int, ...]:
    """Return the layers that the stages of a pipeline begin with, and the number of layers: p + 1 numbers for p stages.

    With ``balance`` time the largest stage has the least time of forward and backward (and of recomputation), with
    memory the least of ``stage_bytes``; so also where the workload has no times. Among several such divisions it is
    the most even one, which has the least sum of squares. Every stage has at least one tensor. Raises ``ConfigError``
    for more stages than that allows.
    """
    strategy = cast(Pipeline, plan.parallelism)
    edges = np.array([0, *possible_cuts(workload), len(workload.layers)])
    tensors = _until(edges, [len(layer.tensors) for layer in workload.layers])
    most = min(max(int(np.count_nonzero(np.diff(tensors))), 1), _MOST_STAGES)
    if strategy.stages > most:
        raise ConfigError(
            f"strategy {plan.strategy} for workload {workload.name!r} of {len(workload.layers)} layers",
            allowed=f"at most {most} stages for it: each has parameters of its own, and begins where a single value"
            " goes from layer to layer",
            remedy=f"set stages={most} or less",
        )
    times, share = workload.times(plan.local_batch), _share(workload, plan)
    timed = strategy.balance == "time" and bool(np.any(times.forward_s + times.backward_s))
    costs = []
    for stage in range(strategy.stages):
        if timed:
            again = strategy.recompute and stage + 1 < strategy.stages
            cost = _between(_until(edges, share * (times.forward_s * (2 if again else 1) + times.backward_s)))
        else:
            cost = stage_bytes(workload, plan, edges, stage)
        costs.append(np.where(_between(tensors) > 0, cost, math.inf))
    return tuple(edges[_most_even(costs)].tolist())


def _share(workload: Workload, plan: Plan) -> Floats:
    """Return the share of each layer that one part of a stage has: column blocks are divided among the parts."""
    cut = np.array([layer.column_block >= 0 for layer in workload.layers])
    return np.where(cut, 1 / plan.parallelism.parts, 1.0)


def stash(plan: Plan, stage: int) -> int:
    """Return a stage's micro-batches with kept activations: with 1f1b the number of stages from it to the end."""
    strategy = cast(Pipeline, plan.parallelism)
    return min(plan.accumulate, strategy.stages - stage) if strategy.order == "1f1b" else plan.accumulate


def stage_bytes(workload: Workload, plan: Plan, edges: NDArray[np.int64], stage: int) -> Floats:
    """Return [i, j]: bytes of layers ``edges[i]`` to ``edges[j] - 1`` as a pipeline's stage, on one device.

    P (2 + slots) + stash b A; P: bytes of parameters, slots: arrays of optimizer state (a shard of each under
    ``shard``), b: samples of a micro-batch, A: activation bytes per sample. With recomputation a stage keeps the
    activations of one micro-batch, and what it is entered with of all of its stash; not the last one.
    """
    strategy = cast(Pipeline, plan.parallelism)
    layers, samples, share = workload.layers, math.ceil(plan.local_batch), _share(workload, plan)
    slots: float = len(plan.optimizer.slots) if workload.optimizer_slots is None else workload.optimizer_slots
    if strategy.shard:
        slots /= plan.data_devices
    sizes = np.array([sum(tensor.size_bytes for tensor in layer.tensors) for layer in layers], np.float64)
    parameters = _between(_until(edges, share * sizes))
    activations = _between(_until(edges, share * [layer.activation_bytes_per_sample for layer in layers]))
    stashed: Floats = stash(plan, stage) * activations
    if strategy.recompute and stage + 1 < strategy.stages:
        entered = np.array([0.0, *(layers[edge - 1].output_bytes_per_sample for edge in edges[1:])])
        stashed = stash(plan, stage) * entered[:, None] + activations
    total: Floats = parameters * (2 + slots) + samples * stashed
    return total


def _until(edges: NDArray[np.int64], values: object) -> Floats:
    """Return the sums of the values before each edge."""
    sums: Floats = np.concatenate([np.zeros(1), np.cumsum(np.asarray(values, np.float64))])[edges]
    return sums


def _between(until: Floats) -> Floats:
    """Return [i, j]: what lies from edge i to edge j."""
    return until[None, :] - until[:, None]


def _most_even(costs: list[Floats]) -> list[int]:
    """Return the edges between stages, the first and the last included, of which the largest cost is least.

    ``costs[s][i, j]`` is what stage s costs from edge i to edge j, infinite where it cannot. By dynamic programming:
    once for the least largest cost, then for the least sum of squares where none is larger.
    """
    largest, _ = _best(costs, np.maximum)
    scale = largest or 1.0
    within = [np.where(cost <= largest, np.square(cost / scale), math.inf) for cost in costs]
    return _best(within, np.add)[1]


def _best(costs: list[Floats], join: np.ufunc) -> tuple[float, list[int]]:
    """Return the least joined cost of all stages, and the edges that have it."""
    points = len(costs[0])
    forward = np.arange(points)[:, None] < np.arange(points)[None, :]
    best = np.where(np.arange(points) == 0, 0.0, math.inf)
    came: list[NDArray[np.int64]] = []
    for cost in costs:
        joined = join(best[:, None], np.where(forward, cost, math.inf))
        came.append(np.argmin(joined, axis=0))
        best = np.min(joined, axis=0)
    edges = [points - 1]
    for source in reversed(came):
        edges.append(int(source[edges[-1]]))
    return float(best[-1]), edges[::-1]
