"""Where a pipeline is cut: only where one value crosses, and as evenly as it can be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowering_cases import chain, graphs
from msgspec.structs import replace

from dpsim.errors import ConfigError
from dpsim.lowering.stages import possible_cuts, stage_bounds, stage_bytes, stash
from dpsim.plan import Plan
from dpsim.workload import Layer, Tensor, Workload

QUICK = settings(max_examples=100, deadline=None)


def plan(stages: int, accumulate: int = 2, settings: str = "") -> Plan:
    strategy = f"pipeline:stages={stages}{settings}"
    return Plan(devices=stages, accumulate=accumulate, global_batch=3 * accumulate, strategy=strategy)


def crossing(workload: Workload, cut: int) -> set[int]:
    """The values that layers from ``cut`` on, and the loss, need of those before: layers, or -1 for the samples."""
    index = {layer.name: number for number, layer in enumerate(workload.layers)}
    reads: list[set[int]] = []
    for number, layer in enumerate(workload.layers):
        names = layer.depends_on
        reads.append({number - 1} if names is None else {index[name] for name in names} or {-1})
    loss = {*range(len(reads))} - set[int]().union(*reads)
    return {value for values in (*reads[cut:], loss) for value in values if value < cut}


def divisions(workload: Workload, stages: int) -> Iterator[tuple[int, ...]]:
    """Every division into stages that have a tensor each."""
    layers = workload.layers
    for cuts in itertools.combinations(possible_cuts(workload), stages - 1):
        bounds = (0, *cuts, len(layers))
        if all(any(layer.tensors for layer in layers[a:b]) for a, b in itertools.pairwise(bounds)):
            yield bounds


def costs(workload: Workload, plan: Plan, bounds: tuple[int, ...], settings: str) -> list[float]:
    """What each stage costs, from its layers alone."""
    found, times = [], workload.times(plan.local_batch)
    for stage, (first, stop) in enumerate(itertools.pairwise(bounds)):
        again = "recompute=yes" in settings and stage + 2 < len(bounds)
        if "balance=memory" in settings:
            layers, kept = workload.layers[first:stop], stash(plan, stage)
            parameters = sum(tensor.size_bytes for layer in layers for tensor in layer.tensors)
            activations = sum(layer.activation_bytes_per_sample for layer in layers)
            entered = workload.layers[first - 1].output_bytes_per_sample if first else 0.0
            samples = math.ceil(plan.local_batch)
            found.append(3 * parameters + samples * (activations + kept * entered if again else kept * activations))
        else:
            found.append(times.forward_s[first:stop].sum() * (1 + again) + times.backward_s[first:stop].sum())
    return found


@QUICK
@given(graphs())
def test_a_stage_begins_where_the_output_of_the_layer_before_is_all_that_crosses(workload: Workload) -> None:
    cuts = [cut for cut in range(1, len(workload.layers)) if crossing(workload, cut) == {cut - 1}]
    assert list(possible_cuts(workload)) == cuts


@QUICK
@given(
    graphs(least_layers=2),
    st.integers(2, 4),
    st.integers(1, 3),
    st.sampled_from(["", ",recompute=yes", ",balance=memory", ",balance=memory,recompute=yes", ",order=gpipe"]),
)
def test_no_other_division_has_a_smaller_largest_stage(
    workload: Workload, stages: int, accumulate: int, settings: str
) -> None:
    of_stages = plan(stages, accumulate, settings)
    all_divisions = list(divisions(workload, stages))
    if not all_divisions:
        with pytest.raises(ConfigError, match="stages for it"):
            stage_bounds(workload, of_stages)
        return
    bounds = stage_bounds(workload, of_stages)
    assert bounds in all_divisions
    if any(layer.forward_s != (0.0,) or layer.backward_s != (0.0,) for layer in workload.layers):
        largest = min(max(costs(workload, of_stages, each, settings)) for each in all_divisions)
        assert max(costs(workload, of_stages, bounds, settings)) == pytest.approx(largest)
        even = [
            each for each in all_divisions if max(costs(workload, of_stages, each, settings)) <= largest * (1 + 1e-9)
        ]
        squares = [sum(cost**2 for cost in costs(workload, of_stages, each, settings)) for each in even]
        assert sum(cost**2 for cost in costs(workload, of_stages, bounds, settings)) == pytest.approx(min(squares))


def test_the_stages_of_equal_layers_are_equal() -> None:
    assert stage_bounds(chain(8), plan(4)) == (0, 2, 4, 6, 8)
    assert stage_bounds(chain(7), plan(2, settings=",recompute=yes")) == (0, 3, 7)


def test_without_times_stages_have_equal_memory() -> None:
    timeless = chain(4, 0.0, 0.0)
    large = replace(timeless.layers[0], tensors=(Tensor(name="large", shape=(1000,)),))
    assert stage_bounds(replace(timeless, layers=(large, *timeless.layers[1:])), plan(2)) == (0, 1, 4)


def test_the_first_stages_of_1f1b_keep_more_and_so_have_less_where_memory_is_balanced() -> None:
    layers = tuple(
        replace(layer, tensors=(Tensor(name=layer.name, shape=(1,)),), activation_bytes_per_sample=100.0)
        for layer in chain(9).layers
    )
    workload = replace(chain(9), layers=layers)
    assert stage_bounds(workload, plan(2, 4, ",balance=memory")) == (0, 3, 9)
    assert stage_bounds(workload, plan(2, 4, ",balance=memory,order=gpipe")) in {(0, 4, 9), (0, 5, 9)}
    kept = stage_bytes(workload, plan(2, 4), np.array([0, 3, 9]), 0)
    assert kept[0, 1] == 3 * (3 * 4) + 2 * 3 * (3 * 100)  # three layers, two micro-batches of three samples


def test_more_stages_than_there_are_pieces_are_refused_with_the_number_of_these() -> None:
    with pytest.raises(ConfigError, match="at most 3 stages for it") as refused:
        stage_bounds(chain(3), plan(5))
    assert "pipeline:stages=5 for workload 'chain' of 3 layers" in str(refused.value)
    assert "set stages=3 or less" in str(refused.value)


def test_a_graph_that_cannot_be_cut_has_one_stage() -> None:
    first, *others = chain(3).layers
    skipping = [
        replace(layer, depends_on=("layer0", *([others[0].name] if n else []))) for n, layer in enumerate(others)
    ]
    tangled = replace(chain(3), layers=(first, *skipping))
    assert possible_cuts(tangled) == (1,)
    samples_again = replace(tangled, layers=(first, skipping[0], replace(skipping[1], depends_on=())))
    assert possible_cuts(samples_again) == ()
    with pytest.raises(ConfigError, match="at most 1 stages"):
        stage_bounds(samples_again, plan(2))


def test_a_residual_connection_is_never_cut() -> None:
    names = ("before", "fork", "body", "swap", "join", "after")
    reads = {"swap": ("before",), "join": ("body", "swap")}
    layers = tuple(
        Layer(name=name, forward_s=(1.0,), backward_s=(1.0,), depends_on=reads.get(name), output_bytes_per_sample=4.0)
        for name in names
    )
    assert possible_cuts(Workload(name="residual", local_batches=(1,), layers=layers)) == (1, 5)


def test_no_stage_begins_behind_a_column_block() -> None:
    layers = [
        Layer(
            name=name, forward_s=(1.0,), backward_s=(1.0,), tensors=(Tensor(name=name, shape=(4,)),), column_block=block
        )
        for name, block in (("first", -1), ("block", 0), ("other", 1), ("sum", -1))
    ]
    assert possible_cuts(Workload(name="chain", local_batches=(1,), layers=tuple(layers))) == (1,)
