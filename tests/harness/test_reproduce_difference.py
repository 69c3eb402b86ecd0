"""Where two trainings differ, by how much and why; what drift is predicted; which combinations are run."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nn_setup import Recorder, batch_for

from dpsim.harness.reproduce.difference import LOSS, StepDump, explained, first_difference, ulps
from dpsim.harness.reproduce.measure import possible
from dpsim.model.drift import local_batches, rounding_drift, statistics_drift
from dpsim.nn import build_model
from dpsim.records.reproduce import Difference, Reproduction, Trajectory, promised
from dpsim.replica import Array, Batch
from dpsim.study.runners.digest import SampleDigests

NAMES = ("state/bn1.running_var", "optimizer/velocity/w", "parameters/w")


def trajectory(steps: list[str], losses: list[float]) -> Trajectory:
    return Trajectory(
        digest="", losses_digest="", losses=tuple(losses), tensors=NAMES, steps=tuple(tuple(step) for step in steps)
    )


@pytest.mark.parametrize(
    ("steps", "losses", "expected"),
    [
        (["abc", "def"], [1.0, 2.0], None),
        (["abc", "deF"], [1.0, 2.0], (2, "parameters/w", 1)),
        (["abc", "Def"], [1.0, 3.0], (2, "state/bn1.running_var", 2)),
        (["abc", "dEF"], [1.0, 3.0], (2, LOSS, 3)),
        (["aBc", "dEF"], [1.0, 3.0], (1, "optimizer/velocity/w", 1)),
        (["abc", "def"], [1.5, 2.0], (1, LOSS, 1)),
    ],
)
def test_the_first_step_and_in_it_the_first_tensor_that_a_step_makes(
    steps: list[str], losses: list[float], expected: tuple[int, str, int] | None
) -> None:
    actual = first_difference(trajectory(["abc", "def"], [1.0, 2.0]), trajectory(steps, losses))
    assert (actual and (actual.step, actual.tensor, actual.tensors_differing)) == expected


@given(st.floats(-(2.0**127), 2.0**127, width=32), st.integers(0, 2000))
def test_ulps_count_the_numbers_between(value: float, steps: int) -> None:
    start = np.array([value], np.float32)
    end = start.copy()
    for _ in range(steps % 50):
        end = np.nextafter(end, np.float32(np.inf))
    assert ulps(start, end)[0] == ulps(end, start)[0] == steps % 50
    assert ulps(np.array([-0.0]), np.array([0.0]))[0] == 0
    assert ulps(np.array([-5e-324]), np.array([5e-324]))[0] == 2


def looked(**changes: Any) -> StepDump:
    """What a file has of a step of two samples: a dense layer, a batch norm, dropout; and their gradients."""
    actual: dict[str, Array] = {
        "state/bn1.running_mean": np.array([0.01, 0.5]),
        "state/bn1.running_var": np.array([0.9, 1.1]),
        "parameters/dense1.weight": np.array([[1.0, 2.0], [3.0, 4.0]]),
    }
    for name in ("input", "forward dense1", "forward bn1", "forward dropout1", "input_gradient bn1"):
        actual[f"samples/{name}"] = np.array([1, 2], np.uint64)
    actual["gradients/dense1.weight"] = np.array([[0.5, 0.25], [0.0, 0.0]])
    return actual | {name: np.array(value, actual[name].dtype) for name, value in changes.items()}


ANY = Difference(step=1, tensor="parameters/dense1.weight", tensors_differing=1, tensors=4)
OTHER = {"parameters/dense1.weight": [[1.0, 2.0], [3.0, 4.0 + 2**-50]]}


@pytest.mark.parametrize(
    ("changes", "cause", "words"),
    [
        ({"gradients/dense1.weight": [[0.5, 0.3], [0, 0]]}, "summation order", "sums of the samples' gradients differ"),
        ({"samples/forward dense1": [1, 3]}, "shape", "the output of dense1, in 1 of 2 samples"),
        ({"samples/input_gradient bn1": [3, 3]}, "summation order", "the backward pass of bn1, in 2 of 2"),
        ({"samples/forward bn1": [5, 3], "state/bn1.running_mean": [0.01, 0.45]}, "batch norm", "of other samples"),
        ({"samples/forward bn1": [5, 3], "state/bn1.running_mean": [0.0100000001, 0.5]}, "summation order", "rounding"),
        ({"state/bn1.running_var": [0.5, 1.1]}, "batch norm", "no layer's output differs"),
        ({"samples/forward dropout1": [5, 2]}, "other", "random numbers"),
        ({"samples/input": [5, 2], "samples/forward dense1": [5, 2]}, "other", "the samples themselves"),
        ({}, "other", "after the update"),
    ],
)
def test_the_cause_is_the_first_thing_that_differs_in_the_order_of_computation(
    changes: dict[str, Any], cause: str, words: str
) -> None:
    actual = explained(ANY, (1.0, 1.0), looked(), looked(**OTHER | changes))
    assert actual.cause == cause and words in actual.evidence
    assert (actual.element, actual.value, actual.reference_value) == ((1, 1), 4.0 + 2**-50, 4.0)
    assert (actual.ulps, actual.elements_differing, actual.elements) == (1, 1, 4)
    assert actual.relative == 2**-52 and actual.max_relative == 2**-52


def test_a_loss_alone_that_differs_was_added_in_another_order() -> None:
    where = Difference(step=1, tensor=LOSS, tensors_differing=1, tensors=4)
    actual = explained(where, (2.0, 2.0 + 2**-51), looked(), looked())
    assert (actual.cause, actual.ulps, actual.element) == ("summation order", 1, ())


def test_what_comes_to_other_bits_when_it_runs_again_is_said_to() -> None:
    actual = explained(ANY, (1.0, 1.0), looked(), looked(**OTHER), repeatable=False)
    assert actual.cause == "other" and "trained again" in actual.evidence and not actual.values_known


def test_a_file_without_what_the_other_has_is_no_known_cause() -> None:
    lacking = {name: value for name, value in looked(**OTHER).items() if name != "samples/forward bn1"}
    assert explained(ANY, (1.0, 1.0), looked(), lacking).cause == "other"


def test_watching_sees_each_sample_of_each_layer_and_changes_nothing() -> None:
    networks = [build_model("cnn:4", (6, 6, 1), 3) for _ in range(2)]
    seen, gradients = SampleDigests(), []
    for number, network in enumerate(networks):
        parameters = network.initial_parameters(1)
        gradients.append({name: np.zeros_like(value) for name, value in parameters.items()})
        network.bind(parameters, gradients[-1])
        if number:
            network.observe(seen.add)
        x, labels = batch_for(network, 5)
        network.forward_backward(Batch(x=x, labels=labels, leaves=(0, 5)), Recorder())
    assert all(np.array_equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
    assert {len(digests) for digests in seen.digests.values()} == {5}
    forward = [f"forward {layer.name}" for layer in networks[0].layers]
    backward = [f"input_gradient {layer.name}" for layer in reversed(networks[0].layers[1:])]
    assert list(seen.digests) == ["input", *forward, *backward]
    assert len(set(seen.digests["input"])) == 5


def test_rounding_drift_grows_as_a_random_walk() -> None:
    asked: dict[str, Any] = {"parameter_rms": 0.1, "unit": 2**-24, "global_batch": 64}
    one = rounding_drift(spacing_updates=1e-11, squared_updates=1e-6, devices=2, **asked)
    four = rounding_drift(spacing_updates=4e-11, squared_updates=4e-6, devices=2, **asked)
    assert four == pytest.approx(2 * one)
    assert rounding_drift(spacing_updates=1e-11, squared_updates=1e-6, devices=1, **asked) == 0
    # (64 + 32 + 1)/2 additions: relative error u sqrt(48.5/3), and d h dominates
    assert one == pytest.approx(math.sqrt(2**-24 * math.sqrt(48.5 / 3) * 1e-11) / 0.1, rel=0.1)


def test_rounding_drift_with_16_bits_is_that_of_two_more_roundings() -> None:
    asked: dict[str, Any] = {"parameter_rms": 0.1, "unit": 2**-24, "global_batch": 64, "devices": 2}
    actual = rounding_drift(spacing_updates=0.0, squared_updates=1e-6, wire_unit=2**-11, **asked)
    assert actual == pytest.approx(2**-11 * math.sqrt(2 / 3) * 1e-3 / 0.1, rel=1e-3)


@settings(max_examples=15)
@given(st.integers(1, 8), st.integers(8, 40))
def test_the_variance_of_local_statistics_is_that_of_drawing_without_replacement(devices: int, batch: int) -> None:
    """Over random orders of the samples, a device's mean varies by sigma^2 (1/b - 1/B) around the batch's."""
    local = local_batches(batch, devices)
    predicted = statistics_drift(local, batch)
    if devices == 1:
        assert predicted == 0
    random = np.random.default_rng(batch)
    values = random.normal(size=batch)
    values /= values.std(ddof=1)
    squares = []
    for _ in range(150):
        shuffled = random.permutation(values)
        parts = np.split(shuffled, np.cumsum(local)[:-1])
        squares.append(np.mean([(part.mean() - values.mean()) ** 2 for part in parts]))
    assert math.sqrt(np.mean(squares)) == pytest.approx(predicted, rel=0.3, abs=1e-12)


def test_one_device_runs_once_a_mode_and_local_has_no_leaves() -> None:
    asked = Reproduction(
        devices=(4, 1, "2x1"),
        fusion_thresholds_bytes=(0.0, math.inf),
        algorithms=("ring", "hierarchical"),
        batch_norms=("leaf", "local"),
        overlaps=("off", "poll"),
    )
    actual = asked.plans()
    assert [one.devices for one in actual if one.batch_norm == "leaf"] == [1, *[2] * 8, *[4] * 4]
    assert {one.algorithm for one in actual if one.devices == 4} == {"ring"}  # no layout, no hierarchy
    assert {(one.batch_norm, one.leaves, promised(one)) for one in actual} == {("leaf", 8, True), ("local", 0, False)}


def test_a_rule_without_a_threshold_trains_once_whatever_thresholds_are_compared() -> None:
    asked = Reproduction(devices=(1, 2), fusion_rule="one", fusion_thresholds_bytes=(0.0, math.inf))
    assert [(one.devices, one.fusion_threshold_bytes) for one in asked.plans()] == [(1, None), (2, None)]


def test_what_cannot_send_16_bits_without_leaves_is_left_out_of_several() -> None:
    asked = Reproduction(
        devices=(2,),
        algorithms=("ring", "two-shot", "mpi"),
        batch_norms=("leaf", "local"),
        wire_dtype="bfloat16",
    )
    actual = {
        mode: {c.algorithm for c in asked.plans() if (c.batch_norm, c.devices) == (mode, 2)}
        for mode in asked.batch_norms
    }
    assert actual == {"leaf": {"ring", "two-shot", "mpi"}, "local": {"two-shot"}}
    assert {one.wire_dtype for one in asked.plans()} == {"bfloat16"}


def test_what_cannot_carry_the_largest_bucket_is_left_out_of_several() -> None:
    asked = Reproduction(
        model="mlp:256",
        devices=(2,),
        fusion_thresholds_bytes=(0.0,),
        algorithms=("one-shot", "two-shot"),
        dataset="synthetic:10x10x1",
    )
    assert [one.algorithm for one in possible(asked) if one.devices == 2] == ["two-shot"]
    of_slots = msgspec.structs.replace(
        asked, model="mlp:100", devices=(2, 3)
    )  # a bucket of 40 KB, 3 devices of 2 slots
    assert {(one.devices, one.algorithm) for one in possible(of_slots) if one.devices > 1} == {
        (2, "one-shot"),
        (2, "two-shot"),
        (3, "two-shot"),
    }
