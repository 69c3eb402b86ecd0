"""The operations over another array module than NumPy: the same bits, and nothing that a GPU's arrays refuse."""

from __future__ import annotations

import contextlib
import types
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cupy_signatures import refusals
from strict_arrays import StrictArray, StrictMemory, StrictModule, called, host, nothing_waited_for, strict

from dpsim.memory import HOST, HostMemory
from dpsim.nn.array_ops import ArrayOps
from dpsim.nn.device_ops import DeviceLeafOps, DeviceOps
from dpsim.nn.layer import Buffers, tree_sum
from dpsim.nn.models import build_model
from dpsim.nn.network import NoEvents
from dpsim.nn.numpy_ops import NumpyOps
from dpsim.nn.ops import Ops
from dpsim.replica import Array, Batch, BatchSums, DeferredSums, Rounding
from dpsim.runtime.leaf_step import add_rounded, round_in_place

MODELS = (
    "mlp:8,8",
    "mlp:8,norm=layer,dropout=0.3",
    "cnn:4,6",
    "cnn:4,6,norm=group,crop=1,flip=0.5",
    "cnn:4,norm=instance",
    "resnet20",
)
SHAPE, CLASSES = (8, 8, 1), 10


class Aligned(np.ndarray[Any, Any]):
    """NumPy's arrays, of which copies begin at multiples of 256 bytes, as all that CuPy allocates does."""

    def copy(self, order: Any = "C") -> Any:
        copied = aligned(self.nbytes).view(self.dtype).reshape(self.shape)
        copied[...] = self
        return copied


def aligned(size_bytes: int) -> Any:
    raw = np.zeros(size_bytes + 256, np.uint8)
    first = -raw.ctypes.data % 256
    return raw[first : first + size_bytes].view(Aligned)


class AlignedMemory(HostMemory):
    def __init__(self) -> None:
        self.xp = types.SimpleNamespace(
            matmul=np.matmul, empty=lambda shape, dtype: aligned(4 * int(np.prod(shape))).view(dtype).reshape(shape)
        )

    def zeros(self, size_bytes: int) -> Any:
        return aligned(size_bytes)


def trained(
    token: str, ops: Ops, leaves: tuple[int, ...], rounding: Rounding | None = None, batch_norm: str = ""
) -> dict[str, Array]:
    """Parameters, state and loss after two steps of plain gradient descent."""
    network = build_model(token, SHAPE, CLASSES, ops=ops)
    network.train_in_leaves(len(leaves) > 2, rounding)
    mode = batch_norm or ("leaf" if len(leaves) > 2 else "local")
    network.normalise_batches(mode, tree_sum)
    parameters = {name: ops.xp.asarray(value) for name, value in network.initial_parameters(0).items()}
    gradients = {name: ops.zeros(value.shape, value.dtype) for name, value in parameters.items()}
    network.bind(parameters, gradients)
    losses = []
    for step in range(2):
        random = np.random.default_rng(step)
        x = random.standard_normal((leaves[-1], *SHAPE), np.float32)
        labels = random.integers(0, CLASSES, leaves[-1])
        if not isinstance(ops, DeviceOps):  # to which batches are given in the host's memory
            x, labels = ops.xp.asarray(x), ops.xp.asarray(labels)
        batch = Batch(x=x, labels=labels, leaves=leaves, seed=3, step=step, first_sample=5)
        with nothing_waited_for() if isinstance(ops, DeviceOps) else contextlib.nullcontext():
            sums = network.forward_backward(batch, NoEvents())
        losses.append(sums.fetch().loss)
        if mode == "leaf" and network.state():
            (total,) = network.leaf_statistics()
            network.update_statistics(total)
        for name, value in parameters.items():
            value -= np.float32(0.01) * gradients[name]
    values = parameters | network.state()
    return {name: host(value) for name, value in values.items()} | {"losses": np.array(losses)}


@pytest.mark.parametrize("leaves", [(0, 6), (0, 2, 4, 5, 7)])
@pytest.mark.parametrize("token", MODELS)
def test_training_over_strict_arrays_has_the_bits_of_numpy(token: str, leaves: tuple[int, ...]) -> None:
    expected, actual = trained(token, NumpyOps(), leaves), trained(token, ArrayOps(StrictModule()), leaves)
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(value, actual[name], err_msg=name)
        assert np.isfinite(value).all()


@pytest.mark.cupy
def test_what_training_calls_on_arrays_and_on_their_module_is_what_cupy_takes(
    tmp_path: Path, python: Callable[..., Any]
) -> None:
    with called() as calls:
        for token in MODELS:
            for leaves in ((0, 6), (0, 2, 4, 5, 7)):
                trained(token, DeviceOps(StrictMemory()), leaves)
    names = {call.name for call in calls}
    assert {"cupy.matmul", "cupy.add.reduce", "cupy.ndarray.reshape", "cupy.ndarray.max"} <= names
    assert not refusals(calls, tmp_path, python)


@pytest.mark.parametrize("leaves", [(0, 6), (0, 2, 4, 5, 7)])
@pytest.mark.parametrize("token", MODELS)
def test_training_in_a_devices_memory_waits_for_no_value_and_has_the_bits_of_the_same_on_the_host(
    token: str, leaves: tuple[int, ...]
) -> None:
    expected, actual = trained(token, DeviceOps(HOST), leaves), trained(token, DeviceOps(StrictMemory()), leaves)
    for name, value in expected.items():
        np.testing.assert_array_equal(value, actual[name], err_msg=name)
    for name, value in trained(token, NumpyOps(), leaves).items():
        np.testing.assert_allclose(value, actual[name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_global_batch_norm_in_a_devices_memory_waits_for_no_value() -> None:
    on_host, on_device = (
        trained("cnn:4", DeviceOps(memory), (0, 2, 4, 5, 7), batch_norm="global") for memory in (HOST, StrictMemory())
    )
    for name, value in on_host.items():
        np.testing.assert_array_equal(value, on_device[name], err_msg=name)


def test_products_of_leaves_have_operands_at_aligned_places() -> None:
    places = []

    class Watched(DeviceLeafOps):
        def matmul(self, a: Array, b: Array, out: Array) -> None:
            with unittest.mock.patch.object(self.xp, "matmul", lambda *operands, out: places.append((*operands, out))):
                super().matmul(a, b, out)

    memory = AlignedMemory()
    ops = Watched(memory)
    x, weight = (memory.zeros(4 * 70).view(np.float32)[1:61].reshape(shape) for shape in ((6, 10), (10, 6)))
    ops.product(x, weight, (0, 2, 6), out=x[:, :6].copy())
    ops.transposed_product(x, x, (2, 5), out=memory.zeros(404).view(np.float32)[1:].reshape(10, 10))
    assert len(places) == 3 and all(memory.address(each) % 256 == 0 for operands in places for each in operands)


def test_convolutions_of_leaves_are_one_product_a_leaf_of_operands_at_aligned_places() -> None:
    places: list[tuple[Array, ...]] = []

    class Watched(DeviceLeafOps):
        def matmul(self, a: Array, b: Array, out: Array) -> None:
            with unittest.mock.patch.object(self.xp, "matmul", lambda *operands, out: places.append((*operands, out))):
                super().matmul(a, b, out)

    memory = AlignedMemory()
    memory.xp.copyto, memory.xp.lib, memory.xp.zeros = np.copyto, np.lib, memory.xp.empty
    ops = Watched(memory)
    shapes = ((5, 4, 4, 2), (3, 3, 2, 3), (5, 4, 4, 3))
    x, weight, grad = (memory.zeros(4 * 400).view(np.float32)[1 : 1 + int(np.prod(s))].reshape(s) for s in shapes)
    leaves, work = (0, 2, 3, 5), Buffers(ops, np.float32)
    ops.conv2d(x, weight, 1, leaves, grad.copy(), work)
    ops.conv2d_input_gradient(grad, weight, 1, leaves, x.copy(), work)
    ops.conv2d_weight_gradient(x, grad, (2, 3), 1, weight.copy(), work)
    assert len(places) == 3 + 3 + 1 and all(memory.address(each) % 256 == 0 for each in sum(places, ()))


def test_sums_of_a_device_are_fetched_when_they_are_asked_for() -> None:
    memory = StrictMemory()
    ops = DeviceOps(memory)
    losses = memory.upload("losses", np.array([1.5, 0.25]))
    sums = ops.sums(list(losses), memory.upload("correct", np.array(3)), 7)
    assert isinstance(sums, DeferredSums)
    assert sums.fetch() == BatchSums(loss=1.75, correct=3, samples=7, slot_losses=(1.5, 0.25)) == sums.fetch().fetch()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounded_leaves_have_the_bits_of_numpy(dtype: str) -> None:
    rounding = Rounding(dtype, 8.0)
    leaves = (0, 2, 4, 6)
    expected = trained("cnn:4", NumpyOps(), leaves, rounding)
    actual = trained("cnn:4", ArrayOps(StrictModule()), leaves, rounding)
    assert all((expected[name] == actual[name]).all() for name in expected)


def test_strict_arrays_refuse_what_those_of_a_gpu_refuse() -> None:
    device, on_host = strict(np.arange(3.0)), np.arange(3.0)
    for mixed in (
        lambda: device + on_host,
        lambda: np.add(on_host, device),
        lambda: np.asarray(device),
        lambda: device.__setitem__(0, on_host[:1]),
        lambda: np.stack([device, on_host]),
        lambda: StrictModule().add.reduce(on_host, out=device),
        lambda: device[np.array([0, 1])],
        lambda: device.tolist(),
    ):
        with pytest.raises(TypeError):
            mixed()
    with pytest.raises(AttributeError, match="CuPy has no nanmedian"):
        StrictModule().nanmedian(device)
    assert isinstance(device.sum(), StrictArray) and isinstance(device + 1, StrictArray)


def test_pictures_move_alike_by_runs_and_by_gathering() -> None:
    network = {}
    for ops in (NumpyOps(), ArrayOps(np)):
        network[type(ops)] = trained("cnn:4,norm=none,crop=3,flip=0.5", ops, (0, 16))
    first, second = network.values()
    assert all((first[name] == second[name]).all() for name in first)


@pytest.mark.parametrize("to", [Rounding("float16", 2.0**-8), Rounding("bfloat16", 1.0)])
def test_micro_batches_are_added_with_rounding_where_their_gradients_are(to: Rounding) -> None:
    target, last = np.random.default_rng(1).standard_normal((2, 100)).astype(np.float32)
    module = StrictModule()
    on_device = strict(target.copy())
    add_rounded(on_device, strict(last), to, module)
    add_rounded(target, last, to, np)
    assert host(on_device).tobytes() == target.tobytes()
    round_in_place(on_device, Rounding(to.dtype, 2.0**-4), module)
    round_in_place(target, Rounding(to.dtype, 2.0**-4), np)
    assert host(on_device).tobytes() == target.tobytes()
