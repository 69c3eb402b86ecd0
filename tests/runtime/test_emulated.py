"""A replica that waits instead of computing: what it announces and when, by a clock of the test's own."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from scipy.special import ndtri

from dpsim.errors import ConfigError
from dpsim.model.slowest import median_slowest
from dpsim.nn.models import build_model
from dpsim.replica import Batch, BatchSums, Capabilities, EmulatedCompute, Replica
from dpsim.runtime.describe import describe
from dpsim.runtime.emulated import Clock, EmulatedReplica, WorkloadReplica, step_factor
from dpsim.workload import Layer, Tensor, Workload

FORWARD_S, BACKWARD_S, READY_S, UPDATE_S, OVERHEAD_S = 1e-3, 2e-3, 0.5e-3, 4e-3, 3e-3
SPREAD = (0.9, 1.0, 1.3)


class Time:
    """A clock that stands still but for sleeping, and wakes ``late_s`` too late."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now_s, self.late_s, self.slept = 100.0, late_s, 0
        self.clock = Clock(now=lambda: self.now_s, sleep_until=self._sleep)

    def _sleep(self, until_s: float) -> None:
        self.slept += 1
        self.now_s = max(self.now_s, until_s + self.late_s)


class Heard:
    """Keeps what a replica announces, and when."""

    def __init__(self, time: Time) -> None:
        self.time = time
        self.events: list[tuple[str, int]] = []
        self.when_s: list[float] = []

    def _add(self, event: str, layer: int) -> None:
        self.events.append((event, layer))
        self.when_s.append(self.time.now_s)

    def forward_done(self, layer: int) -> None:
        self._add("forward", layer)

    def loss_done(self) -> None:
        self._add("loss", -1)

    def gradients_ready(self, layer: int) -> None:
        self._add("ready", layer)

    def backward_done(self, layer: int) -> None:
        self._add("backward", layer)

    def recompute_done(self, layer: int) -> None:
        self._add("recompute", layer)


def model() -> Replica:
    return build_model("mlp:4,4", (2, 2, 1), 3)


def workload(spread: tuple[float, ...] = ()) -> Workload:
    """Every layer takes the same time at batch 2, and twice as long at batch 4."""
    bare = describe(model(), "mlp")
    return Workload(
        name="mlp",
        local_batches=(2, 4),
        layers=tuple(
            type(layer)(
                name=layer.name,
                tensors=layer.tensors,
                forward_s=(FORWARD_S, 2 * FORWARD_S),
                backward_s=(BACKWARD_S, 2 * BACKWARD_S),
                gradient_ready_s=(READY_S, 2 * READY_S),
            )
            for layer in bare.layers
        ),
        update_s=UPDATE_S,
        overhead_s=OVERHEAD_S,
        step_spread=spread,
    )


def bound(time: Time, spread: tuple[float, ...] = (), rank: int = 0) -> tuple[EmulatedReplica, dict[str, Any]]:
    replica = EmulatedReplica(model(), workload(spread), seed=3, rank=rank, clock=time.clock)
    parameters = replica.initial_parameters(0)
    gradients = {name: np.zeros_like(value) for name, value in parameters.items()}
    replica.bind(parameters, gradients)
    return replica, gradients


def batch(samples: int = 2, step: int = 0) -> Batch:
    x = np.zeros((samples, 2, 2, 1), np.float32)
    return Batch(x=x, labels=np.zeros(samples, np.int64), leaves=(0, samples), step=step)


def step(replica: EmulatedReplica, time: Time, number: int, samples: int = 2, added_up_s: float = 0.0) -> Heard:
    heard = Heard(time)
    replica.forward_backward(batch(samples, number), heard)
    replica.update_begins(added_up_s)
    return heard


def test_it_announces_what_the_model_announces() -> None:
    time = Time()
    replica, _ = bound(time)
    emulated, real = Heard(time), Heard(time)
    replica.forward_backward(batch(), emulated)
    of_model = model()
    parameters = of_model.initial_parameters(0)
    of_model.bind(parameters, {name: np.zeros_like(value) for name, value in parameters.items()})
    of_model.forward_backward(batch(), real)
    assert emulated.events == real.events
    assert isinstance(replica, EmulatedCompute) and replica.layers == of_model.layers


@pytest.mark.parametrize(("samples", "scale"), [(2, 1), (3, 1.5), (4, 2)])
def test_every_layer_ends_when_the_workload_says(samples: int, scale: float) -> None:
    time = Time()
    replica, gradients = bound(time)
    heard = Heard(time)
    replica.forward_backward(batch(samples), heard)
    expected, moment_s = [], 100.0 + OVERHEAD_S
    for event, layer in heard.events:
        if event == "forward":
            moment_s += scale * FORWARD_S
        elif event == "backward":
            moment_s += scale * (BACKWARD_S - READY_S if replica.layers[layer].tensors else BACKWARD_S)
        elif event == "ready":
            moment_s += scale * READY_S
        expected.append(moment_s)
    assert heard.when_s == pytest.approx(expected, abs=1e-9)
    assert all(np.all(gradient != 0) and np.isfinite(gradient).all() for gradient in gradients.values())


def test_global_batch_norm_sums_over_the_ranks_and_what_follows_begins_then() -> None:
    time, sums = Time(), list[tuple[int, str]]()
    normalised = build_model("cnn:2,3", (4, 4, 1), 3)
    bare = describe(normalised, "cnn")
    layers = tuple(
        type(layer)(name=layer.name, tensors=layer.tensors, forward_s=(FORWARD_S,), backward_s=(BACKWARD_S,))
        for layer in bare.layers
    )
    timed = Workload(name="cnn", local_batches=(2,), layers=layers, overhead_s=OVERHEAD_S)
    replica = EmulatedReplica(normalised, timed, seed=0, rank=0, clock=time.clock)
    parameters = replica.initial_parameters(0)
    replica.bind(parameters, {name: np.zeros_like(value) for name, value in parameters.items()})
    added_s = 5e-3

    def summed(arrays: Any) -> Any:
        sums.append((len(arrays[0]), str(arrays[0].dtype)))
        time.now_s += added_s
        return arrays[0]

    replica.normalise_batches("global", summed)
    begin_s = time.now_s
    x = np.zeros((2, 4, 4, 1), np.float32)
    replica.forward_backward(Batch(x=x, labels=np.zeros(2, np.int64), leaves=(0, 2)), Heard(time))
    assert sums == [(5, "float64"), (7, "float64"), (6, "float32"), (4, "float32")]
    computing_s = OVERHEAD_S + len(layers) * (FORWARD_S + BACKWARD_S)
    assert time.now_s - begin_s == pytest.approx(computing_s + 4 * added_s)
    replica.normalise_batches("local", summed)
    replica.forward_backward(Batch(x=x, labels=np.zeros(2, np.int64), leaves=(0, 2), step=1), Heard(time))
    assert len(sums) == 4


def test_waking_late_does_not_add_up() -> None:
    late_s = 0.2e-3
    ends_s = {}
    for late in (0.0, late_s):
        time = Time(late)
        replica, _ = bound(time)
        for number in range(5):
            step(replica, time, number)
        ends_s[late] = time.now_s
        assert max(replica.lateness_s) == pytest.approx(late, abs=25e-6)
    assert ends_s[late_s] - ends_s[0.0] == pytest.approx(late_s, abs=25e-6)


def test_a_step_begins_after_the_update_whatever_the_update_took() -> None:
    layers = len(model().layers)
    period_s = UPDATE_S + OVERHEAD_S + layers * (FORWARD_S + BACKWARD_S)
    for real_update_s in (0.0, 0.5 * UPDATE_S, 1.5 * UPDATE_S):
        time = Time()
        replica, _ = bound(time)
        first = step(replica, time, 0).when_s[-1]
        time.now_s += real_update_s
        second = step(replica, time, 1).when_s[-1]
        assert second - first == pytest.approx(period_s)


def test_a_step_waits_for_the_sum_of_the_gradients() -> None:
    time = Time()
    replica, _ = bound(time)
    first = step(replica, time, 0, added_up_s=0.0).when_s[-1]
    replica.update_begins(first + 0.01)
    time.now_s = first + 0.01
    second = step(replica, time, 1)
    assert second.when_s[0] == pytest.approx(first + 0.01 + UPDATE_S + OVERHEAD_S + FORWARD_S)


def test_a_step_after_something_else_begins_when_it_is_called() -> None:
    time = Time()
    replica, _ = bound(time)
    step(replica, time, 0)
    time.now_s += 1e-3
    replica.begin_anew()
    began_s = time.now_s
    assert step(replica, time, 1).when_s[0] == pytest.approx(began_s + OVERHEAD_S + FORWARD_S)
    time.now_s += 60.0  # the job stood still
    began_s = time.now_s
    assert step(replica, time, 2).when_s[0] == pytest.approx(began_s + OVERHEAD_S + FORWARD_S)


def test_micro_batches_follow_one_another_without_an_overhead_of_their_own() -> None:
    time = Time()
    replica, _ = bound(time)
    first, second = Heard(time), Heard(time)
    replica.forward_backward(batch(step=5), first)
    replica.forward_backward(batch(step=5), second)
    assert second.when_s[0] == pytest.approx(first.when_s[-1] + FORWARD_S)


def test_a_rank_without_samples_waits_for_nothing_and_writes_zeros() -> None:
    time = Time()
    replica, gradients = bound(time)
    for gradient in gradients.values():
        gradient[...] = 1.0
    sums = replica.forward_backward(batch(0), Heard(time))
    assert sums == BatchSums(loss=0.0, correct=0, samples=0)
    assert time.slept == 0 and not any(gradient.any() for gradient in gradients.values())


def test_the_factors_of_steps_have_the_workloads_spread() -> None:
    spread = workload(SPREAD)
    factors = [[step_factor(spread, 3, rank, number) for number in range(2000)] for rank in range(4)]
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        assert np.quantile(factors, share) == pytest.approx(spread.spread_at(share), abs=0.02)
    assert abs(np.corrcoef(factors)[0, 1]) < 0.1
    assert factors[2][:9] == [step_factor(spread, 3, 2, number) for number in range(9)]
    assert step_factor(workload(), 3, 0, 0) == 1.0


def test_the_whole_step_is_longer_by_its_factor() -> None:
    time = Time()
    replica, _ = bound(time, SPREAD, rank=2)
    first, second = (step(replica, time, number).when_s[-1] for number in range(2))
    layers = len(model().layers)
    factor = step_factor(workload(SPREAD), 3, 2, 1)
    assert second - first == pytest.approx(factor * (UPDATE_S + OVERHEAD_S + layers * (FORWARD_S + BACKWARD_S)))


@pytest.mark.parametrize("correlation", [0.0, 0.6, 1.0])
def test_ranks_draw_alike_as_far_as_the_workload_says(correlation: float) -> None:
    """The normal numbers behind the factors have the correlation that is asked for, and the spread stays the same."""
    levels = np.linspace(0.0005, 0.9995, 1000)
    spread = msgspec.structs.replace(workload(tuple((1 + levels).tolist())), step_correlation=correlation)
    drawn = np.array([[step_factor(spread, 2, rank, number) for rank in range(2)] for number in range(1500)])
    normal = ndtri(drawn - 1)
    assert np.corrcoef(normal.T)[0, 1] == pytest.approx(correlation, abs=0.06)
    assert np.mean(drawn) == pytest.approx(1.5, abs=0.02) and np.std(drawn) == pytest.approx(12**-0.5, rel=0.03)
    slowest = np.median(drawn.max(axis=1))
    assert median_slowest(spread, 2) == pytest.approx(slowest, abs=0.03)


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_the_median_slowest_is_that_of_independent_draws(devices: int) -> None:
    spread = workload(tuple(np.linspace(0.8, 1.4, 20)))
    drawn = [max(step_factor(spread, 2, rank, number) for rank in range(devices)) for number in range(1500)]
    assert median_slowest(spread, devices) == pytest.approx(np.median(drawn), rel=0.02)
    assert median_slowest(workload(), devices) == 1.0


def staged_workload() -> Workload:
    """Layers whose outputs have 4, 8 and 12 values."""
    layers = tuple(
        Layer(
            name=f"layer{number}",
            forward_s=(FORWARD_S,),
            backward_s=(BACKWARD_S,),
            gradient_ready_s=(READY_S,),
            tensors=(Tensor(name=f"layer{number}.weight", shape=(4, 4)),),
            output_bytes_per_sample=16.0 * (1 + number),
        )
        for number in range(3)
    )
    return Workload(name="staged", local_batches=(2,), layers=layers, update_s=UPDATE_S, overhead_s=OVERHEAD_S)


def a_stage(time: Time, first: int, stop: int) -> tuple[EmulatedReplica, dict[str, Any]]:
    timed = staged_workload()
    replica = EmulatedReplica(WorkloadReplica(timed), timed, seed=0, rank=0, clock=time.clock)
    replica.take_layers(range(first, stop), 2)
    initial = replica.initial_parameters(0)
    names = [tensor.name for layer in timed.layers[first:stop] for tensor in layer.tensors]
    gradients = {name: np.zeros_like(initial[name]) for name in names}
    replica.bind({name: initial[name] for name in names}, gradients)
    return replica, gradients


def test_a_stage_waits_for_its_layers_and_hands_on_arrays_of_their_size() -> None:
    time = Time()
    replica, gradients = a_stage(time, 1, 3)
    assert Capabilities.of(replica).staged is replica
    heard = Heard(time)
    x = np.zeros((2, *replica.boundary(0)[0]), replica.boundary(0)[1])
    replica.forward_stage(0, batch(), x, heard)
    replica.loss_stage(0, batch(), heard)
    grad = replica.backward_stage(0, batch(), None, heard)
    assert grad is not None and grad.shape == (2, 4) and grad.dtype == np.float32
    expected = ["forward 1", "forward 2", "loss -1", "ready 2", "backward 2", "ready 1", "backward 1"]
    assert [f"{what} {layer}" for what, layer in heard.events] == expected
    assert time.now_s == pytest.approx(100 + OVERHEAD_S + 2 * (FORWARD_S + BACKWARD_S))
    assert sorted(gradients) == ["layer1.weight", "layer2.weight"] and all(g.all() for g in gradients.values())
    first, _ = a_stage(time, 0, 2)
    y = first.forward_stage(1, batch(step=1), None, heard)
    assert y.shape == (2, 8)
    heard.events.clear()
    before_s = time.now_s
    first.recompute_stage(1, batch(step=1), heard)
    assert heard.events == [("recompute", 0), ("recompute", 1)]
    assert time.now_s - before_s == pytest.approx(2 * FORWARD_S)
    assert first.backward_stage(1, batch(step=1), y, heard) is None
    assert first.forward_stage(0, batch(0, step=1), None, heard).shape == (0, 8)


def test_a_stage_goes_on_when_what_it_waits_for_has_arrived() -> None:
    """The step's overhead passes meanwhile, and the update begins where computing ended."""
    late_s = 10 * OVERHEAD_S
    for arrived_s in (0.5 * OVERHEAD_S, late_s):
        time = Time()
        replica, _ = a_stage(time, 1, 3)
        replica.step_begins(batch())
        time.now_s += arrived_s
        replica.resumes_at(time.now_s)
        replica.forward_stage(0, batch(), None, Heard(time))
        computed_s = 100 + max(OVERHEAD_S, arrived_s) + 2 * FORWARD_S
        assert time.now_s == pytest.approx(computed_s)
        replica.update_begins(0.0, 0.25)
        replica.update_ends(0.25)
        assert time.now_s == pytest.approx(computed_s + 0.25 * UPDATE_S)
        replica.forward_stage(0, batch(step=1), None, Heard(time))
        assert time.now_s == pytest.approx(computed_s + 0.25 * UPDATE_S + OVERHEAD_S + 2 * FORWARD_S)


def test_the_next_step_begins_after_the_share_of_the_update() -> None:
    time = Time()
    replica, _ = a_stage(time, 1, 3)
    replica.forward_stage(0, batch(), None, Heard(time))
    computed_s = time.now_s
    replica.update_begins(0.0, 0.5)
    replica.forward_stage(0, batch(step=1), None, Heard(time))
    assert time.now_s == pytest.approx(computed_s + 0.5 * UPDATE_S + OVERHEAD_S + 2 * FORWARD_S)


def test_a_stage_that_hands_on_an_unknown_size_is_refused() -> None:
    timed = workload()
    replica = EmulatedReplica(WorkloadReplica(timed), timed, seed=0, rank=0)
    with pytest.raises(ConfigError, match=r"dense1.*unknown size(.|\n)*dpsim profile"):
        replica.take_layers(range(2, 4), 1)
