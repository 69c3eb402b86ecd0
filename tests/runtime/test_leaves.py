"""Leaves: the same bits on any number of devices, for every layer, optimizer, batch and way over the leaves."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nn_setup import Recorder, batch_for
from virtual_ranks import Trained, train

from dpsim.data import load_dataset
from dpsim.errors import ConfigError, NotFiniteError
from dpsim.kernels.allreduce.tree import fold, leaf_tree
from dpsim.nn import FunctionReplica, Network, build_model
from dpsim.optimizer import AdamW, Optimizer, Sgd
from dpsim.plan import Plan
from dpsim.replica import Array, Batch, Replica, Slot
from dpsim.runtime.micro_batches import own_slots, plan_micro_batches, plan_partial_sums, slot_sums

DEVICES = (1, 2, 3, 5, 8)
SGD, ADAMW = Sgd(learning_rate=0.05, momentum=0.9, weight_decay=0.01), AdamW(learning_rate=0.01)
PICTURES, ROWS = "synthetic:6x5x2,classes=3,train=70,test=10", "synthetic:10x10x4,classes=5,train=70,test=10"


def trained(
    model: str | Callable[[], Replica],
    dataset: str,
    devices: int,
    optimizer: Optimizer = SGD,
    steps: int = 3,
    **plan: Any,
) -> Trained:
    data = load_dataset(dataset)
    chosen = {"global_batch": 32, "leaves": 8, "batch_norm": "leaf", "fusion_threshold_bytes": 0.0} | plan
    build = model if callable(model) else lambda: build_model(model, data.input_shape, data.classes)
    return train(build, data, Plan(devices=devices, optimizer=optimizer, **chosen), steps)


def assert_same(model: str | Callable[[], Replica], dataset: str, optimizer: Optimizer = SGD, **plan: Any) -> None:
    alone = trained(model, dataset, 1, optimizer, **plan)
    assert all(np.isfinite(alone["losses"])) and len(set(alone["losses"])) > 1
    for devices in DEVICES[1:]:
        assert trained(model, dataset, devices, optimizer, **plan) == alone, devices


@pytest.mark.parametrize("optimizer", [SGD, ADAMW])
@pytest.mark.parametrize("model", ["mlp:9,8", "mlp:400,350,dropout=0.2"])
def test_an_mlp_has_the_same_bits_on_any_number_of_devices(model: str, optimizer: Optimizer) -> None:
    assert_same(model, ROWS, optimizer)


@pytest.mark.parametrize("norm", ["none", "group", "layer", "instance"])
def test_a_cnn_has_the_same_bits_on_any_number_of_devices(norm: str) -> None:
    assert_same(f"cnn:4,6,norm={norm},dropout=0.3,crop=2,flip=0.5", PICTURES)


@pytest.mark.parametrize("mode", ["leaf", "global"])
@pytest.mark.parametrize(("batch", "samples"), [(32, 70), (29, 37), (9, 14)])
def test_batch_norm_has_the_same_bits_on_any_number_of_devices(mode: str, batch: int, samples: int) -> None:
    """A last batch of 5 samples leaves some leaves, and some devices, without any."""
    assert_same("cnn:4,6", PICTURES.replace("70", str(samples)), batch_norm=mode, global_batch=batch)


@pytest.mark.parametrize("mode", ["leaf", "global"])
def test_a_residual_network_has_the_same_bits_on_any_number_of_devices(mode: str) -> None:
    assert_same("resnet20", "synthetic:8x8x3,classes=4,train=20,test=4", batch_norm=mode, global_batch=16, steps=2)


@pytest.mark.parametrize(("batch", "samples"), [(29, 37), (13, 20), (8, 13)])
def test_batches_that_the_leaves_do_not_divide_or_fill_have_the_same_bits(batch: int, samples: int) -> None:
    assert_same("cnn:4,norm=group", PICTURES.replace("70", str(samples)), global_batch=batch)
    assert_same("mlp:400,350", ROWS.replace("70", str(samples)), global_batch=batch)


@pytest.mark.parametrize("leaves", [11, 16])
def test_any_number_of_leaves_gives_the_same_bits_on_any_number_of_devices(leaves: int) -> None:
    assert_same("mlp:9,8", ROWS, leaves=leaves)


@pytest.mark.parametrize(("devices", "accumulate"), [(1, 2), (1, 3), (1, 8), (2, 2), (3, 2), (2, 4)])
def test_micro_batches_are_leaves(devices: int, accumulate: int) -> None:
    """Computed one after another or at once, with batch norm's statistics too: the same bits."""
    assert trained("cnn:4", PICTURES, devices, accumulate=accumulate) == trained("cnn:4", PICTURES, 1)


def softmax_regression(w: Any, x: Array, labels: Array) -> tuple[float, int, dict[str, Array]]:
    x, target = x.reshape(len(x), -1), np.eye(5, dtype=x.dtype)[labels]
    p = np.exp(x @ w["weight"])
    p /= p.sum(axis=1, keepdims=True)
    correct = int((p.argmax(axis=1) == labels).sum())
    return float(-np.log(p[target > 0]).sum()), correct, {"weight": x.T @ (p - target)}


def test_a_model_of_ones_own_has_the_same_bits_on_any_number_of_devices() -> None:
    """The runtime gives it one leaf after another; it knows nothing of leaves."""
    assert_same(lambda: FunctionReplica({"weight": np.zeros((400, 5), np.float32)}, softmax_regression), ROWS)


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("cnn:4,6", {"wire_dtype": "float16", "batch_norm": "leaf"}),
        ("cnn:4,6", {"wire_dtype": "bfloat16", "batch_norm": "global", "global_batch": 29}),
        ("cnn:4,norm=group", {"wire_dtype": "bfloat16", "leaves": 11, "algorithm": "ring"}),
        ("mlp:9,8,dropout=0.2", {"wire_dtype": "float16", "global_batch": 13, "algorithm": "halving-doubling"}),
    ],
)
def test_16_bits_on_the_wire_have_the_same_bits_on_any_number_of_devices(model: str, plan: dict[str, Any]) -> None:
    """37 samples leave a last batch of 5 or 8 or 11."""
    assert_same(model, PICTURES.replace("70", "37"), **plan)
    assert trained(model, PICTURES.replace("70", "37"), 1, **plan) != trained(
        model, PICTURES.replace("70", "37"), 1, **plan | {"wire_dtype": None}
    ), "one device rounds too"


@pytest.mark.parametrize("model", ["mlp:9,8", "cnn:4,6"])
def test_operands_in_bfloat16_have_the_same_bits_on_any_number_of_devices(model: str) -> None:
    assert_same(model, PICTURES.replace("70", "37"), compute_dtype="bfloat16")
    assert trained(model, PICTURES, 1, compute_dtype="bfloat16") != trained(model, PICTURES, 1)


def test_micro_batches_are_leaves_with_16_bits_too() -> None:
    plan = {"wire_dtype": "float16"}
    assert trained("cnn:4", PICTURES, 1, accumulate=3, **plan) == trained("cnn:4", PICTURES, 2, accumulate=4, **plan)
    assert trained("cnn:4", PICTURES, 1, **plan) == trained("cnn:4", PICTURES, 2, accumulate=4, **plan)


class LeafByLeaf:
    """A network that hides that it takes leaves: the runtime gives it one at a time, rounds and adds."""

    def __init__(self, network: Network) -> None:
        self.layers, self.initial_parameters, self.state = network.layers, network.initial_parameters, network.state
        self.forward_backward, self.evaluate = network.forward_backward, network.evaluate
        self.bind = network.bind


def test_a_replica_that_knows_nothing_of_leaves_is_rounded_as_one_that_rounds_by_itself() -> None:
    data = load_dataset(PICTURES)
    plan = {"wire_dtype": "float16", "global_batch": 29}

    def hidden() -> Replica:
        network = build_model("cnn:4,norm=group", data.input_shape, data.classes)
        network.train_in_leaves(True, None)
        return LeafByLeaf(network)

    assert_same(hidden, PICTURES, **plan)
    assert trained(hidden, PICTURES, 3, **plan) == trained("cnn:4,norm=group", PICTURES, 2, **plan)


def test_rounding_where_devices_part_alone_depends_on_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: only what is sent is rounded, not what a device adds up by itself."""
    in_leaves = Network.train_in_leaves
    monkeypatch.setattr(Network, "train_in_leaves", lambda self, given, rounding: in_leaves(self, given, None))
    runs = [trained("mlp:9,8", ROWS, devices, wire_dtype="float16") for devices in (1, 2, 4)]
    assert runs[0] != runs[1] != runs[2] != runs[0]


@pytest.mark.parametrize("devices", [1, 2])
def test_gradients_that_16_bits_cannot_hold_end_the_training_on_any_number_of_devices(
    devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpsim.runtime.step._ROOT_CAUSE_GRACE_S", 0)

    def steep(w: Any, x: Array, labels: Array) -> tuple[float, int, dict[str, Array]]:
        return 1.0, 0, {"weight": np.full(3, 1e6, np.float32)}

    with pytest.raises(NotFiniteError, match="sent as float16, is not in step 1"):
        trained(
            lambda: FunctionReplica({"weight": np.zeros(3, np.float32)}, steep),
            ROWS,
            devices,
            wire_dtype="float16",
            global_batch=8,
        )


def test_plain_sums_differ() -> None:
    """The negative control: without leaves the bits depend on the number of devices."""
    plain = {"leaves": 0, "batch_norm": "local", "algorithm": "recursive-doubling"}
    one, two = (trained("mlp:9,8", ROWS, devices, **plain) for devices in (1, 2))
    assert one != two
    np.testing.assert_allclose(one["losses"], two["losses"], rtol=1e-5)


@given(leaves=st.integers(1, 40), devices=st.integers(1, 12), accumulate=st.integers(1, 5), takes=st.booleans())
def test_passes_add_every_leaf_once_along_the_tree(leaves: int, devices: int, accumulate: int, takes: bool) -> None:
    if leaves < devices * accumulate:
        with pytest.raises(ConfigError, match="leaves"):
            Plan(devices=devices, global_batch=999, leaves=leaves, batch_norm="leaf", accumulate=accumulate)
        return
    plan = Plan(devices=devices, global_batch=999, leaves=leaves, batch_norm="leaf", accumulate=accumulate)
    actual: list[Any] = []
    first_of_rank = 0
    for rank in range(devices):
        micro_batches = plan_micro_batches(plan, rank, takes_leaves=takes)
        assert len(micro_batches) >= (accumulate if takes else 1)
        held: list[list[Any]] = []
        for one in micro_batches:
            edges = [*one.edges, one.stop - one.first]
            of_slots = [
                fold(leaf_tree(stop - start), range(first_of_rank + one.first + start, leaves).__getitem__, pair)
                for start, stop in itertools.pairwise(edges)
            ]
            held.append(of_slots)
        mine = slot_sums(micro_batches, held, pair)
        assert len(mine) == len(own_slots(plan, rank)) == len(plan_partial_sums(plan).of(rank))
        actual += mine
        first_of_rank += micro_batches[-1].stop
    assert fold(plan_partial_sums(plan).tree, actual.__getitem__, pair) == leaf_tree(leaves)


def pair(left: Any, right: Any) -> Any:
    return left, right


@pytest.mark.parametrize(
    "token",
    [
        "mlp:400,350,dropout=0.2,norm=layer",
        "cnn:4,18,norm=group,dropout=0.2",
        "cnn:4,6,norm=instance",
        "cnn:5,3",
        "resnet20",
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_a_leaf_gives_does_not_depend_on_the_leaves_beside_it(token: str, dtype: type) -> None:
    """Layer by layer, forward and backward: the cause of all the rest."""
    network = build_model(token, (8, 7, 3) if token[0] != "m" else (10, 10, 4), 3, dtype)
    x, labels = batch_for(network, 21)
    edges = (0, 3, 3, 10, 11, 16, 21)
    together = watched(network, x, labels, edges, 0)
    for number, (start, stop) in enumerate(itertools.pairwise(edges)):
        if stop > start:
            alone = watched(network, x[start:stop], labels[start:stop], (0, stop - start), start)
            for (name, whole), (_, part) in zip(together, alone, strict=True):
                of_leaf = whole[start:stop] if len(whole) == 21 else whole[number]
                assert of_leaf.tobytes() == (part if len(whole) == 21 else part[0]).tobytes(), name


def watched(network: Network, x: Array, labels: Array, leaves: tuple[int, ...], first: int) -> list[tuple[str, Array]]:
    """The output and the input gradient of each layer, and the gradients of each leaf, a slot each."""
    parameters = network.initial_parameters(1)
    slots = [{name: np.zeros_like(value) for name, value in parameters.items()} for _ in leaves[1:]]
    network.bind(parameters, slots[0], [Slot(number, slot) for number, slot in enumerate(slots[1:], start=1)])
    network.normalise_batches("leaf", lambda arrays: arrays[0])
    actual: list[tuple[str, Array]] = []
    with pytest.MonkeyPatch.context() as patch:
        for layer in network.chain:

            def forward(*a: Any, done: Any = layer.forward, name: str = layer.name, **k: Any) -> Array:
                actual.append((f"{name} forward", (y := done(*a, **k)).copy()))
                return y

            def backward(*a: Any, done: Any = layer.input_gradient, name: str = layer.name) -> Array:
                actual.append((f"{name} backward", (dx := done(*a)).copy()))
                return dx

            patch.setattr(layer, "forward", forward)
            patch.setattr(layer, "input_gradient", backward)
        batch = Batch(x=x, labels=labels, leaves=leaves, seed=4, step=2, first_sample=first)
        sums = network.forward_backward(batch, Recorder())
    actual.append(("losses", np.array(sums.slot_losses)))
    for name in parameters:
        actual.append((name, np.stack([slot[name] for slot in slots])))
    return actual
