"""Random workloads whose layers form a graph, and what follows from the dependencies of a Schedule."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from hypothesis import strategies as st

from dpsim.schedule import (
    BACKWARD_EVENT,
    COMPUTE_LANE,
    FORWARD_EVENT,
    LOSS_EVENT,
    OVERHEAD_EVENT,
    RECEIVE_EVENT,
    RECOMPUTE_EVENT,
    SYNCHRONISE_EVENT,
    UPDATE_EVENT,
    Schedule,
)
from dpsim.workload import Layer, Tensor, Workload

LAYER_KINDS = (FORWARD_EVENT, RECOMPUTE_EVENT, BACKWARD_EVENT)


@st.composite
def graphs(draw: st.DrawFn, least_layers: int = 1, most_tensors: int = 3) -> Workload:
    """Chains of layers with now and then a layer that reads others too, or the samples."""
    layers = []
    for index in range(draw(st.integers(least_layers, 9))):
        reads: tuple[str, ...] | None = None
        if index and draw(st.integers(0, 4)) == 0:
            sources = draw(st.sets(st.integers(0, index - 1), max_size=2))
            reads = tuple(f"layer{source}" for source in sorted(sources))
        tensors = tuple(
            Tensor(name=f"t{index}.{each}", shape=(draw(st.integers(0, 5000)),))
            for each in range(draw(st.integers(0, most_tensors)))
        )
        layers.append(
            Layer(
                name=f"layer{index}",
                forward_s=(draw(st.sampled_from([0.0, 1.0, 2.0, 5.0])),),
                backward_s=(draw(st.sampled_from([0.0, 1.0, 3.0])),),
                tensors=tensors,
                depends_on=reads,
                activation_bytes_per_sample=float(draw(st.integers(0, 1000))),
                output_bytes_per_sample=float(draw(st.integers(1, 1000))),
                batch_norm_channels=draw(st.sampled_from([0, 3])) if tensors else 0,
            )
        )
    return Workload(name="graph", local_batches=(8,), layers=tuple(layers))


def chain(layers: int, forward_s: float = 1.0, backward_s: float = 2.0) -> Workload:
    """Layers of one tensor each, which take the same time and hand on 4 bytes a sample."""
    return Workload(
        name="chain",
        local_batches=(1,),
        layers=tuple(
            Layer(
                name=f"layer{index}",
                forward_s=(forward_s,),
                backward_s=(backward_s,),
                tensors=(Tensor(name=f"t{index}", shape=(10,)),),
                output_bytes_per_sample=4.0,
            )
            for index in range(layers)
        ),
    )


def computes(schedule: Schedule, operation: int) -> bool:
    """Whether the computing thread comes to an operation: all but the collectives of buckets."""
    kind = schedule.kind[operation]
    return bool(schedule.lane[operation] == COMPUTE_LANE or kind in (RECEIVE_EVENT, SYNCHRONISE_EVENT))


def finished_before(schedule: Schedule) -> list[int]:
    """For each operation the set of those that have ended when it begins, as bits of a number.

    By dependencies and by the order of the computing thread of each class alone. Asserts that both point backwards.
    """
    before: list[int] = []
    last: dict[int, int] = {}
    for operation in range(len(schedule.kind)):
        earlier = schedule.dependencies(operation).tolist()
        assert all(0 <= each < operation for each in earlier) and len({*earlier}) == len(earlier)
        rank_class = int(schedule.rank_class[operation])
        if computes(schedule, operation):
            earlier += [last[rank_class]] if rank_class in last else []
            last[rank_class] = operation
        ended = 0
        for each in earlier:
            ended |= before[each] | 1 << each
        before.append(ended)
    return before


def rows_of(schedule: Schedule) -> Mapping[tuple[int, int, int], int]:
    """The operation of each kind, layer and micro-batch; asserts that there is one only."""
    rows: dict[tuple[int, int, int], int] = {}
    for operation, kind in enumerate(schedule.kind.tolist()):
        if kind in (*LAYER_KINDS, LOSS_EVENT):
            key = kind, int(schedule.layer[operation]), int(schedule.micro_batch[operation])
            assert key not in rows
            rows[key] = operation
    return rows


def stage_layers(schedule: Schedule) -> list[tuple[int, int]]:
    """The first layer that each class computes, and the one after its last."""
    forward = schedule.kind == FORWARD_EVENT
    layers = (schedule.layer[forward & (schedule.rank_class == each)] for each in range(schedule.classes))
    return [(int(own.min()), int(own.max()) + 1) for own in layers]


def check_computation(schedule: Schedule) -> None:
    """Assert that a schedule trains: each layer once a micro-batch, in the class that owns it, behind what it reads."""
    workload, before, rows = schedule.workload, finished_before(schedule), rows_of(schedule)
    index = {layer.name: number for number, layer in enumerate(workload.layers)}
    layers, classes = len(workload.layers), stage_layers(schedule)
    assert [edge for pair in classes for edge in pair][1:-1] == [pair[0] for pair in classes[1:] for _ in range(2)]
    assert (classes[0][0], classes[-1][1]) == (0, layers)
    owner = {layer: each for each, (first, stop) in enumerate(classes) for layer in range(first, stop)}
    for layer, micro_batch in itertools.product(range(layers), range(schedule.plan.accumulate)):
        forward, backward = (rows[kind, layer, micro_batch] for kind in (FORWARD_EVENT, BACKWARD_EVENT))
        assert schedule.rank_class[forward] == schedule.rank_class[backward] == owner[layer]
        reads = workload.layers[layer].depends_on
        sources = [index[name] for name in reads] if reads is not None else [layer - 1] if layer else []
        for source in sources:
            assert before[forward] >> rows[FORWARD_EVENT, source, micro_batch] & 1
            assert before[rows[BACKWARD_EVENT, source, micro_batch]] >> backward & 1
        loss = rows[LOSS_EVENT, -1, micro_batch]
        assert before[loss] >> forward & 1 and before[backward] >> loss & 1
    kinds = schedule.kind.tolist()
    assert kinds.count(LOSS_EVENT) == schedule.plan.accumulate
    for each in range(schedule.classes):
        own = [kinds[row] for row in range(len(kinds)) if schedule.rank_class[row] == each]
        assert own.count(OVERHEAD_EVENT) == own.count(UPDATE_EVENT) == 1 and own[0] == OVERHEAD_EVENT


def check_sums(schedule: Schedule) -> None:
    """Assert that every bucket is summed once over its class, behind its last gradients and ahead of the update."""
    before, rows = finished_before(schedule), rows_of(schedule)
    layer_of = {
        tensor.name: number for number, layer in enumerate(schedule.workload.layers) for tensor in layer.tensors
    }
    collectives = schedule.gradient_collectives.tolist()
    assert sorted(schedule.bucket[collectives]) == [*range(schedule.buckets)] * (schedule.plan.data_devices > 1)
    updates = {int(schedule.rank_class[row]): row for row in (schedule.kind == UPDATE_EVENT).nonzero()[0]}
    for collective in collectives:
        bucket, rank_class = int(schedule.bucket[collective]), int(schedule.rank_class[collective])
        assert rank_class == schedule.bucket_class[bucket]
        assert schedule.size_bytes[collective] == schedule.bucket_size_bytes[bucket]
        for name in schedule.bucket_tensors(bucket):
            backward = rows[BACKWARD_EVENT, layer_of[name], schedule.plan.accumulate - 1]
            assert schedule.rank_class[backward] == rank_class and backward in schedule.dependencies(collective)
        assert before[updates[rank_class]] >> collective & 1
    assert sorted(schedule.tensor_order) == list(range(len(schedule.workload.tensors)))
