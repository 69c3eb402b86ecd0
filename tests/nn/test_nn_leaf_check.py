"""A leaf is computed alone and amid others before training in leaves on a device: the first difference is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dpsim.memory import HOST
from dpsim.nn.device_ops import DeviceOps
from dpsim.nn.models import build_model
from dpsim.nn.ops import Ops
from dpsim.replica import Array, Batch, Leaves

SHAPE, CLASSES = (6, 6, 1), 3


class Different(DeviceOps):
    """Operations of which one gives other bits where there are several leaves."""

    def __init__(self, operation: str) -> None:
        super().__init__(HOST)
        self._operation = operation

    def in_leaves(self) -> Ops:
        return self

    def _spoil(self, operation: str, out: Array, differs: bool) -> None:
        if differs and operation == self._operation:
            out[-1] *= np.float32(1 + 2**-20)

    def product(self, x: Array, weight: Array, leaves: Leaves, out: Array) -> None:
        super().product(x, weight, leaves, out)
        self._spoil("product", out, len(leaves) > 2)

    def product_with_transposed(self, grad: Array, weight: Array, leaves: Leaves, out: Array) -> None:
        super().product_with_transposed(grad, weight, leaves, out)
        self._spoil("product_with_transposed", out, len(leaves) > 2)

    def transposed_product(self, x: Array, grad: Array, leaves: Leaves, out: Array) -> None:
        super().transposed_product(x, grad, leaves, out)
        self._spoil("transposed_product", out, leaves[0] > 0)


def batch(leaves: Leaves) -> Batch:
    random = np.random.default_rng(0)
    x = random.standard_normal((leaves[-1], *SHAPE)).astype(np.float32)
    return Batch(x=x, labels=random.integers(0, CLASSES, leaves[-1]), leaves=leaves, seed=1, step=2, first_sample=9)


@pytest.mark.parametrize("leaves", [(0, 5), (0, 2, 4, 6), (0, 3, 3, 4, 6, 8)])
@pytest.mark.parametrize("token", ["mlp:8,norm=layer,dropout=0.3", "cnn:4,6,crop=1", "cnn:4,norm=group"])
def test_leaves_in_numpy_have_the_same_bits_alone_and_amid_others(token: str, leaves: Leaves) -> None:
    network = build_model(token, SHAPE, CLASSES)
    network.compute_in(HOST)
    before: dict[str, Any] = {name: value.copy() for name, value in network.state().items()}
    assert network.leaf_difference(batch(leaves)) is None
    assert all((network.state()[name] == value).all() for name, value in before.items())


@pytest.mark.parametrize(
    ("operation", "said"),
    [
        ("product", "the forward pass of layer 'dense1'"),
        ("product_with_transposed", "the input gradient of layer 'dense2'"),
        ("transposed_product", "the gradient weight of layer 'dense2'"),
    ],
)
def test_the_first_operation_that_differs_is_named(operation: str, said: str) -> None:
    network = build_model("mlp:8", SHAPE, CLASSES, ops=Different(operation))
    assert network.leaf_difference(batch((0, 2, 4, 6))) == said
