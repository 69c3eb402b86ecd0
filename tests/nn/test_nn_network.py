"""A network as a replica: gradients, announcements, leaves, shares of ranks, dtypes, refusals."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nn_setup import Recorder, batch_for, bound, gradients_of

from dpsim.data import epoch_batches, load_dataset, shard
from dpsim.errors import ConfigError
from dpsim.nn import build_model, update
from dpsim.nn.network import Network
from dpsim.optimizer import Sgd
from dpsim.replica import Array, Batch, Replica

MODELS = ["mlp:5,4", "cnn:3,4,5", "mlp:9,8,norm=layer,dropout=0.2", "cnn:4,6,norm=group,dropout=0.2"]
SHAPE = (6, 5, 2)


def small(token: str, dtype: type = np.float64) -> Network:
    return build_model(token, SHAPE, 3, dtype)


def assert_close(one: dict[str, Array], other: dict[str, Array], rtol: float) -> None:
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=rtol, atol=rtol, err_msg=name)


def test_a_network_is_a_replica() -> None:
    replica: Replica = small("cnn:3")
    assert [layer.name for layer in replica.layers] == ["conv1", "bn1", "relu1", "average", "dense1"]


@pytest.mark.parametrize("leaves", [(0, 6), (0, 2, 6), (0, 1, 2, 4, 5, 6)])
@pytest.mark.parametrize("token", MODELS)
def test_gradients_are_the_slopes_of_the_summed_loss(token: str, leaves: tuple[int, ...]) -> None:
    network = small(token)
    parameters, gradients = bound(network)
    x, labels = batch_for(network, 6)
    network.forward_backward(Batch(x=x, labels=labels, leaves=leaves), Recorder())
    actual = {name: value.copy() for name, value in gradients.items()}
    random = np.random.default_rng(5)
    for name, parameter in parameters.items():
        for index in random.choice(parameter.size, min(parameter.size, 6), replace=False):
            kept, step = parameter.flat[index], 1e-6
            losses = []
            for moved in (kept + step, kept - step):
                parameter.flat[index] = moved
                losses.append(network.forward_backward(Batch(x=x, labels=labels, leaves=leaves), Recorder()).loss)
            parameter.flat[index] = kept
            slope = (losses[0] - losses[1]) / (2 * step)
            assert actual[name].flat[index] == pytest.approx(slope, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("token", MODELS)
@pytest.mark.parametrize("leaves", [(0, 4, 8), (0, 1, 2, 3, 4, 5, 6, 7, 8), (0, 3, 3, 8)])
def test_leaves_change_a_result_by_rounding_alone(token: str, leaves: tuple[int, ...]) -> None:
    network = small(token)
    x, labels = batch_for(network, 8)
    assert_close(gradients_of(network, x, labels), gradients_of(network, x, labels, leaves), rtol=1e-11)


def test_ranks_with_two_leaves_each_add_up_to_the_bits_of_one_rank_with_four() -> None:
    network = small("mlp:7,6", np.float32)
    x, labels = batch_for(network, 32)
    whole = gradients_of(network, x, labels, (0, 8, 16, 24, 32))
    halves = [gradients_of(network, x[part], labels[part], (0, 8, 16)) for part in (slice(0, 16), slice(16, 32))]
    assert all(whole[name].tobytes() == (halves[0][name] + halves[1][name]).tobytes() for name in whole)


@pytest.mark.parametrize("token", [MODELS[0], *MODELS[2:]])
@settings(max_examples=25)
@given(samples=st.integers(0, 20), devices=st.integers(1, 8))
def test_gradients_of_the_shares_of_ranks_add_up_to_those_of_the_batch(token: str, samples: int, devices: int) -> None:
    network = small(token)
    x, labels = batch_for(network, samples)
    _, gradients = bound(network)
    sums = network.forward_backward(Batch(x=x, labels=labels, leaves=(0, samples)), Recorder())
    whole = {name: value.copy() for name, value in gradients.items()}
    total = {name: np.zeros_like(value) for name, value in whole.items()}
    loss, correct, count = 0.0, 0, 0
    for rank in range(devices):
        start, stop = shard(samples, devices, rank)
        part = network.forward_backward(
            Batch(x=x[start:stop], labels=labels[start:stop], leaves=(0, stop - start), first_sample=start), Recorder()
        )
        loss, correct, count = loss + part.loss, correct + part.correct, count + part.samples
        for name in total:
            total[name] += gradients[name]
    assert_close(total, whole, rtol=1e-11)
    assert (correct, count) == (sums.correct, sums.samples) and loss == pytest.approx(sums.loss, rel=1e-12)


@pytest.mark.parametrize("leaves", [(0, 0), (0, 0, 0)])
@pytest.mark.parametrize("token", MODELS)
def test_a_rank_without_samples_writes_zeros_and_announces_everything(token: str, leaves: tuple[int, ...]) -> None:
    network = small(token)
    _, gradients = bound(network)
    x, labels = batch_for(network, 4)
    full, none = Recorder(), Recorder()
    network.forward_backward(Batch(x=x, labels=labels, leaves=(0, 4)), full)
    state = {name: value.copy() for name, value in network.state().items()}
    sums = network.forward_backward(Batch(x=x[:0], labels=labels[:0], leaves=leaves), none)
    assert (sums.loss, sums.correct, sums.samples) == (0.0, 0, 0)
    assert all(not value.any() for value in gradients.values())
    assert all(np.array_equal(state[name], value) for name, value in network.state().items())
    assert none.events == full.events


def test_announcements_come_in_order_and_a_layers_gradients_before_its_input_gradient() -> None:
    network = small("cnn:3,4")
    bound(network)
    recorder = Recorder()
    x, labels = batch_for(network, 4)
    network.forward_backward(Batch(x=x, labels=labels, leaves=(0, 4)), recorder)
    names = [spec.name for spec in network.layers]
    count = len(names)
    assert recorder.events[: count + 1] == [*(("forward", i) for i in range(count)), ("loss", -1)]
    backward = []
    for i in reversed(range(count)):
        backward += [("ready", i)] * bool(network.layers[i].tensors) + [("backward", i)]
    assert recorder.events[count + 1 :] == backward
    assert names == ["conv1", "bn1", "relu1", "pool1", "conv2", "bn2", "relu2", "average", "dense1"]


@pytest.mark.parametrize("leaves", [(0, 8), (0, 3, 8)])
@pytest.mark.parametrize("token", MODELS)
def test_announced_gradients_may_be_changed_while_backward_goes_on(token: str, leaves: tuple[int, ...]) -> None:
    """An allreduce in place starts at the announcement; what backward still computes must not read the result."""
    network = small(token)
    x, labels = batch_for(network, 8)
    undisturbed = gradients_of(network, x, labels, leaves)
    _, gradients = bound(network)
    taken: dict[str, Array] = {}

    class Overwrite(Recorder):
        def gradients_ready(self, layer: int) -> None:
            for tensor in network.layers[layer].tensors:
                taken[tensor.name] = gradients[tensor.name].copy()
                gradients[tensor.name][...] = np.nan

    network.forward_backward(Batch(x=x, labels=labels, leaves=leaves), Overwrite())
    assert all(taken[name].tobytes() == value.tobytes() for name, value in undisturbed.items())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("token", MODELS)
def test_every_array_of_a_step_keeps_its_dtype(token: str, dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    network = small(token, dtype)
    parameters, gradients = bound(network)
    assert all(value.dtype == dtype for value in parameters.values())
    x, labels = batch_for(network, 8)
    wrong: list[str] = []
    allowed = {np.dtype(dtype), np.dtype(bool), np.dtype(np.int64)}

    def watch(name: str) -> None:
        method = getattr(type(network.ops), name)

        def watched(self: object, *arrays: object, **named: object) -> object:
            for value in (*arrays, *named.values()):
                if isinstance(value, np.ndarray) and value.dtype not in allowed:
                    wrong.append(f"{name}: {value.dtype}")
            return method(self, *arrays, **named)

        monkeypatch.setattr(type(network.ops), name, watched)

    for name in set(dir(type(network.ops))) - {"zeros", "tolerate_overflow", "results"}:
        if not name.startswith("_"):
            watch(name)
    for leaves in ((0, 8), (0, 3, 8)):
        network.forward_backward(Batch(x=x, labels=labels, leaves=leaves), Recorder())
    network.evaluate(x, labels)
    velocity = {name: np.zeros_like(value) for name, value in parameters.items()}
    for name in parameters:
        w, g, v = (array[name].ravel() for array in (parameters, gradients, velocity))
        update(w, g, {"velocity": v}, Sgd(weight_decay=0.1), 0.05, 1 / 8, 1)
    assert not wrong
    held = arrays_in(network)
    assert len(held) > 20
    for named in (parameters, gradients, velocity, network.state()):
        held += named.values()
    assert {value.dtype for value in held} <= allowed


def arrays_in(network: Network) -> list[Array]:
    """Every array that the network's layers and buffers hold, found by walking what they refer to."""
    actual, seen, todo = [], set(), [network.chain, network.buffers]
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, type):
            continue
        seen.add(id(thing))
        if isinstance(thing, np.ndarray):
            actual.append(thing)
        elif isinstance(thing, (dict, list, tuple)) or type(thing).__module__.startswith("dpsim.nn"):
            todo.extend(gc.get_referents(thing))
    return actual


def test_evaluation_in_pieces_changes_nothing_but_uses_running_statistics() -> None:
    network = small("cnn:3,4")
    bound(network)
    x, labels = batch_for(network, 600)
    network.forward_backward(Batch(x=x, labels=labels, leaves=(0, 600)), Recorder())
    state = {name: value.copy() for name, value in network.state().items()}
    whole = network.evaluate(x, labels)
    parts = [network.evaluate(x[a:b], labels[a:b]) for a, b in ((0, 1), (1, 300), (300, 600))]
    assert whole.samples == 600 and whole.correct == sum(part.correct for part in parts)
    assert whole.loss == pytest.approx(sum(part.loss for part in parts), rel=1e-12)
    assert all(np.array_equal(state[name], value) for name, value in network.state().items())


def test_parameters_depend_on_the_seed_alone() -> None:
    first, again, other = (small("cnn:3,4").initial_parameters(seed) for seed in (0, 0, 1))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["conv1.weight"], other["conv1.weight"])


def test_a_batch_of_another_shape_dtype_or_length_is_refused() -> None:
    network = small("cnn:3")
    bound(network)
    x, labels = batch_for(network, 4)
    for wrong_x, wrong_labels, leaves, text in (
        (x[:, :3], labels, (0, 4), r"samples of shape \(6, 5, 2\)"),
        (x.astype(np.float32), labels, (0, 4), "dtype float64"),
        (x, labels[:3], (0, 4), "one label a sample"),
        (x, labels, (0, 3), "boundaries from 0 up to 4"),
        (x, labels, (0, 3, 2, 4), "boundaries from 0 up to 4"),
    ):
        with pytest.raises(ConfigError, match=text):
            network.forward_backward(Batch(x=wrong_x, labels=wrong_labels, leaves=leaves), Recorder())


def test_the_origin_of_a_nan_is_named_and_nothing_is_changed() -> None:
    network = small("cnn:3,4", np.float32)
    parameters, gradients = bound(network)
    x, labels = batch_for(network, 4)
    network.forward_backward(Batch(x=x, labels=labels, leaves=(0, 4)), Recorder())
    state = {name: value.copy() for name, value in network.state().items()}
    assert network.first_nonfinite_layer(x, labels) is None
    gradients["bn1.beta"][0] = np.inf
    gradients["dense1.bias"][0] = np.nan
    assert network.first_nonfinite_layer(x, labels) == "gradient dense1.bias of layer 'dense1'"
    kept = parameters["conv2.weight"].copy()
    parameters["conv2.weight"][...] = 3e38
    assert network.first_nonfinite_layer(x, labels) == "the output of layer 'conv2'"
    parameters["conv2.weight"][...] = kept
    parameters["bn2.gamma"][1] = np.nan
    assert network.first_nonfinite_layer(x, labels) == "parameter bn2.gamma of layer 'bn2'"
    x[0, 0, 0, 0] = np.nan
    assert network.first_nonfinite_layer(x, labels) == "the input batch"
    assert all(np.array_equal(state[name], value) for name, value in network.state().items())


def test_overflow_raises_no_warning_and_gives_a_loss_that_is_not_finite() -> None:
    network = small("mlp:4", np.float32)
    parameters, _ = bound(network)
    for value in parameters.values():
        value[...] = 1e30
    x, labels = batch_for(network, 4)
    batch = Batch(x=x, labels=labels, leaves=(0, 4))
    assert not np.isfinite(network.forward_backward(batch, Recorder()).loss)


def test_the_cnn_learns_digits_in_a_few_epochs() -> None:
    digits = load_dataset("digits")
    network = build_model("cnn", digits.input_shape, digits.classes)
    parameters, gradients = bound(network)
    velocity = {name: np.zeros_like(value) for name, value in parameters.items()}
    for epoch in range(5):
        for batch in epoch_batches(len(digits.train_x), 64, 0, epoch):
            share = Batch(x=digits.train_x[batch], labels=digits.train_y[batch], leaves=(0, len(batch)))
            network.forward_backward(share, Recorder())
            for name, value in parameters.items():
                g, v = (array[name].reshape(-1) for array in (gradients, velocity))
                update(value.reshape(-1), g, {"velocity": v}, Sgd(), 0.05, 1 / len(batch), 1)
    sums = network.evaluate(digits.test_x, digits.test_y)
    assert sums.correct / sums.samples > 0.95
