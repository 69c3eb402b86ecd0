"""Operands rounded to bfloat16: the products are those of rounded numbers in float32, and nothing else is rounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from strict_arrays import StrictMemory, StrictModule, host
from wire_reference import rounded

from dpsim.dtypes import ComputeDtype
from dpsim.errors import ConfigError
from dpsim.memory import HOST
from dpsim.nn.array_ops import ArrayOps
from dpsim.nn.cpu_ops import CpuOps
from dpsim.nn.device_ops import DeviceOps
from dpsim.nn.function import FunctionReplica
from dpsim.nn.layer import Buffers
from dpsim.nn.models import build_model
from dpsim.nn.network import NoEvents
from dpsim.nn.numpy_ops import NumpyOps
from dpsim.nn.ops import Ops
from dpsim.replica import Array, Batch, Capabilities

MAKERS: dict[str, Callable[[], Ops]] = {
    "NumPy": NumpyOps,
    "cpu": CpuOps,
    "cpu, in leaves": lambda: CpuOps().in_leaves(),
    "device": lambda: DeviceOps(HOST),
    "device, in leaves": lambda: DeviceOps(HOST).in_leaves(),
}
ROWS, LEAVES = 7, (0, 2, 3, 7)
Arguments = dict[str, Array]


def numbers() -> Arguments:
    random = np.random.default_rng(3)
    shapes = {
        "x": (ROWS, 9),
        "weight": (9, 5),
        "grad": (ROWS, 5),
        "pictures": (ROWS, 6, 5, 3),
        "kernels": (3, 3, 3, 4),
        "of_pixels": (ROWS, 3, 3, 4),
    }
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def products(ops: Ops, given: Arguments) -> Arguments:
    """Every operation that multiplies matrices, of these arrays."""
    work = Buffers(ops, np.float32)
    x, weight, grad, pictures, kernels, of_pixels = (value.copy() for value in given.values())
    part = LEAVES[1:3]
    results = {
        "product": np.zeros((ROWS, 5), np.float32),
        "product_with_transposed": np.zeros((ROWS, 9), np.float32),
        "transposed_product": np.zeros((9, 5), np.float32),
        "conv2d": np.zeros((ROWS, 3, 3, 4), np.float32),
        "conv2d_weight_gradient": np.zeros((3, 3, 3, 4), np.float32),
        "conv2d_input_gradient": np.zeros((ROWS, 6, 5, 3), np.float32),
    }
    ops.product(x, weight, LEAVES, results["product"])
    ops.product_with_transposed(grad, weight, LEAVES, results["product_with_transposed"])
    ops.transposed_product(x, grad, part, results["transposed_product"])
    ops.conv2d(pictures, kernels, 2, LEAVES, results["conv2d"], work)
    ops.conv2d_weight_gradient(pictures, of_pixels, part, 2, results["conv2d_weight_gradient"], work)
    ops.conv2d_input_gradient(of_pixels, kernels, 2, LEAVES, results["conv2d_input_gradient"], work)
    for before, after in zip(given.values(), (x, weight, grad, pictures, kernels, of_pixels), strict=True):
        np.testing.assert_array_equal(before, after, err_msg="an operand was changed")
    return results


@pytest.mark.parametrize("name", MAKERS)
def test_products_are_those_in_float32_of_operands_that_were_rounded(name: str) -> None:
    given = numbers()
    ops = MAKERS[name]()
    expected = products(ops, {of: rounded(values, "bfloat16") for of, values in given.items()})
    exact = products(ops, given)
    ops.multiply_in("bfloat16")
    actual = products(ops, given)
    for operation, value in expected.items():
        np.testing.assert_array_equal(actual[operation], value, err_msg=operation)
        assert (actual[operation] != exact[operation]).any(), operation
    ops.multiply_in("float32")
    for operation, value in products(ops, given).items():
        np.testing.assert_array_equal(exact[operation], value, err_msg=operation)


@pytest.mark.parametrize("name", ["cpu", "device"])
def test_operations_in_leaves_round_as_those_that_they_come_from(name: str) -> None:
    ops, given = MAKERS[name](), numbers()
    ops.multiply_in("bfloat16")
    expected = products(MAKERS[name]().in_leaves(), {of: rounded(values, "bfloat16") for of, values in given.items()})
    for operation, value in products(ops.in_leaves(), given).items():
        np.testing.assert_array_equal(value, expected[operation], err_msg=operation)


def trained(
    token: str, ops: Ops | None, dtype: ComputeDtype, leaves: tuple[int, ...] = (0, 16), steps: int = 3
) -> dict[str, Any]:
    """Parameters and losses after steps of gradient descent on one batch, and the bytes that were worked in."""
    network = build_model(token, (8, 8, 1), 10, ops=ops)
    network.multiply_in(dtype)
    network.train_in_leaves(len(leaves) > 2, None)
    network.normalise_batches("leaf" if len(leaves) > 2 else "local", lambda slots: slots[0])
    xp = network.ops.xp
    parameters = {name: xp.asarray(value) for name, value in network.initial_parameters(0).items()}
    gradients = {name: network.ops.zeros(value.shape, value.dtype) for name, value in parameters.items()}
    network.bind(parameters, gradients)
    random = np.random.default_rng(0)
    x, labels = random.standard_normal((leaves[-1], 8, 8, 1), np.float32), random.integers(0, 10, leaves[-1])
    if not isinstance(network.ops, DeviceOps):
        x, labels = xp.asarray(x), xp.asarray(labels)
    losses = []
    for step in range(steps):
        batch = Batch(x=x, labels=labels, leaves=leaves, seed=3, step=step)
        losses.append(network.forward_backward(batch, NoEvents()).fetch().loss / leaves[-1])
        for name, value in parameters.items():
            assert gradients[name].dtype == value.dtype == np.float32
            value -= np.float32(0.1 / leaves[-1]) * gradients[name]
    return {name: host(value) for name, value in parameters.items()} | {
        "losses": losses,
        "work_bytes": network.work_bytes,
    }


@pytest.mark.parametrize("token", ["mlp:32,32", "cnn:4,6"])
def test_training_in_bfloat16_comes_near_to_that_in_float32(token: str) -> None:
    plain, rounding = (trained(token, None, dtype, steps=30) for dtype in ("float32", "bfloat16"))
    assert plain["losses"] != rounding["losses"]
    assert plain["losses"][-1] < 0.9 * plain["losses"][0]
    np.testing.assert_allclose(rounding["losses"], plain["losses"], rtol=0, atol=0.02 * plain["losses"][0])
    low = [rounded(value, "bfloat16") for name, value in rounding.items() if name.endswith("weight")]
    masters = [value for name, value in rounding.items() if name.endswith("weight")]
    assert all((a != b).mean() > 0.9 for a, b in zip(low, masters, strict=True)), "parameters are not rounded"


@pytest.mark.parametrize("leaves", [(0, 6), (0, 2, 4, 5, 7)])
@pytest.mark.parametrize("token", ["mlp:8,norm=layer", "cnn:4,6"])
def test_strict_arrays_have_the_bits_of_numpy(token: str, leaves: tuple[int, ...]) -> None:
    for expected, actual in (
        (trained(token, NumpyOps(), "bfloat16", leaves), trained(token, ArrayOps(StrictModule()), "bfloat16", leaves)),
        (
            trained(token, DeviceOps(HOST), "bfloat16", leaves),
            trained(token, DeviceOps(StrictMemory()), "bfloat16", leaves),
        ),
    ):
        assert expected["losses"] == actual["losses"]


def test_memory_of_rounded_operands_is_counted() -> None:
    """Of the largest operand on either side: pictures of 6 channels and kernels, or of the classifier."""
    plain, rounding = (trained("mlp:32", None, dtype)["work_bytes"] for dtype in ("float32", "bfloat16"))
    assert rounding - plain == 4 * (16 * 64 + 64 * 32)


def test_a_network_that_moves_to_another_memory_rounds_there_too() -> None:
    network = build_model("mlp:4", (2, 2, 1), 3)
    network.multiply_in("bfloat16")
    network.compute_in(StrictMemory())
    x, weight = (network.ops.xp.asarray(numbers()[name]) for name in ("x", "weight"))
    out = network.ops.zeros((ROWS, 5), np.float32)
    network.ops.in_leaves().product(x, weight, (0, ROWS), out)
    expected = rounded(host(x), "bfloat16") @ rounded(host(weight), "bfloat16")
    np.testing.assert_array_equal(host(out), expected)


def test_models_that_cannot_round_refuse_it() -> None:
    with pytest.raises(ConfigError, match="compute dtype bfloat16 for a model of float64"):
        build_model("mlp:4", (2, 2, 1), 3, np.float64).multiply_in("bfloat16")
    own = FunctionReplica({"w": np.zeros((4, 2), np.float32)}, lambda *_: (0.0, 0, {}))
    Capabilities.of(own).multiply_in("float32")
    with pytest.raises(ConfigError, match="compute dtype bfloat16 for a model of your own") as refused:
        Capabilities.of(own).multiply_in("bfloat16")
    assert "leave compute_dtype out" in str(refused.value)
