"""Stages of a network with several micro-batches in flight: they compute the bits of the whole network."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from nn_setup import Recorder, batch_for

from dpsim.errors import ConfigError
from dpsim.lowering.stages import possible_cuts
from dpsim.memory import HOST
from dpsim.nn import build_model
from dpsim.nn.device_ops import DeviceOps
from dpsim.nn.layer import tree_sum
from dpsim.nn.network import Network, NoEvents
from dpsim.nn.stage import open_branches
from dpsim.replica import Array, Batch, BatchSums, Capabilities, Leaves
from dpsim.runtime.describe import describe

SHAPE = (8, 8, 2)
MODELS = {
    "mlp:9,8,7": 0.0,
    "mlp:9,8,dropout=0.3,norm=layer": 0.1,
    "cnn:3,4,5": 0.0,
    "cnn:3,4,crop=2,flip=0.5,dropout=0.2": 0.1,
    "resnet20": 0.0,
}
MICRO_BATCHES, SAMPLES = 5, 4


def network(token: str, smoothing: float = 0.0) -> Network:
    return build_model(token, SHAPE, 3, label_smoothing=smoothing)


class Copies:
    """What a network is bound to, and copies of what it computes from each micro-batch."""

    def __init__(self, part: Network, numbers: range, mode: str, leaves: Leaves | None) -> None:
        self.part = part
        names = [tensor.name for number in numbers for tensor in part.layers[number].tensors]
        initial = part.initial_parameters(0)
        parameters = {name: initial[name] for name in names}
        self.gradients = {name: np.full_like(initial[name], np.nan) for name in names}
        part.bind(parameters, self.gradients)
        part.train_in_leaves(leaves is not None, None)
        part.normalise_batches(mode, lambda arrays: tree_sum(arrays))
        self.of_batches: dict[int, dict[str, Array]] = {}
        self.statistics: dict[int, Array] = {}

    def take_gradients(self, number: int) -> None:
        self.of_batches[number] = {name: value.copy() for name, value in self.gradients.items()}
        for value in self.gradients.values():
            value[...] = np.nan

    def take_statistics(self, number: int) -> None:
        self.statistics[number] = self.part.leaf_statistics()[0]


def micro_batches(part: Network, leaves: Leaves | None, samples: int = SAMPLES) -> list[Batch]:
    x, labels = batch_for(part, MICRO_BATCHES * samples)
    return [
        Batch(x=x[at : at + samples], labels=labels[at : at + samples], leaves=leaves or (0, samples), step=2,
              first_sample=at)
        for at in range(0, MICRO_BATCHES * samples, samples)
    ] if samples else [Batch(x=x[:0], labels=labels[:0], leaves=leaves or (0, 0))] * MICRO_BATCHES  # fmt: skip


def orders(name: str, stages: int) -> list[list[tuple[str, int]]]:
    """The passes of each stage: ``1f1b`` or ``gpipe``."""
    lists = []
    for stage in range(stages):
        ahead = min(MICRO_BATCHES, stages - stage - 1) if name == "1f1b" else MICRO_BATCHES
        passes = [("forward", number) for number in range(ahead)]
        for number in range(MICRO_BATCHES):
            passes += [("forward", number + ahead)] * (number + ahead < MICRO_BATCHES) + [("backward", number)]
        lists.append(passes)
    return lists


def pipelined(
    parts: Sequence[Copies], batches: Sequence[Batch], order: str, slots: Sequence[int], *, recompute: bool, mode: str
) -> list[BatchSums]:
    """Run a step of a pipeline in one process: whichever stage can go on does."""
    todo, handed, sums = orders(order, len(parts)), {}, [BatchSums(loss=0, correct=0, samples=0)] * len(batches)
    events = NoEvents()
    while any(todo):
        for stage, copies in enumerate(parts):
            part, last = copies.part, stage == len(parts) - 1
            if not todo[stage]:
                continue
            what, number = todo[stage][0]
            batch, slot = batches[number], number % slots[stage]
            needed = {"forward": stage > 0, "backward": not last}[what]
            if needed and (what, stage, number) not in handed:
                continue
            given = handed.pop((what, stage, number), None)
            del todo[stage][0]
            if what == "forward":
                before = None if given is None else given.copy()
                y = part.forward_stage(slot, batch, given, events)
                assert given is None or np.array_equal(given, before)
                if mode == "leaf":
                    copies.take_statistics(number)
                if last:
                    sums[number] = part.loss_stage(slot, batch, events).fetch()
                handed["forward", stage + 1, number] = y  # the array itself: it must stay as it is
            else:
                if recompute:
                    part.recompute_stage(slot, batch, events)
                handed["backward", stage - 1, number] = part.backward_stage(slot, batch, given, events)
                copies.take_gradients(number)
    return sums


def legal_ends(part: Network) -> list[int]:
    return [number + 1 for number, still_open in enumerate(open_branches(part.chain)[:-1]) if not still_open]


def compare(
    token: str, cuts: Sequence[int], order: str, *, recompute: bool, mode: str, leaves: Leaves | None, samples: int
) -> None:
    smoothing = MODELS.get(token, 0.0)
    whole = Copies(network(token, smoothing), range(len(network(token).layers)), mode, leaves)
    batches, expected = micro_batches(whole.part, leaves, samples), []
    for number, batch in enumerate(batches):
        expected.append(whole.part.forward_backward(batch, NoEvents()))
        if mode == "leaf":
            whole.take_statistics(number)
        whole.take_gradients(number)
    edges = [0, *cuts, len(whole.part.layers)]
    parts, slots = [], []
    for stage, (first, stop) in enumerate(itertools.pairwise(edges)):
        part = network(token, smoothing)
        slots.append(min(MICRO_BATCHES, len(cuts) + 1 - stage) if order == "1f1b" else MICRO_BATCHES)
        part.take_layers(range(first, stop), slots[-1], recompute)
        parts.append(Copies(part, range(first, stop), mode, leaves))
    actual = pipelined(parts, batches, order, slots, recompute=recompute, mode=mode)
    assert actual == expected
    for number in range(MICRO_BATCHES):
        gradients = {name: value for part in parts for name, value in part.of_batches[number].items()}
        assert gradients.keys() == whole.of_batches[number].keys()
        for name, value in whole.of_batches[number].items():
            assert gradients[name].tobytes() == value.tobytes(), name
        if mode == "leaf":
            of_stages = np.concatenate([part.statistics[number] for part in parts])
            assert of_stages.tobytes() == whole.statistics[number].tobytes()
    if mode == "leaf" and samples:
        whole.part.update_statistics(sum(whole.statistics.values()))
        for part in parts:
            part.part.update_statistics(sum(part.statistics.values()))
    state = {name: value for part in parts for name, value in part.part.state().items()}
    assert state.keys() == whole.part.state().keys()
    assert all(state[name].tobytes() == value.tobytes() for name, value in whole.part.state().items())


def some_cuts(token: str, stages: int) -> list[list[int]]:
    """Two ways of cutting, drawn at random."""
    ends, random = legal_ends(network(token)), np.random.default_rng(stages)
    return [sorted(random.choice(ends, stages - 1, replace=False).tolist()) for _ in range(2)]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("mode", "leaves"), [("local", None), ("leaf", (0, 2, 3, 4))])
@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("token", MODELS)
def test_stages_compute_the_bits_of_the_whole_network(
    token: str, stages: int, order: str, mode: str, leaves: Leaves | None, recompute: bool
) -> None:
    for cuts in some_cuts(token, stages):
        compare(token, cuts, order, recompute=recompute, mode=mode, leaves=leaves, samples=SAMPLES)


@pytest.mark.parametrize("mode", ["local", "leaf"])
@pytest.mark.parametrize("token", ["mlp:9,8,7", "cnn:3,4,5"])
def test_ranks_without_samples_take_part_in_stages(token: str, mode: str) -> None:
    for cuts in some_cuts(token, 3):
        compare(token, cuts, "1f1b", recompute=False, mode=mode, leaves=(0, 0, 0), samples=0)


def test_micro_batches_in_flight_keep_what_their_own_backward_needs() -> None:
    """Every array that a slot's layers keep is its own, whatever another slot computes in between."""
    part = network("resnet20")
    count = len(part.layers)
    part.take_layers(range(0, count), 2)
    copies = Copies(part, range(count), "local", None)
    one, other = micro_batches(part, None)[:2]
    alone = []
    for batch in (one, other):
        part.forward_stage(0, batch, None, NoEvents())
        part.loss_stage(0, batch, NoEvents())
        part.backward_stage(0, batch, None, NoEvents())
        alone.append({name: value.copy() for name, value in copies.gradients.items()})
    for slot, batch in enumerate((one, other)):
        part.forward_stage(slot, batch, None, NoEvents())
        part.loss_stage(slot, batch, NoEvents())
    for slot, batch in ((1, other), (0, one)):
        part.backward_stage(slot, batch, None, NoEvents())
        assert all(copies.gradients[name].tobytes() == value.tobytes() for name, value in alone[slot].items())
    assert any(alone[0][name].tobytes() != value.tobytes() for name, value in alone[1].items())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("token", ["mlp:9,8,7", "cnn:4,6"])
def test_a_gradient_that_is_handed_back_stays_while_the_other_slot_computes(token: str, recompute: bool) -> None:
    part = network(token)
    cut = possible_cuts(describe(part, "model"))[0]
    first, batches = network(token), micro_batches(part, None)[:2]
    first.take_layers(range(0, cut), 1)
    Copies(first, range(cut), "local", None)
    part.take_layers(range(cut, len(part.layers)), 2, recompute)
    Copies(part, range(cut, len(part.layers)), "local", None)
    entered = [first.forward_stage(0, batch, None, NoEvents()).copy() for batch in batches]
    for slot, (batch, x) in enumerate(zip(batches, entered, strict=True)):
        part.forward_stage(slot, batch, x, NoEvents())
        part.loss_stage(slot, batch, NoEvents())
    handed_back = []
    for slot, batch in enumerate(batches):
        if recompute:
            part.recompute_stage(slot, batch, NoEvents())
        gradient = part.backward_stage(slot, batch, None, NoEvents())
        assert gradient is not None and gradient.any()
        handed_back.append((gradient, gradient.copy()))
    for gradient, before in handed_back:
        np.testing.assert_array_equal(gradient, before)


def test_a_stage_announces_its_layers_by_their_numbers_in_the_model() -> None:
    whole, part = network("cnn:3,4"), network("cnn:3,4")
    part.take_layers(range(3, 6), 1, True)
    Copies(whole, range(len(whole.layers)), "local", None)
    Copies(part, range(3, 6), "local", None)
    batch, expected, actual = micro_batches(whole, None)[0], Recorder(), Recorder()
    whole.forward_backward(batch, expected)
    x = np.ones((SAMPLES, *part.boundary(2)[0]), part.boundary(2)[1])
    y = part.forward_stage(0, batch, x, actual)
    assert y.shape[1:] == part.boundary(5)[0]
    recomputed = Recorder()
    part.recompute_stage(0, batch, recomputed)
    assert recomputed.events == [("recompute", number) for number in (3, 4, 5)]
    grad = part.backward_stage(0, batch, np.ones_like(y), actual)
    assert grad is not None and grad.shape == x.shape
    assert actual.events == [event for event in expected.events if 3 <= event[1] < 6]


def test_slots_that_recompute_keep_one_copy_of_the_layers() -> None:
    sizes = {}
    for in_flight, recompute in ((1, False), (4, False), (1, True), (4, True)):
        part = network("cnn:8,8,8")
        part.take_layers(range(0, 5), in_flight, recompute)
        Copies(part, range(5), "local", None)
        batch = micro_batches(part, None)[0]
        for slot in range(in_flight):
            y = part.forward_stage(slot, batch, None, NoEvents())
        for slot in range(in_flight):
            if recompute:
                part.recompute_stage(slot, batch, NoEvents())
            part.backward_stage(slot, batch, np.ones_like(y), NoEvents())
        sizes[in_flight, recompute] = part.work_bytes
    assert sizes[4, False] == 4 * sizes[1, False]
    assert sizes[4, True] == sizes[1, False] + 4 * y.nbytes
    assert sizes[1, True] == sizes[1, False] + y.nbytes


@pytest.mark.parametrize("first_or_stop", ["first", "stop"])
def test_a_stage_that_ends_inside_a_residual_is_refused(first_or_stop: str) -> None:
    part = network("resnet20")
    inside = [number for number, still_open in enumerate(open_branches(part.chain)) if still_open]
    assert {part.layers[number].kind for number in inside} >= {"fork", "swap", "conv"}
    for number in inside:
        ends = (number + 1, len(part.layers)) if first_or_stop == "first" else (0, number + 1)
        with pytest.raises(ConfigError, match="inside a branch") as refusal:
            part.take_layers(range(*ends), 1)
        if number == 5:
            assert "after relu1 or stage1.block1.join" in str(refusal.value)


@pytest.mark.parametrize("ends", [(3, 3), (-1, 2), (0, 99)])
def test_a_stage_without_layers_is_refused(ends: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="one or more of 0 to 7"):
        network("mlp:9,8,7").take_layers(range(*ends), 1)
    with pytest.raises(ConfigError, match="1 or more"):
        network("mlp:9,8,7").take_layers(range(0, 3), 0)


@pytest.mark.parametrize("token", MODELS)
def test_the_bytes_of_outputs_are_those_of_the_arrays(token: str) -> None:
    part = network(token)
    Copies(part, range(len(part.layers)), "local", None)
    outputs: dict[str, int] = {}
    part.observe(lambda what, layer, x, y: outputs.setdefault(layer, y.nbytes))
    batch = micro_batches(part, None)[0]
    part.forward_stage(0, batch, None, NoEvents())
    for number, spec in enumerate(part.layers):
        shape, dtype = part.boundary(number)
        assert SAMPLES * np.prod(shape) * dtype.itemsize == outputs[spec.name]
        assert spec.output_bytes_per_sample == outputs[spec.name] / SAMPLES


@pytest.mark.parametrize("leaves", [(0, 16), (0, 5, 8, 16)])
@pytest.mark.parametrize("token", MODELS)
def test_the_memory_of_layers_is_what_a_step_allocates(token: str, leaves: Leaves) -> None:
    part = network(token)
    Copies(part, range(len(part.layers)), "leaf", leaves if len(leaves) > 2 else None)
    of_layers = part.layer_work_bytes(leaves)
    assert part.work_bytes == 0
    state = {name: value.copy() for name, value in part.state().items()}
    x, labels = batch_for(part, leaves[-1])
    part.forward_backward(Batch(x=x, labels=labels, leaves=leaves), NoEvents())
    assert len(of_layers) == len(part.layers) + 1 and sum(of_layers) == part.work_bytes
    assert all(np.array_equal(state[name], value) for name, value in part.state().items())


def test_stages_evaluate_what_the_whole_network_does() -> None:
    token = "cnn:3,4,dropout=0.3"
    whole = network(token)
    count = len(whole.layers)
    Copies(whole, range(count), "local", None)
    values, labels = batch_for(whole, 100)
    expected = whole.evaluate(values, labels)
    for first, stop in ((0, 4), (4, count)):
        part = network(token)
        part.take_layers(range(first, stop), 1)
        Copies(part, range(first, stop), "local", None)
        values = part.evaluate_stage(values)
    actual = part.evaluate_logits(values, labels)
    assert (actual.loss, actual.correct, actual.samples) == (expected.loss, expected.correct, expected.samples)


def test_a_stage_is_warmed_up_and_looked_through_for_nan_alone() -> None:
    part = network("resnet20")
    stop = next(number for number in range(4, 20) if part.layers[number].kind == "join") + 1
    part.take_layers(range(3, stop), 2)
    copies = Copies(part, range(3, stop), "local", None)
    part.warm_up()
    assert all(np.isfinite(value).all() for value in copies.gradients.values())
    x, labels = batch_for(part, 4)
    assert part.first_nonfinite_layer(x, labels) is None
    name = next(iter(copies.gradients))
    copies.gradients[name][...] = np.nan
    found = part.first_nonfinite_layer(x, labels)
    assert found is not None and name in found


def test_a_network_in_a_devices_memory_keeps_its_stage() -> None:
    part = network("cnn:3,4")
    part.take_layers(range(3, 6), 2)
    part.compute_in(HOST)
    assert isinstance(part.ops, DeviceOps) and Capabilities.of(part).staged is part
    copies = Copies(part, range(3, 6), "local", None)
    x = np.ones((SAMPLES, *part.boundary(2)[0]), np.float32)
    batch = micro_batches(part, None)[0]
    y = part.forward_stage(1, batch, x, NoEvents())
    part.backward_stage(1, batch, np.ones_like(y), NoEvents())
    assert all(np.isfinite(value).all() for value in copies.gradients.values())
