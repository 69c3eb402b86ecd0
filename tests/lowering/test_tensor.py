"""Tensor parallelism, alone and in the stages of a pipeline: who computes which block, and what is added up where."""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowering_cases import finished_before

from dpsim.collective import Layout
from dpsim.errors import ConfigError
from dpsim.lowering import lower
from dpsim.machine import Link, Machine
from dpsim.model.prices import FREE_NETWORK
from dpsim.model.step import price, scheduled
from dpsim.plan import Plan
from dpsim.schedule import (
    ALLREDUCE_EVENT,
    BACKWARD_EVENT,
    FORWARD_EVENT,
    RECOMPUTE_EVENT,
    REDUCE_SCATTER_EVENT,
    SYNCHRONISE_EVENT,
    UPDATE_EVENT,
    Schedule,
)
from dpsim.strategy import own_blocks
from dpsim.workload import Layer, Tensor, Workload


def workload(pairs: int = 2, blocks: int = 4, *, first: bool = True) -> Workload:
    """Pairs of layers, each block of which takes 1 s forward and 2 s backward; whole layers take 0.5 s and 1 s.

    Without ``first`` no whole layer stands before the first pair.
    """

    def layer(name: str, seconds: float, block: int = -1, reads: tuple[str, ...] | None = None) -> Layer:
        return Layer(
            name=name,
            forward_s=(seconds,),
            backward_s=(2 * seconds,),
            tensors=(Tensor(name=f"{name}.weight", shape=(64 if block < 0 else 16,)),),
            depends_on=reads,
            output_bytes_per_sample=8.0,
            column_block=block,
        )

    layers = [layer("first", 0.5)] if first else []
    for pair in range(pairs):
        before = (layers[-1].name,) if layers else ()
        for block in range(blocks):
            layers += [layer(f"a{pair}.{block}", 1.0, block, before), layer(f"b{pair}.{block}", 1.0, block)]
        layers.append(layer(f"sum{pair}", 0.5, reads=tuple(f"b{pair}.{block}" for block in range(blocks))))
    return Workload(name="pairs", local_batches=(1,), layers=(*layers, layer("last", 0.5)))


def plan(strategy: str, devices: int, **changes: Any) -> Plan:
    fields: dict[str, Any] = {"algorithm": "ring", "fusion_threshold_bytes": 0.0, "global_batch": 4 * devices}
    return Plan(devices=devices, strategy=strategy, **fields | changes)


STRATEGIES = ("tensor", "tensor:parts=4", "tensor:shard=yes", "pipeline:parts=2", "pipeline:parts=2,recompute=yes")


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(STRATEGIES), st.integers(4, 6), st.sampled_from([1, 2, 4]), st.booleans(), st.sampled_from([4, 8])
)
def test_every_class_computes_whole_layers_and_its_own_blocks(
    strategy: str, blocks: int, accumulate: int, first: bool, devices: int
) -> None:
    of, asked = workload(3, blocks, first=first), plan(strategy, devices, accumulate=accumulate)
    schedule = lower(of, asked)
    finished_before(schedule)  # dependencies point backwards
    parts, stages = asked.parallelism.parts, asked.parallelism.stages
    computed = [{*layers_of(schedule, each, FORWARD_EVENT)} for each in range(schedule.classes)]
    for stage in range(stages):
        of_stage = computed[stage * parts : (stage + 1) * parts]
        whole = {layer for layer in set().union(*of_stage) if of.layers[layer].column_block < 0}
        for part, own in enumerate(of_stage):
            assert whole <= own
            assert {of.layers[layer].column_block for layer in own - whole} <= {*own_blocks(blocks, part, parts)}
        assert sum(len(own) - len(whole) for own in of_stage) == len(set().union(*of_stage) - whole)
    assert set().union(*computed) == {*range(len(of.layers))}
    for each in range(schedule.classes):
        assert {*layers_of(schedule, each, BACKWARD_EVENT)} == computed[each]
        again = {*layers_of(schedule, each, RECOMPUTE_EVENT)}
        assert again == (computed[each] if "recompute" in strategy and each < parts else set())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sums_of_a_layer_are_one_meeting_of_the_parts_of_its_stage(strategy: str) -> None:
    asked = plan(strategy, 4, accumulate=2)
    of = workload(2)
    schedule = lower(of, asked)
    samples, parts = asked.local_batch, asked.parallelism.parts
    rows = np.flatnonzero(schedule.meeting >= 0)
    assert (schedule.kind[rows] == SYNCHRONISE_EVENT).all()
    meetings = {
        number: [*map(int, rows[schedule.meeting[rows] == number])] for number in schedule.meeting[rows].tolist()
    }
    joins = [rows for rows in meetings.values() if schedule.layer[rows[0]] >= 0]
    (agreement,) = (rows for rows in meetings.values() if schedule.layer[rows[0]] < 0)
    assert sorted(schedule.rank_class[agreement].tolist()) == [*range(schedule.classes)]
    recomputed = 1 if "recompute" in strategy else 0  # the pair of the first stage
    assert len(joins) == 2 * (2 + 2 + recomputed), "two pairs, forward and backward, in two micro-batches"
    for rows_of_join in joins:
        classes = schedule.rank_class[rows_of_join].tolist()
        assert len(classes) == parts and {each // parts for each in classes} == {classes[0] // parts}
        assert {*schedule.size_bytes[rows_of_join].tolist()} == {8 * samples}


def test_gradients_of_samples_are_not_added_up() -> None:
    """The first pair has no trained layer before it: of its input nobody needs a gradient."""
    for first, sums in ((True, 2 * 2), (False, 2 * 2 - 1)):
        schedule = lower(workload(2, first=first), plan("tensor", 2))
        of_class = (schedule.rank_class == 1) & (schedule.layer >= 0)
        assert np.count_nonzero(of_class & (schedule.kind == SYNCHRONISE_EVENT)) == sums


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("devices", [4, 8])
def test_buckets_of_blocks_are_of_one_class_and_of_whole_layers_of_all_parts(strategy: str, devices: int) -> None:
    asked = plan(strategy, devices)
    of = workload(2)
    schedule = lower(of, asked)
    names = [tensor.name for tensor in of.tensors]
    assert sorted(itertools.chain(*map(schedule.bucket_tensors, range(schedule.buckets)))) == sorted(names)
    sizes = {tensor.name: tensor.size_bytes for tensor in of.tensors}
    blocks = {f"{layer.name}.weight": layer.column_block for layer in of.layers}
    for bucket in range(schedule.buckets):
        tensors = schedule.bucket_tensors(bucket)
        assert schedule.bucket_size_bytes[bucket] == sum(map(sizes.__getitem__, tensors))
        owners = [each for each in range(schedule.classes) if bucket in schedule.buckets_of(each)]
        whole = {blocks[name] < 0 for name in tensors}
        assert len(whole) == 1 and len(owners) == (asked.parallelism.parts if whole.pop() else 1)
    kind = REDUCE_SCATTER_EVENT if asked.parallelism.sharded else ALLREDUCE_EVENT
    for each in range(schedule.classes):
        own = (schedule.rank_class == each) & (schedule.kind == kind)
        sent = schedule.bucket[own].tolist()
        assert sorted(sent) == (schedule.buckets_of(each) if asked.data_devices > 1 else [])
        assert np.count_nonzero((schedule.rank_class == each) & (schedule.kind == UPDATE_EVENT)) == 1


def test_one_part_is_data_parallelism() -> None:
    of = workload(2)
    for sharded, name in (("", "data-parallel"), (",shard=yes", "zero1")):
        one, plain = lower(of, plan(f"tensor:parts=1{sharded}", 4)), lower(of, plan(name, 4))
        for field in ("kind", "layer", "bucket", "size_bytes", "depends_on", "meeting", "bucket_class"):
            assert np.array_equal(getattr(one, field), getattr(plain, field)), field


@pytest.mark.parametrize("strategy", ["pipeline", "pipeline:recompute=yes", "pipeline:shard=yes"])
def test_stages_of_one_part_own_all_blocks_and_add_up_none(strategy: str) -> None:
    schedule = lower(workload(), plan(strategy, 4))
    assert not ((schedule.kind == SYNCHRONISE_EVENT) & (schedule.layer >= 0)).any()
    whole = lower(workload(), plan(strategy, 4, fusion_threshold_bytes=math.inf))
    assert len(whole.bucket_size_bytes) == 2, "one bucket a stage, of blocks and whole layers alike"


def test_too_few_blocks_and_unknown_outputs_are_refused() -> None:
    with pytest.raises(ConfigError, match="no column blocks"):
        lower(workload(0), plan("tensor", 2))
    with pytest.raises(ConfigError, match="2 column blocks"):
        lower(workload(2, 2), plan("tensor:parts=4", 4))
    with pytest.raises(ConfigError, match="parts=0"):
        plan("tensor:parts=0", 2)
    with pytest.raises(ConfigError, match="do not fill"):
        plan("pipeline:parts=2", 6)
    with pytest.raises(ConfigError, match="uneven part of the nodes"):
        plan("tensor:parts=2", 6, layout="2x3")


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_ranks_and_places_of_classes_are_each_other_s_inverse(stages: int, parts: int, data: int) -> None:
    asked = plan(f"pipeline:stages={stages},parts={parts}", stages * parts * data)
    seen = set()
    for rank in range(asked.devices):
        own, place = asked.class_of(rank), asked.place_of(rank)
        assert asked.rank_of(own, place) == rank and place < data and own < stages * parts
        assert own // parts == rank // (data * parts), "stages are neighbours"
        assert own % parts == rank % parts, "parts of a stage are next to each other"
        seen.add((own, place))
    assert len(seen) == asked.devices


@pytest.mark.parametrize(
    ("layout", "apart", "expected"),
    [("2x4", 2, "2x2"), ("2x4", 4, "2x1"), ("2x4", 8, "1x1"), ("", 2, ""), ("4x2", 4, "2x1")],
)
def test_devices_that_stand_apart_are_in_more_nodes(layout: str, apart: int, expected: str) -> None:
    assert Layout(layout).spread(apart) == expected


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_on_a_free_network_blocks_divide_the_time_of_cut_layers(parts: int) -> None:
    of = workload(2, 4)
    known = Machine(name="m", link=Link(latency_s=0.0, bandwidth_bytes_per_s=1e30))
    asked = plan(f"tensor:parts={parts}", parts, global_batch=1)
    step = price(scheduled(of, known, asked), known)
    assert step.step_s == pytest.approx(3 * (4 * 0.5 + 2 * 4 * 2 / parts))


@pytest.mark.parametrize(
    ("parts", "algorithm", "joins"),
    [(2, "ring", "ring"), (4, "ring", "direct"), (4, "mpi", "direct"), (4, "auto", "auto"), (4, "nccl", "nccl")],
)
def test_more_than_two_parts_join_by_the_direct_exchange_of_messages(parts: int, algorithm: str, joins: str) -> None:
    of = plan(f"tensor:parts={parts}", 8, algorithm=algorithm)
    assert of.joining.algorithm == joins and of.collective.algorithm == algorithm


def test_a_sum_costs_what_the_allreduce_of_the_parts_does() -> None:
    """Ring on two devices: two messages of half the bytes each, for each sum; the agreement is 8 bytes more."""
    of, latency_s = workload(2, 2), 0.25
    known = Machine(name="m", link=Link(latency_s=latency_s, bandwidth_bytes_per_s=1e30))
    free = Machine(name="m", link=Link(latency_s=0.0, bandwidth_bytes_per_s=1e30))
    asked = plan("tensor", 2, global_batch=1)
    added = price(scheduled(of, known, asked), known).step_s - price(scheduled(of, free, asked), free).step_s
    assert added == pytest.approx((2 + 2 + 1) * 2 * latency_s)


def layers_of(schedule: Schedule, rank_class: int, kind: int) -> list[int]:
    layers: list[int] = schedule.layer[(schedule.rank_class == rank_class) & (schedule.kind == kind)].tolist()
    return layers


@pytest.mark.parametrize(("strategy", "joins"), [("tensor", 4), ("zero1", 0)])
def test_how_late_ranks_wake_delays_each_sum_over_the_parts_of_a_stage_and_no_queue(strategy: str, joins: int) -> None:
    known = Machine(name="link", link=Link(latency_s=1e-5, bandwidth_bytes_per_s=1e9))
    late = msgspec.structs.replace(known, wake_s=1e-3)
    prompt_s, late_s = (price(scheduled(workload(), on, plan(strategy, 2)), on).step_s for on in (known, late))
    assert late_s - prompt_s == pytest.approx(joins * 1e-3)
    schedule = scheduled(workload(), late, plan(strategy, 2))
    free, free_and_late = (price(schedule, on, FREE_NETWORK).step_s for on in (known, late))
    assert free == free_and_late  # it is part of what a collective costs
