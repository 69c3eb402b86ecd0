"""The operations over another array module than NumPy: the same bits, and nothing that a GPU's arrays refuse."""

from __future__ import annotations

import numpy as np
import pytest
from strict_arrays import StrictArray, StrictModule, host, strict

from dpsim.nn.array_ops import ArrayOps, NumpyOps
from dpsim.nn.layer import tree_sum
from dpsim.nn.models import build_model
from dpsim.nn.network import NoEvents
from dpsim.nn.ops import Ops
from dpsim.replica import Array, Batch, Rounding

MODELS = (
    "mlp:8,8",
    "mlp:8,norm=layer,dropout=0.3",
    "cnn:4,6",
    "cnn:4,6,norm=group,crop=1,flip=0.5",
    "cnn:4,norm=instance",
    "resnet20",
)
SHAPE, CLASSES = (8, 8, 1), 10


def trained(token: str, ops: Ops, leaves: tuple[int, ...], rounding: Rounding | None = None) -> dict[str, Array]:
    """Parameters, state and loss after two steps of plain gradient descent."""
    network = build_model(token, SHAPE, CLASSES, ops=ops)
    network.train_in_leaves(len(leaves) > 2, rounding)
    network.normalise_batches("leaf" if len(leaves) > 2 else "local", tree_sum)
    parameters = {name: ops.xp.asarray(value) for name, value in network.initial_parameters(0).items()}
    gradients = {name: ops.zeros(value.shape, value.dtype) for name, value in parameters.items()}
    network.bind(parameters, gradients)
    losses = []
    for step in range(2):
        random = np.random.default_rng(step)
        x = ops.xp.asarray(random.standard_normal((leaves[-1], *SHAPE), np.float32))
        labels = ops.xp.asarray(random.integers(0, CLASSES, leaves[-1]))
        batch = Batch(x=x, labels=labels, leaves=leaves, seed=3, step=step, first_sample=5)
        losses.append(network.forward_backward(batch, NoEvents()).loss)
        if len(leaves) > 2 and network.state():
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
