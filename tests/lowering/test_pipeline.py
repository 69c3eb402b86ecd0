"""Pipelines: order, messages, what is in flight, and the length of the bubble."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lowering_cases import (
    chain,
    check_computation,
    check_sums,
    computes,
    finished_before,
    graphs,
    rows_of,
    stage_layers,
)
from msgspec.structs import replace

from dpsim.errors import ConfigError
from dpsim.lowering import lower
from dpsim.lowering.stages import possible_cuts
from dpsim.optimizer import Lars
from dpsim.plan import Plan
from dpsim.schedule import (
    ALL_GATHER_EVENT,
    BACKWARD_EVENT,
    FORWARD_EVENT,
    RECEIVE_EVENT,
    RECOMPUTE_EVENT,
    SEND_EVENT,
    SYNCHRONISE_EVENT,
    UPDATE_EVENT,
    Schedule,
)
from dpsim.workload import Workload

QUICK = settings(max_examples=60, deadline=None)
ORDERS = st.sampled_from(["1f1b", "gpipe"])


def plan(
    stages: int, accumulate: int, settings: str = "", data_devices: int = 1, samples: int = 3, **fields: object
) -> Plan:
    return Plan(
        devices=stages * data_devices,
        accumulate=accumulate,
        global_batch=data_devices * accumulate * samples,
        strategy=f"pipeline:stages={stages}{settings}",
        **fields,  # type: ignore[arg-type]
    )


@st.composite
def pipelines(draw: st.DrawFn) -> Schedule:
    workload = draw(graphs(least_layers=2))
    edges = (0, *possible_cuts(workload), len(workload.layers))
    pieces = sum(any(layer.tensors for layer in workload.layers[a:b]) for a, b in itertools.pairwise(edges))
    assume(pieces > 1)
    settings = f",order={draw(ORDERS)}"
    settings += ",recompute=yes" * draw(st.booleans()) + ",shard=yes" * draw(st.booleans())
    fields = {"fusion_threshold_bytes": draw(st.sampled_from([0.0, 5e3, float("inf")]))}
    return lower(
        workload,
        plan(draw(st.integers(2, pieces)), draw(st.integers(1, 5)), settings, draw(st.integers(1, 3)), **fields),
    )


@QUICK
@given(pipelines())
def test_every_stage_computes_its_layers_once_a_micro_batch_and_sums_its_own_buckets(schedule: Schedule) -> None:
    check_computation(schedule)
    check_sums(schedule)
    strategy, before, rows = schedule.plan.parallelism, finished_before(schedule), rows_of(schedule)
    of_last = stage_layers(schedule)[-1][0]
    again = {(layer, number) for kind, layer, number in rows if kind == RECOMPUTE_EVENT}
    expected = set(itertools.product(range(of_last), range(schedule.plan.accumulate)))
    assert again == (expected if strategy.recompute else set())  # type: ignore[attr-defined]
    for layer, number in again:
        recompute = rows[RECOMPUTE_EVENT, layer, number]
        assert before[recompute] >> rows[FORWARD_EVENT, layer, number] & 1
        assert before[rows[BACKWARD_EVENT, layer, number]] >> recompute & 1
    assert schedule.sharded == (strategy.sharded and schedule.plan.data_devices > 1)
    gathers = schedule.parameter_collectives.tolist()
    assert sorted(schedule.bucket[gathers]) == [*range(schedule.buckets)] * schedule.sharded
    for gather in gathers:
        (update,) = schedule.dependencies(gather)
        assert schedule.kind[update] == UPDATE_EVENT and schedule.rank_class[update] == schedule.rank_class[gather]
        assert schedule.rank_class[gather] == schedule.bucket_class[schedule.bucket[gather]]


@QUICK
@given(pipelines())
def test_messages_are_received_in_the_order_in_which_they_are_sent(schedule: Schedule) -> None:
    sends, receives = (np.flatnonzero(schedule.kind == kind).tolist() for kind in (SEND_EVENT, RECEIVE_EVENT))
    assert len(sends) == 2 * (schedule.classes - 1) * schedule.plan.accumulate
    assert sorted(schedule.peer[sends]) == receives and sorted(schedule.peer[receives]) == sends
    assert sorted(np.flatnonzero(schedule.peer >= 0)) == sorted(sends + receives)
    channels = defaultdict[tuple[int, int], list[tuple[int, int]]](list)
    for send in sends:
        receive = int(schedule.peer[send])
        assert schedule.peer[receive] == send and send in schedule.dependencies(receive)
        ends = int(schedule.rank_class[send]), int(schedule.rank_class[receive])
        assert abs(ends[0] - ends[1]) == 1
        first_of_later = stage_layers(schedule)[max(ends)][0]
        layer = schedule.workload.layers[first_of_later - 1]
        for each in (send, receive):
            assert schedule.size_bytes[each] == 3 * layer.output_bytes_per_sample
            assert schedule.layer[each] == first_of_later - 1
        assert schedule.micro_batch[send] == schedule.micro_batch[receive]
        channels[ends].append((send, receive))
    for pairs in channels.values():
        assert [receive for _, receive in pairs] == sorted(receive for _, receive in pairs)


@QUICK
@given(pipelines())
def test_all_classes_agree_once_behind_all_gradients_and_ahead_of_every_update(schedule: Schedule) -> None:
    before = finished_before(schedule)
    for rank_class in range(schedule.classes):
        own = schedule.rank_class == rank_class
        (agreement,) = np.flatnonzero(own & (schedule.meeting >= 0))
        (update,) = np.flatnonzero(own & (schedule.kind == UPDATE_EVENT))
        assert schedule.kind[agreement] == SYNCHRONISE_EVENT and schedule.size_bytes[agreement] == 8
        assert before[update] >> int(agreement) & 1
        for operation in np.flatnonzero(own & ~(schedule.meeting >= 0)):
            if schedule.kind[operation] not in (UPDATE_EVENT, ALL_GATHER_EVENT):
                assert before[agreement] >> int(operation) & 1


@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (2, 4), (3, 2), (4, 8), (5, 3)])
def test_the_bubble_is_that_of_p_stages_and_m_micro_batches(order: str, stages: int, micro_batches: int) -> None:
    schedule = lower(chain(stages, 1.0, 2.0), plan(stages, micro_batches, f",order={order}"))
    lengths = {FORWARD_EVENT: 1.0, BACKWARD_EVENT: 2.0}
    ends, free = np.zeros(len(schedule.kind)), np.zeros(stages)
    for operation, kind in enumerate(schedule.kind.tolist()):
        begin = max(ends[schedule.dependencies(operation)], default=0.0)
        if computes(schedule, operation):
            begin = max(begin, free[schedule.rank_class[operation]])
            free[schedule.rank_class[operation]] = begin + lengths.get(kind, 0.0)
        ends[operation] = begin + lengths.get(kind, 0.0)
    assert ends.max() == (micro_batches + stages - 1) * 3.0


@QUICK
@given(ORDERS, st.integers(2, 6), st.integers(1, 9))
def test_no_stage_has_more_micro_batches_in_flight_than_it_keeps(order: str, stages: int, micro_batches: int) -> None:
    schedule = lower(chain(stages), plan(stages, micro_batches, f",order={order}"))
    for stage in range(stages):
        own = schedule.kind[schedule.rank_class == stage]
        in_flight = np.cumsum((own == FORWARD_EVENT).astype(int) - (own == BACKWARD_EVENT))
        most = min(micro_batches, stages - stage) if order == "1f1b" else micro_batches
        assert in_flight.max() == schedule.stashes[stage] == most


@QUICK
@given(graphs(), st.integers(1, 3), st.booleans())
def test_one_stage_is_data_parallelism_or_zero1(workload: Workload, devices: int, shard: bool) -> None:
    one = lower(workload, plan(1, 2, ",shard=yes" * shard, devices))
    other = lower(workload, replace(one.plan, strategy="zero1" if shard else "data-parallel"))
    for name in ("kind", "layer", "bucket", "size_bytes", "depends_start", "depends_on", "bucket_start"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert one.sharded == other.sharded and one.classes == 1


def test_recomputation_runs_while_the_gradient_travels() -> None:
    schedule = lower(chain(2), plan(2, 1, ",recompute=yes"))
    own = schedule.kind[schedule.rank_class == 0].tolist()
    assert own[3:6] == [RECOMPUTE_EVENT, RECEIVE_EVENT, BACKWARD_EVENT]


def test_norms_of_a_stage_are_summed_over_its_own_devices() -> None:
    norm = replace(chain(4).layers[0], batch_norm_channels=3)
    workload = replace(chain(4), layers=(norm, *chain(4).layers[1:]))
    fields = {"leaves": 8, "batch_norm": "leaf"}
    schedule = lower(workload, plan(2, 2, data_devices=2, **fields))
    (statistics,) = np.flatnonzero((schedule.kind == SYNCHRONISE_EVENT) & ~(schedule.meeting >= 0))
    assert schedule.rank_class[statistics] == 0 and schedule.size_bytes[statistics] == 8 * (1 + 2 * 3)
    alone = lower(workload, plan(2, 2, **fields))
    assert (alone.meeting >= 0)[alone.kind == SYNCHRONISE_EVENT].all()


def test_shards_of_lars_agree_on_norms_too() -> None:
    workload = chain(2)
    sharded = plan(2, 2, ",shard=yes", data_devices=2, optimizer=Lars())
    zero1 = lower(workload, Plan(devices=2, global_batch=12, strategy="zero1", optimizer=Lars()))
    schedule = lower(workload, sharded)
    of_zero1 = zero1.size_bytes[zero1.kind == SYNCHRONISE_EVENT]
    assert {*schedule.size_bytes[schedule.meeting >= 0]} == {*of_zero1}
    whole = lower(workload, plan(2, 2, data_devices=2, optimizer=Lars()))
    assert {*whole.size_bytes[whole.meeting >= 0]} == {8}


def test_costs_of_a_rule_are_asked_for_where_there_is_something_to_send() -> None:
    assert lower(chain(4), plan(2, 1, fusion_rule="mg-wfbp")).buckets == 2
    several = plan(2, 1, data_devices=2, fusion_rule="mg-wfbp")
    assert lower(chain(4), several, alpha_s=10.0, beta_s_per_byte=0.0).buckets == 2
    assert lower(chain(4), several, alpha_s=0.0, beta_s_per_byte=0.0).buckets == 4
    with pytest.raises(ConfigError, match="alpha_beta"):
        lower(chain(4), several)


def test_a_workload_that_does_not_say_what_layers_hand_on_is_refused() -> None:
    layers = tuple(replace(layer, output_bytes_per_sample=0.0) for layer in chain(4).layers)
    with pytest.raises(ConfigError, match="layer 'layer1' hands on") as refused:
        lower(replace(chain(4), layers=layers), plan(2, 2))
    assert "output_bytes_per_sample" in str(refused.value) and "dpsim profile" in str(refused.value)
