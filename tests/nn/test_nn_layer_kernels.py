"""Layers with kernels of their own, by the reference of these: joined or apart the same bits, close to NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dpsim.memory import HOST, Memory
from dpsim.nn import build_model
from dpsim.nn.batch_norm import BatchNorm
from dpsim.nn.device_ops import DeviceOps
from dpsim.nn.layer import tree_sum
from dpsim.nn.layers import Conv2D, Dense, GlobalAveragePool, ReLU
from dpsim.nn.network import Network, NoEvents
from dpsim.nn.numpy_ops import NumpyOps
from dpsim.nn.ops import Ops
from dpsim.nn.residual import Subsample, residual
from dpsim.replica import Array, Batch

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (pip install -e '.[dev]')")
from layer_reference import TwinMemory  # imports numba-cuda

SHAPE = (6, 5, 2)


def built(token: str, dtype: Any, ops: Ops) -> Network:
    """A built-in model, or a small one with a ``residual`` block that halves the picture."""
    if token != "residual":
        return build_model(token, SHAPE, 3, dtype, ops=ops)
    halved = (3, 3, 4)
    body = [
        Conv2D("conv1", ops, SHAPE, 4, dtype, stride=2),
        BatchNorm("bn1", ops, halved, dtype),
        ReLU("relu1", ops, halved, dtype),
        Conv2D("conv2", ops, halved, 4, dtype),
        BatchNorm("bn2", ops, halved, dtype),
    ]
    block = residual("block", body, [Subsample("subsample", ops, SHAPE, 4, dtype)])
    first = [
        Conv2D("conv0", ops, SHAPE, 2, dtype),
        BatchNorm("bn0", ops, SHAPE, dtype),
        ReLU("relu0", ops, SHAPE, dtype),
    ]
    last = [ReLU("relu2", ops, halved, dtype), GlobalAveragePool("average", ops, halved, dtype)]
    return Network([*first, *block, *last, Dense("dense1", ops, 4, 3, dtype)], ops)


def joined(token: str, dtype: Any) -> Network:
    """A network whose norms and sums compute the rectifiers that follow them, as in the memory of a device."""
    network = built(token, dtype, NumpyOps())
    network.compute_in(TwinMemory())
    return network


def apart(token: str, dtype: Any, memory: Memory) -> Network:
    return built(token, dtype, DeviceOps(memory))


def trained(network: Network, mode: str, edges: tuple[int, ...] = (0, 2, 3, 4)) -> dict[str, Array]:
    """Gradients, state, loss and test of a step; ``edges`` are those of the leaves."""
    leaves = (edges[0], edges[-1]) if mode == "local" else edges
    network.train_in_leaves(mode != "local", None)
    network.normalise_batches(mode, tree_sum)
    parameters = network.initial_parameters(0)
    gradients = {name: np.zeros_like(value) for name, value in parameters.items()}
    network.bind(parameters, gradients)
    random = np.random.default_rng(0)
    x, labels = random.standard_normal((4, *SHAPE)).astype(network.dtype), np.array([0, 2, 1, 2])
    sums = network.forward_backward(Batch(x=x, labels=labels, leaves=leaves), NoEvents()).fetch()
    if mode == "leaf":
        (total,) = network.leaf_statistics()
        network.update_statistics(total)
    test = network.evaluate(x, labels)
    return gradients | network.state() | {"losses": np.array([sums.loss, test.loss])}


@pytest.mark.parametrize("edges", [(0, 2, 3, 4), (0, 2, 2, 4)], ids=["", "a leaf without samples"])
@pytest.mark.parametrize("mode", ["local", "leaf", "global"])
@pytest.mark.parametrize("token", ["cnn:4", "residual"])
def test_rectifiers_in_the_kernels_of_norms_and_sums_change_no_bit(
    token: str, mode: str, edges: tuple[int, ...]
) -> None:
    networks = apart(token, "float32", TwinMemory()), joined(token, "float32"), apart(token, "float32", HOST)
    expected, actual, library = (trained(network, mode, edges) for network in networks)
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)
        np.testing.assert_allclose(actual[name], library[name], rtol=2e-3, atol=2e-3, err_msg=name)


def test_rectifiers_are_joined_where_a_norm_or_a_sum_comes_before() -> None:
    network = joined("resnet20", "float32")
    before = {layer.kind for layer in network.chain if getattr(layer, "rectifies", False)}
    assert before == {"batch-norm", "join"}
    assert all(layer.done_before for layer in network.chain if layer.kind == "relu")  # type: ignore[attr-defined]
    network.compute_in(HOST)
    assert not any(getattr(layer, "rectifies", False) for layer in network.chain)


def test_float64_has_no_kernels_of_its_own() -> None:
    expected, actual = (trained(of, "local") for of in (apart("cnn:4", "float64", HOST), joined("cnn:4", "float64")))
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


def test_convolutions_in_bfloat16_are_products_of_windows() -> None:
    both = [apart("cnn:4,norm=none", "float32", memory) for memory in (HOST, TwinMemory())]
    for network in both:
        network.multiply_in("bfloat16")
    expected, actual = (trained(network, "local") for network in both)
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)
