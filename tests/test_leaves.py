"""Leaves: the same bits on any number of devices, for every layer, optimizer, batch and way over the leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from virtual_ranks import Trained, train

from dpsim.data import load_dataset
from dpsim.nn import build_model
from dpsim.optimizer import AdamW, Optimizer, Sgd
from dpsim.plan import Plan

DEVICES = (1, 2, 3, 4, 5, 8)
SGD, ADAMW = Sgd(learning_rate=0.05, momentum=0.9, weight_decay=0.01), AdamW(learning_rate=0.01)
PICTURES, ROWS = "synthetic:6x5x2,classes=3,train=70,test=10", "synthetic:10x10x4,classes=5,train=70,test=10"


def trained(model: str, dataset: str, devices: int, optimizer: Optimizer = SGD, steps: int = 4, **plan: Any) -> Trained:
    data = load_dataset(dataset)
    chosen = {"global_batch": 32, "leaves": 8, "batch_norm": "leaf", "fusion_threshold_bytes": 0.0} | plan
    plan_of_case = Plan(devices=devices, optimizer=optimizer, **chosen)
    return train(lambda: build_model(model, data.input_shape, data.classes), data, plan_of_case, steps)


def assert_same(model: str, dataset: str, optimizer: Optimizer = SGD, **plan: Any) -> None:
    alone = trained(model, dataset, 1, optimizer, **plan)
    assert all(np.isfinite(alone["losses"])) and len(set(alone["losses"])) > 1
    for devices in DEVICES[1:]:
        assert trained(model, dataset, devices, optimizer, **plan) == alone, devices


@pytest.mark.parametrize("optimizer", [SGD, ADAMW])
@pytest.mark.parametrize("model", ["mlp:9,8", "mlp:400,350,dropout=0.2", "mlp:20,norm=layer"])
def test_an_mlp_has_the_same_bits_on_any_number_of_devices(model: str, optimizer: Optimizer) -> None:
    assert_same(model, ROWS, optimizer)


@pytest.mark.parametrize("norm", ["none", "group", "layer", "instance"])
def test_a_cnn_has_the_same_bits_on_any_number_of_devices(norm: str) -> None:
    assert_same(f"cnn:4,6,norm={norm},dropout=0.3", PICTURES)


@pytest.mark.parametrize("mode", ["leaf", "global"])
@pytest.mark.parametrize("batch", [32, 29, 9])
def test_batch_norm_has_the_same_bits_on_any_number_of_devices(mode: str, batch: int) -> None:
    """With 9 of 70 samples some leaves have one sample, and in the last batch some devices have none."""
    assert_same("cnn:4,6", PICTURES, batch_norm=mode, global_batch=batch, steps=10 if batch == 9 else 4)


@pytest.mark.parametrize("mode", ["leaf", "global"])
def test_a_residual_network_has_the_same_bits_on_any_number_of_devices(mode: str) -> None:
    assert_same("resnet20", "synthetic:8x8x3,classes=4,train=20,test=4", batch_norm=mode, global_batch=16, steps=2)


@pytest.mark.parametrize("batch", [29, 13, 8])
def test_batches_that_the_leaves_do_not_divide_or_fill_have_the_same_bits(batch: int) -> None:
    """70 samples: the last batches have 12, 5 and 6, where some leaves, and some devices, have none."""
    assert_same("cnn:4,norm=group", PICTURES, global_batch=batch, steps=10)
    assert_same("mlp:400,350", ROWS, global_batch=batch, steps=7)


@pytest.mark.parametrize("leaves", [8, 11, 16])
def test_numbers_of_leaves_that_are_no_power_of_two_have_the_same_bits(leaves: int) -> None:
    assert_same("mlp:9,8", ROWS, leaves=leaves)


def test_plain_sums_differ() -> None:
    """The negative control: without leaves the bits depend on the number of devices."""
    plain = {"leaves": 0, "batch_norm": "local", "algorithm": "recursive-doubling"}
    one, two = (trained("mlp:9,8", ROWS, devices, **plain) for devices in (1, 2))
    assert one != two
    np.testing.assert_allclose(one["losses"], two["losses"], rtol=1e-5)
