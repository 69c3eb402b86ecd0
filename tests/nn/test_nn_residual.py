"""Residual connections: values and gradients of nested branches, shortcuts of every kind, and the residual networks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from nn_setup import Recorder, batch_for, bound, gradients_of

from dpsim.data import epoch_batches, load_dataset
from dpsim.errors import ConfigError
from dpsim.nn import Network, build_model, update
from dpsim.nn.batch_norm import BatchNorm
from dpsim.nn.layer import Layer
from dpsim.nn.layers import Conv2D, Dense, Dropout, Flatten, GlobalAveragePool, ReLU
from dpsim.nn.numpy_ops import NumpyOps
from dpsim.nn.residual import Subsample, layers_read, residual
from dpsim.nn.sample_norm import GroupNorm
from dpsim.optimizer import Sgd
from dpsim.replica import Batch

OPS = NumpyOps()
F8 = np.float64
SHAPE = (4, 5, 2)


def conv(name: str, shape: tuple[int, int, int] = SHAPE, outputs: int = 2, kernel: int = 3, stride: int = 1) -> Conv2D:
    return Conv2D(name, OPS, shape, outputs, F8, kernel, stride)


def relu(name: str, shape: tuple[int, ...] = SHAPE) -> ReLU:
    return ReLU(name, OPS, shape, F8)


def nested() -> list[Layer]:
    inner = residual("inner", [conv("b"), relu("rb")])
    return residual("outer", [conv("a"), *inner, conv("c")])


def projection() -> list[Layer]:
    """The other way to widen: a convolution of 1 x 1 with a stride, and a norm (option B of the paper)."""
    body = [conv("a", outputs=4, stride=2), BatchNorm("ba", OPS, (2, 3, 4), F8), relu("ra", (2, 3, 4))]
    shortcut = [conv("p", outputs=4, kernel=1, stride=2), BatchNorm("bp", OPS, (2, 3, 4), F8)]
    return residual("r", body, shortcut)


def subsampled() -> list[Layer]:
    return residual("r", [conv("a", outputs=5, stride=2)], [Subsample("s", OPS, SHAPE, 5, F8)])


def nested_in_the_shortcut() -> list[Layer]:
    return residual("o", [conv("a"), relu("ra")], [relu("rs"), *residual("i", [conv("b")], [relu("ri")])])


CHAINS: dict[str, Callable[[], list[Layer]]] = {
    "identity": lambda: residual("r", [conv("a"), relu("ra"), conv("b")]),
    "body that overwrites its gradient": lambda: residual("r", [relu("ra")]),
    "shortcut that overwrites its gradient": lambda: residual("r", [conv("a")], [relu("rs")]),
    "a view as input": lambda: [relu("r0"), *residual("r", [relu("ra"), relu("rb")])],
    "group norm last": lambda: residual("r", [conv("a"), GroupNorm("g", OPS, SHAPE, F8, groups=1)]),
    "dropout": lambda: residual("r", [conv("a"), Dropout("d", OPS, SHAPE, F8, 0.5)], [relu("rs")]),
    "subsample": subsampled,
    "projection": projection,
    "two in a row": lambda: [*residual("r", [conv("a")]), *residual("q", [conv("b")])],
    "nested": nested,
    "nested in the shortcut": nested_in_the_shortcut,
}


def network_of(chain: list[Layer], before: bool) -> Network:
    """The chain between layers that train, or at the very beginning of a network."""
    shape = chain[-1].output_shape
    first: list[Layer] = [conv("first")] if before else []
    last = [GlobalAveragePool("average", OPS, shape, F8), Dense("last", OPS, shape[-1], 3, F8)]
    return Network([*first, *chain, *last], OPS)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("build", CHAINS.values(), ids=CHAINS.keys())
def test_gradients_through_branches_are_the_slopes_of_the_loss(build: Callable[[], list[Layer]], before: bool) -> None:
    network = network_of(build(), before)
    parameters, gradients = bound(network)
    x, labels = batch_for(network, 5)
    batch = Batch(x=x, labels=labels, leaves=(0, 2, 5))
    network.forward_backward(batch, Recorder())
    actual = {name: value.copy() for name, value in gradients.items()}
    random, step = np.random.default_rng(5), 1e-6
    for name, parameter in parameters.items():
        for index in random.choice(parameter.size, min(parameter.size, 6), replace=False):
            kept = parameter.flat[index]
            losses = []
            for moved in (kept + step, kept - step):
                parameter.flat[index] = moved
                losses.append(network.forward_backward(batch, Recorder()).loss)
            parameter.flat[index] = kept
            slope = (losses[0] - losses[1]) / (2 * step)
            assert actual[name].flat[index] == pytest.approx(slope, rel=1e-5, abs=1e-6), name


def test_a_residual_is_its_body_plus_its_shortcut() -> None:
    body, shortcut = [conv("a", outputs=3, stride=2)], [Subsample("s", OPS, SHAPE, 3, F8)]
    x = np.random.default_rng(0).standard_normal((2, *SHAPE))
    chain = residual("r", body, shortcut)
    for layer in chain:
        layer.bind(values := layer.initial_parameters(0), values)
    expected = body[0].forward(x, (0, 2), training=True) + shortcut[0].forward(x, (0, 2), training=True)
    kept, y = x.copy(), x
    for layer in chain:
        assert y.shape[1:] == layer.input_shape, layer.name
        y = layer.forward(y, (0, 2), training=True)
        assert y.shape[1:] == layer.output_shape, layer.name
    np.testing.assert_allclose(y, expected, rtol=1e-12)
    assert np.array_equal(x, kept)
    assert [layer.kind for layer in chain] == ["fork", "conv", "swap", "subsample", "join"]


def test_branches_that_do_not_fit_together_are_refused() -> None:
    for body, shortcut, text in (
        ([], [], "has no body"),
        ([conv("a", outputs=3)], [], "the body must keep the shape"),
        ([conv("a", outputs=3)], [relu("s")], r"a shortcut from \(4, 5, 2\) to \(4, 5, 3\)"),
        ([relu("a")], [relu("s", (5, 4, 2))], r"a shortcut from \(5, 4, 2\)"),
    ):
        with pytest.raises(ConfigError, match=text):
            residual("r", body, shortcut)


def test_a_nan_in_a_branch_is_named() -> None:
    network = network_of(projection(), before=True)
    parameters, _ = bound(network)
    x, labels = batch_for(network, 3)
    network.forward_backward(Batch(x=x, labels=labels, leaves=(0, 3)), Recorder())
    assert network.first_nonfinite_layer(x, labels) is None
    parameters["p.weight"][0] = np.nan
    assert network.first_nonfinite_layer(x, labels) == "parameter p.weight of layer 'p'"
    parameters["p.weight"][0] = 0
    parameters["bp.beta"][0] = parameters["ba.beta"][0] = 1e308
    assert network.first_nonfinite_layer(x, labels) == "the output of layer 'r.join'"


@pytest.mark.parametrize(("depth", "count"), [(20, 269_722), (32, 464_154), (44, 658_586), (56, 853_018)])
def test_residual_networks_for_cifar_have_the_published_number_of_parameters(depth: int, count: int) -> None:
    layers = build_model(f"resnet{depth}", (32, 32, 3), 10).layers
    tensors = [tensor for layer in layers for tensor in layer.tensors]
    assert sum(tensor.elements for tensor in tensors) == count
    assert sum(layer.kind in ("conv", "dense") for layer in layers) == depth
    assert sum(layer.kind == "subsample" for layer in layers) == 2
    assert len({layer.name for layer in layers}) == len(layers)


@pytest.mark.parametrize(("side", "last"), [(32, (8, 8, 64)), (8, (2, 2, 64)), (5, (2, 2, 64)), (4, (1, 1, 64))])
def test_a_resnet_halves_its_pictures_twice(side: int, last: tuple[int, int, int]) -> None:
    network = build_model("resnet20:norm=group", (side, side, 1), 10)
    assert next(layer.input_shape for layer in network.chain if layer.kind == "average-pool") == last


def test_shares_of_a_batch_add_up_in_a_resnet_with_group_norm_and_dropout() -> None:
    network = build_model("resnet20:norm=group,dropout=0.3", (4, 5, 1), 3, F8)
    x, labels = batch_for(network, 7)
    whole = gradients_of(network, x, labels)
    _, gradients = bound(network)
    total = {name: np.zeros_like(value) for name, value in whole.items()}
    for start, stop in ((0, 3), (3, 3), (3, 7)):
        share = Batch(x=x[start:stop], labels=labels[start:stop], leaves=(0, stop - start), first_sample=start)
        network.forward_backward(share, Recorder())
        for name in total:
            total[name] += gradients[name]
    for name, value in whole.items():
        np.testing.assert_allclose(total[name], value, rtol=1e-9, atol=1e-11, err_msg=name)


def test_a_flatten_may_stand_before_a_residual() -> None:
    """Its output is a view of the batch, which must come out unchanged."""
    dense = Dense("d", OPS, 4, 4, F8)
    chain = [Flatten("f", OPS, (2, 2, 1), F8), *residual("r", [ReLU("ra", OPS, (4,), F8)]), *residual("q", [dense])]
    network = Network([*chain, Dense("last", OPS, 4, 3, F8)], OPS)
    x, labels = batch_for(network, 5)
    kept = x.copy()
    first, again = gradients_of(network, x, labels), gradients_of(network, x, labels)
    assert np.array_equal(x, kept) and all(np.array_equal(first[name], again[name]) for name in first)


def test_the_resnet_learns_digits_in_two_epochs() -> None:
    digits = load_dataset("digits")
    network = build_model("resnet20", digits.input_shape, digits.classes)
    parameters, gradients = bound(network)
    velocity = {name: np.zeros_like(value) for name, value in parameters.items()}
    for epoch in range(2):
        for batch in epoch_batches(len(digits.train_x), 64, 0, epoch):
            share = Batch(x=digits.train_x[batch], labels=digits.train_y[batch], leaves=(0, len(batch)))
            network.forward_backward(share, Recorder())
            for name, value in parameters.items():
                flat = [array[name].reshape(-1) for array in (gradients, velocity)]
                update(value.reshape(-1), flat[0], {"velocity": flat[1]}, Sgd(), 0.05, 1 / len(batch), 1)
    sums = network.evaluate(digits.test_x, digits.test_y)
    assert sums.correct / sums.samples > 0.88


def test_the_other_branch_reads_the_layer_before_the_fork() -> None:
    network = build_model("resnet20", (8, 8, 1), 3)
    read = {spec.name: spec.depends_on for spec in network.layers if spec.depends_on is not None}
    assert read["stage1.block1.join"] == ("relu1", "stage1.block1.bn2")
    assert read["stage2.block1.swap"] == ("stage1.block3.relu2",)
    assert read["stage2.block1.join"] == ("stage2.block1.bn2", "stage2.block1.subsample")
    assert len(read) == 9 + 2
    chain = residual("outer", [*residual("inner", [relu("relu")]), relu("last")])
    assert layers_read(chain) == [None, None, None, ("outer.fork", "relu"), None, ("outer.fork", "last")]
