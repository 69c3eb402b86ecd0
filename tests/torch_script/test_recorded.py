"""The workload that a recorded training makes, from times chosen by hand. Needs no torch."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from dpsim.ddp_settings import DdpSettings
from dpsim.errors import ConfigError
from dpsim.lowering import lower
from dpsim.plan import Plan
from dpsim.torch.script.probe.steps import Mode, RecordedStep
from dpsim.torch.script.recorded import Recorded, RecordedParameter, check_same, joined, layers_s, workload_of


def parameter(name: str, *shape: int, dtype: str = "float32") -> RecordedParameter:
    return RecordedParameter(name=name, module=name.rpartition(".")[0], shape=shape, dtype=dtype)


def step(mode: Mode, **fields: Any) -> RecordedStep:
    """A step of 10 s without hooks: 2 s forward, 4 s backward, 1 s update, 1 s of input, so 2 s of something else."""
    slow = 1.0 if mode == "whole" else 2.0
    fields = {"forward_s": 2 * slow, "backward_s": 4 * slow, "last_backward_s": 4 * slow} | fields
    return RecordedStep(
        mode=mode, start_s=0.0, step_s=10.0, update_s=1.0, input_s=1.0, micro_batches=1, local_batch=32, **fields
    )


def recorded(**fields: Any) -> Recorded:
    parameters = (parameter("a.weight", 4, 8), parameter("a.bias", 8), parameter("b.weight", 8, 2))
    steps = (
        step("whole"),
        step("forward", module_s={"a": 1.0, "b": 3.0}),
        step("gradients", ready_s={2: 2.0, 1: 5.0, 0: 6.0}),
    )
    plain = {
        "buckets": ((2, 1), (0,)),
        "first_parameter": {"a": 0, "b": 2},
        "ddp": DdpSettings(torch="2.13", devices=8),
    }
    return Recorded(name="net", source="a test", **({"parameters": parameters, "steps": steps} | plain | fields))


def test_layers_stand_against_the_order_in_which_gradients_are_sent() -> None:
    workload = workload_of(recorded())
    assert [layer.name for layer in workload.layers] == ["a (2)", "a", "b"]
    assert [workload.tensors[i].name for i in workload.ready_order.tensor] == ["b.weight", "a.bias", "a.weight"]
    assert workload.local_batches == (32,) and workload.ddp == DdpSettings(torch="2.13", devices=8)


def test_times_with_hooks_are_scaled_to_those_without_and_all_parts_add_up_to_the_step() -> None:
    workload = workload_of(recorded())
    assert [layer.backward_s[0] for layer in workload.layers[::-1]] == pytest.approx([1.0, 1.5, 0.5])
    assert [layer.forward_s[0] for layer in workload.layers] == pytest.approx([0.5, 0.0, 1.5])
    assert (workload.update_s, workload.input_s(32)) == (1.0, 1.0)
    layers_s = sum(layer.forward_s[0] + layer.backward_s[0] for layer in workload.layers)
    assert layers_s + workload.update_s + workload.overhead_s + workload.input_s(32) == pytest.approx(10.0)


def test_times_are_those_of_clean_steps_where_a_mode_has_enough_of_them() -> None:
    """Of five whole steps three waited for a core; of those with hooks all did."""
    hooked = (
        step("forward", module_s={"a": 1.0, "b": 3.0}, delayed_s=1.0),
        step("gradients", ready_s={2: 2.0, 1: 5.0, 0: 6.0}, delayed_s=1.0),
    )
    disturbed = (step("whole", forward_s=9.0, delayed_s=0.2),) * 3
    workload = workload_of(recorded(steps=(*disturbed, step("whole"), step("whole", delayed_s=0.05), *hooked)))
    assert sum(layer.forward_s[0] for layer in workload.layers) == pytest.approx(2.0)
    assert [layer.backward_s[0] for layer in workload.layers[::-1]] == pytest.approx([1.0, 1.5, 0.5])
    workload = workload_of(recorded(steps=(*disturbed, step("whole"), *hooked)))
    assert sum(layer.forward_s[0] for layer in workload.layers) == pytest.approx(9.0), "one clean step is not enough"


def test_a_gradient_that_is_ready_before_one_that_goes_first_waits_for_it() -> None:
    steps = (step("whole"), step("forward"), step("gradients", ready_s={2: 5.0, 1: 2.0, 0: 6.0}))
    workload = workload_of(recorded(steps=steps))
    assert [layer.backward_s[0] for layer in workload.layers[::-1]] == pytest.approx([2.5, 0.0, 0.5])


def test_a_parameter_without_a_gradient_delays_nothing() -> None:
    steps = (step("whole"), step("forward"), step("gradients", ready_s={1: 2.0, 0: 6.0}))
    workload = workload_of(recorded(steps=steps))
    assert [layer.backward_s[0] for layer in workload.layers[::-1]] == pytest.approx([0.0, 1.0, 2.0])


def test_micro_batches_share_a_steps_forward_time() -> None:
    pair = {"forward_s": 4.0, "backward_s": 8.0, "last_backward_s": 4.0}
    steps = [step("whole", **pair), step("gradients", ready_s={2: 8.0, 1: 8.0, 0: 8.0}, **pair)]
    for each in steps:
        each.micro_batches, each.step_s = 2, 15.0
    workload = workload_of(recorded(steps=tuple(steps)))
    assert sum(layer.backward_s[0] for layer in workload.layers) == pytest.approx(4.0)
    assert [layer.forward_s[0] for layer in workload.layers] == pytest.approx([2.0, 0.0, 0.0])
    assert workload.overhead_s == pytest.approx(15.0 - 2 * (2.0 + 4.0) - 1.0 - 1.0)
    assert workload.input_s_per_sample == pytest.approx(1.0 / 64)


def test_the_loss_is_that_of_each_micro_batch_and_no_overhead() -> None:
    of_two = step("whole", loss_s=0.5)
    of_two.micro_batches = 2
    alone, together = (workload_of(recorded(steps=(each,))) for each in (step("whole", loss_s=0.5), of_two))
    assert (alone.loss_s, together.loss_s) == ((0.5,), (0.25,))
    without = workload_of(recorded(steps=(step("whole"),)))
    assert without.loss_s == () and alone.overhead_s == pytest.approx(without.overhead_s - 0.5)
    both = joined([alone, msgspec.structs.replace(together, local_batches=(64,))])
    assert both.loss_s == (0.5, 0.25)


def test_workers_load_beside_the_training() -> None:
    workload = workload_of(recorded(input_workers=4, load_s_per_sample=0.25))
    assert (workload.input_prefetch, workload.input_workers, workload.input_s(32)) == (True, 4, 2.0)
    unknown = workload_of(recorded(input_workers=4))
    assert (unknown.input_prefetch, unknown.input_s_per_sample) == (False, 0.0)
    assert unknown.overhead_s == pytest.approx(workload.overhead_s + 1.0)


def test_steps_of_another_batch_are_left_out() -> None:
    last = step("whole", forward_s=100.0)
    last.local_batch = 7
    assert workload_of(recorded(steps=(*recorded().steps, last))) == workload_of(recorded())


def test_the_workload_is_sent_in_the_buckets_of_ddp() -> None:
    workload = workload_of(recorded())
    plan = Plan(devices=8, global_batch=256, fusion_rule="ddp", fusion_threshold_bytes=70)
    assert lower(workload, plan).bucket_size_bytes.tolist() == [96, 128]


def test_a_profile_that_was_weighed_and_one_that_was_not_are_of_one_training() -> None:
    first = workload_of(recorded())
    assert first.ddp is not None
    weighed = msgspec.structs.replace(first, ddp=msgspec.structs.replace(first.ddp, gradients="kept"))
    check_same(first, weighed, 8)
    other = msgspec.structs.replace(first, ddp=msgspec.structs.replace(first.ddp, static_graph=True))
    with pytest.raises(ConfigError, match="trains with other settings"):
        check_same(first, other, 8)


def test_layers_of_several_micro_batches_take_the_mean_of_a_step_without_hooks() -> None:
    several = dataclasses.replace(step("whole"), micro_batches=4, forward_s=8.0, backward_s=14.0)
    assert layers_s(recorded(steps=(several, step("forward", module_s={})))) == (8.0 + 14.0) / 4
