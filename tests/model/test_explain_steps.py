"""Step times on two numbers of devices: the link that they imply, what nothing explains, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import msgspec
import pytest

from dpsim.errors import ConfigError
from dpsim.imports.steps import steps_of_trainings
from dpsim.machine import Link, Machine
from dpsim.model.defaults import with_defaults
from dpsim.model.estimate import MeasuredStep
from dpsim.model.explanation import Explanation
from dpsim.model.step import price, scheduled
from dpsim.model.two_steps import ANY_LINK, explain_steps, layers_of
from dpsim.plan import Plan
from dpsim.workload import Workload

Dpsim = Callable[..., tuple[int, str, str]]
BYTES = 400e6


def computing(seconds: float) -> Workload:
    """A workload with gradients of ``BYTES`` that computes for so long at a local batch of 1."""
    model = layers_of(BYTES)
    part_s = seconds / len(model.layers) / 3
    layers = [msgspec.structs.replace(each, forward_s=(part_s,), backward_s=(2 * part_s,)) for each in model.layers]
    return msgspec.structs.replace(model, layers=tuple(layers))


def plan(devices: int, layout: str = "") -> Plan:
    return Plan(
        devices=devices, layout=layout, global_batch=devices, fusion_rule="ddp", algorithm="ring", overlap="thread"
    )


def step(machine: Machine, devices: int, layout: str = "") -> MeasuredStep:
    own = plan(devices, layout)
    return MeasuredStep(own, price(scheduled(computing(0.3), machine, own), machine).step_s)


def linked(bandwidth: float) -> Machine:
    """A machine with what ``explain_steps`` assumes of those that it does not know, and a link."""
    stated = msgspec.structs.replace(ANY_LINK, link=Link(latency_s=20e-6, bandwidth_bytes_per_s=bandwidth))
    return with_defaults(layers_of(BYTES), stated, widths=())


def seconds(explained: Explanation, kind: str) -> float:
    return sum(part.seconds for part in explained.parts if part.kind == kind)


def test_a_slow_link_is_the_cause_and_its_bandwidth_is_told() -> None:
    rows = [step(linked(2e9), 1), step(linked(2e9), 16)]
    explained = explain_steps(layers_of(BYTES), None, rows)
    assert [part.kind for part in explained.causes] == ["communication"]
    (cause,) = explained.causes
    assert "GB/s" in cause.text
    assert cause.low_s < rows[1].step_s - step(linked(1e15), 16).step_s < cause.high_s
    assert math.fsum(part.seconds for part in explained.parts) == pytest.approx(rows[1].step_s, rel=1e-12)


def test_a_faster_link_gains_most_of_what_is_exposed() -> None:
    explained = explain_steps(layers_of(BYTES), None, [step(linked(2e9), 1), step(linked(2e9), 16)])
    gains = {remedy.text: remedy for remedy in explained.remedies}
    fast = gains["a link 10 times as fast"]
    assert fast.low_s < fast.gain_s < fast.high_s
    assert 0.5 * seconds(explained, "communication") < fast.gain_s < 1.2 * seconds(explained, "communication")
    assert [each.gain_s for each in explained.remedies] == sorted((r.gain_s for r in explained.remedies), reverse=True)


def test_no_remedy_gains_more_than_the_step_where_the_prediction_is_longer() -> None:
    rows = [MeasuredStep(plan(1), 0.3), MeasuredStep(plan(16), 0.31)]
    explained = explain_steps(layers_of(BYTES), linked(1e8), rows)
    assert explained.remedies and all(remedy.gain_s < 0.31 for remedy in explained.remedies)


def test_nodes_share_a_link_and_their_own_devices_are_not_counted_against_it() -> None:
    explained = explain_steps(layers_of(BYTES), None, [step(linked(2e9), 8, "1x8"), step(linked(2e9), 16, "2x8")])
    assert [part.kind for part in explained.causes] == ["communication"]
    assert "between the nodes" in explained.causes[0].text


def test_a_step_that_is_as_long_on_more_devices_is_healthy() -> None:
    explained = explain_steps(layers_of(BYTES), None, [MeasuredStep(plan(1), 0.3), MeasuredStep(plan(16), 0.305)])
    assert explained.causes == ()
    assert seconds(explained, "computation") == pytest.approx(0.3)
    assert seconds(explained, "unexplained") == pytest.approx(0.005)


HOURS = [MeasuredStep(plan(1), 80 * 3600.0), MeasuredStep(plan(4), 150 * 3600.0)]


def test_hours_of_as_many_steps_are_told_as_more_samples() -> None:
    rows = steps_of_trainings(HOURS, 300_000, None, batch_known=True)
    assert [row.step_s for row in rows] == pytest.approx([0.96, 1.8])
    explained = explain_steps(layers_of(BYTES), None, rows)
    assert "the same number of steps trains 4 times the samples" in explained.notes[0]
    assert "0.47 times as long" in explained.notes[0]


def test_hours_of_as_many_samples_are_fewer_and_longer_steps() -> None:
    rows = steps_of_trainings(HOURS, None, 300_000.0 * HOURS[0].plan.global_batch, batch_known=True)
    assert [row.step_s for row in rows] == pytest.approx([0.96, 7.2])


@pytest.mark.parametrize(
    ("steps", "samples", "batch_known", "said"),
    [
        (None, None, True, "which is a training and no step"),
        (300_000, None, False, "without the samples of a step"),
        (300_000, 1e6, True, "--steps and --samples"),
        (0, None, True, "trainings of 0"),
        (None, -5.0, True, "trainings of -5"),
    ],
)
def test_hours_alone_are_no_steps(steps: int | None, samples: float | None, batch_known: bool, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        steps_of_trainings(HOURS, steps, samples, batch_known=batch_known)


def test_steps_stay_steps() -> None:
    rows = [MeasuredStep(plan(1), 0.3), MeasuredStep(plan(4), 0.4)]
    assert steps_of_trainings(rows, None, None, batch_known=False) == rows


def test_one_global_batch_trains_the_same_samples() -> None:
    rows = [
        MeasuredStep(msgspec.structs.replace(plan(each), global_batch=16), seconds)
        for each, seconds in ((1, 0.3), (16, 0.4))
    ]
    assert not any("times the samples" in note for note in explain_steps(layers_of(BYTES), None, rows).notes)


def test_what_a_machine_does_not_predict_is_unexplained() -> None:
    slow = step(linked(2e9), 16)._replace(step_s=2.0)
    explained = explain_steps(layers_of(BYTES), linked(1e11), [step(linked(2e9), 1), slow])
    assert [part.kind for part in explained.causes] == ["unexplained"]
    assert seconds(explained, "unexplained") > 1.0


def test_one_number_of_devices_is_refused() -> None:
    with pytest.raises(ConfigError, match="step times of 8 devices alone"):
        explain_steps(layers_of(BYTES), None, [MeasuredStep(plan(8), 0.3), MeasuredStep(plan(8), 0.4)])


def test_steps_that_no_link_explains_are_refused_with_what_else_to_give() -> None:
    rows = [MeasuredStep(plan(1), 0.3), MeasuredStep(plan(2), 30.0), MeasuredStep(plan(16), 0.5)]
    with pytest.raises(ConfigError, match="these steps tell no link") as refused:
        explain_steps(layers_of(BYTES), None, rows)
    assert "--network-log" in refused.value.remedy


def test_hours_are_taken_with_steps_or_samples(dpsim: Dpsim) -> None:
    asked = ["explain", "--parameters", "60000000", "--measured", "1:80h,4:150h", "--json"]
    code, out, err = dpsim(*asked)
    assert code == 2 and not out and "--steps 90000" in err and "--samples 1.28M" in err
    step_s = []
    for more in ("--steps 300000", "--samples 9.6M"):
        code, out, _ = dpsim(*asked, *more.split(), "--local-batch", "32")
        answer = json.loads(out)
        assert code == 0 and "trains 4 times the samples" in answer["summary"]["notes"][0]
        step_s.append(answer["summary"]["step_s"])
    assert step_s == pytest.approx([1.8, 7.2])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--measured 1:80h,4:150h --steps 3 --samples 3 --local-batch 2", "--steps and --samples"),
        ("--measured 1:80/s,4:150/s --samples 3 --local-batch 2", "--measured 1:80/s with --steps or --samples"),
        ("--measured 1:80h,4:150h --samples some --local-batch 2", "--samples 'some' is not understood"),
    ],
)
def test_trainings_that_contradict_themselves_are_one_message(dpsim: Dpsim, flags: str, said: str) -> None:
    code, out, err = dpsim("explain", "--parameters", "60000000", *flags.split())
    assert code == 2 and not out and said in err and "Traceback" not in err
