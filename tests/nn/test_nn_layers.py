"""Every layer against central differences in float64, alone and cut into leaves, and against plain definitions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from dpsim.errors import ConfigError
from dpsim.nn.batch_norm import BatchNorm
from dpsim.nn.layer import Layer
from dpsim.nn.layers import Conv2D, Dense, Dropout, Flatten, GlobalAveragePool, MaxPool2D, ReLU
from dpsim.nn.numpy_ops import NumpyOps
from dpsim.nn.residual import Subsample
from dpsim.nn.sample_norm import GroupNorm, InstanceNorm, LayerNorm
from dpsim.replica import Array, Leaves

OPS = NumpyOps()
F8 = np.float64
LAYERS: dict[str, Callable[[], Layer]] = {
    "dense": lambda: Dense("l", OPS, 5, 3, F8),
    "conv 3x3": lambda: Conv2D("l", OPS, (4, 5, 2), 3, F8),
    "conv 1x1": lambda: Conv2D("l", OPS, (3, 2, 4), 2, F8, kernel=1),
    "conv 5x5": lambda: Conv2D("l", OPS, (3, 4, 2), 2, F8, kernel=5),
    "batch norm 2-D": lambda: BatchNorm("l", OPS, (4,), F8),
    "batch norm 4-D": lambda: BatchNorm("l", OPS, (3, 2, 4), F8),
    "relu": lambda: ReLU("l", OPS, (3, 4), F8),
    "max pool": lambda: MaxPool2D("l", OPS, (4, 6, 3), F8),
    "max pool, odd": lambda: MaxPool2D("l", OPS, (5, 3, 2), F8),
    "average pool": lambda: GlobalAveragePool("l", OPS, (3, 4, 2), F8),
    "flatten": lambda: Flatten("l", OPS, (2, 3, 2), F8),
    "conv 3x3, stride 2": lambda: Conv2D("l", OPS, (4, 5, 2), 3, F8, stride=2),
    "conv 1x1, stride 2": lambda: Conv2D("l", OPS, (5, 4, 2), 3, F8, kernel=1, stride=2),
    "conv 5x5, stride 3": lambda: Conv2D("l", OPS, (7, 4, 1), 2, F8, kernel=5, stride=3),
    "subsample": lambda: Subsample("l", OPS, (4, 5, 3), 6, F8),
    "subsample by 3": lambda: Subsample("l", OPS, (7, 3, 2), 2, F8, stride=3),
    "layer norm 2-D": lambda: LayerNorm("l", OPS, (5,), F8),
    "layer norm 4-D": lambda: LayerNorm("l", OPS, (3, 2, 4), F8),
    "group norm 2-D": lambda: GroupNorm("l", OPS, (6,), F8, groups=2),
    "group norm 4-D": lambda: GroupNorm("l", OPS, (3, 2, 6), F8, groups=3),
    "group norm of one group": lambda: GroupNorm("l", OPS, (2, 3, 4), F8, groups=1),
    "instance norm": lambda: InstanceNorm("l", OPS, (3, 4, 2), F8),
    "dropout 2-D": lambda: Dropout("l", OPS, (9,), F8, rate=0.4),
    "dropout 4-D": lambda: Dropout("l", OPS, (3, 2, 4), F8, rate=0.4),
}
SAMPLES = 7


def bind(layer: Layer) -> tuple[dict[str, Array], dict[str, Array]]:
    parameters = layer.initial_parameters(0)
    random = np.random.default_rng(1)
    for value in parameters.values():
        value += 0.3 * random.standard_normal(value.shape)
    gradients = {name: np.full_like(value, np.nan) for name, value in parameters.items()}
    layer.bind(parameters, gradients)
    return parameters, gradients


def input_of(layer: Layer, samples: int = SAMPLES) -> Array:
    return np.random.default_rng(2).standard_normal((samples, *layer.input_shape))


def central_differences(value: Callable[[], float], at: Array, step: float = 1e-6) -> Array:
    slope = np.empty_like(at)
    for index in np.ndindex(at.shape):
        kept = at[index]
        at[index] = kept + step
        above = value()
        at[index] = kept - step
        slope[index] = (above - value()) / (2 * step)
        at[index] = kept
    return slope


@pytest.mark.parametrize("leaves", [(0, 7), (0, 3, 7), (0, 2, 4, 6, 7), (0, 1, 2, 3, 4, 5, 6, 7), (0, 0, 4, 4, 7)])
@pytest.mark.parametrize("build", LAYERS.values(), ids=LAYERS.keys())
def test_gradients_are_the_slopes_of_the_output(build: Callable[[], Layer], leaves: Leaves) -> None:
    layer = build()
    parameters, gradients = bind(layer)
    x = input_of(layer)
    weights = np.random.default_rng(3).standard_normal((SAMPLES, *layer.output_shape))

    def value() -> float:
        return float((layer.forward(x, leaves, training=True) * weights).sum())

    expected = {name: central_differences(value, parameter) for name, parameter in parameters.items()}
    expected_dx = central_differences(value, x)
    y = layer.forward(x, leaves, training=True)
    assert y.shape == weights.shape
    layer.write_gradients(weights.copy(), leaves)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(layer.input_gradient(weights.copy(), leaves), expected_dx, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("build", LAYERS.values(), ids=LAYERS.keys())
def test_results_do_not_depend_on_batches_seen_before(build: Callable[[], Layer]) -> None:
    """Work arrays are reused: a larger batch in between must leave nothing behind."""
    fresh, used = build(), build()
    bind(fresh), bind(used)
    x, large = input_of(fresh), 10 + input_of(fresh, 20)
    for training in (True, False):
        used.forward(large, (0, 20), training=training)
    used.write_gradients(used.forward(large, (0, 20), training=True).copy(), (0, 20))
    outputs = [layer.forward(x, (0, SAMPLES), training=True).copy() for layer in (fresh, used)]
    for layer in (fresh, used):
        layer.write_gradients(outputs[0].copy(), (0, SAMPLES))
    dx = [layer.input_gradient(outputs[0].copy(), (0, SAMPLES)) for layer in (fresh, used)]
    assert np.array_equal(*outputs) and np.array_equal(*dx)
    assert all(np.array_equal(fresh.gradients[role], used.gradients[role]) for role in fresh.gradients)


def test_convolution_is_its_definition() -> None:
    layer = Conv2D("l", OPS, (4, 5, 2), 3, F8)
    parameters, _ = bind(layer)
    x, weight = input_of(layer, 2), parameters["l.weight"]
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    expected = sum(padded[:, i : i + 4, j : j + 5] @ weight[i, j] for i in range(3) for j in range(3))
    np.testing.assert_allclose(layer.forward(x, (0, 2), training=True), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("shape", "kernel", "stride"), [((4, 5, 2), 3, 2), ((5, 4, 2), 1, 2), ((7, 7, 1), 5, 3)])
def test_a_stride_takes_every_so_manyth_pixel_of_the_whole_convolution(
    shape: tuple[int, int, int], kernel: int, stride: int
) -> None:
    whole, strided = (Conv2D("l", OPS, shape, 3, F8, kernel=kernel, stride=s) for s in (1, stride))
    bind(whole), bind(strided)
    x = input_of(whole, 2)
    y = strided.forward(x, (0, 2), training=True)
    assert y.shape[1:] == strided.output_shape
    np.testing.assert_allclose(y, whole.forward(x, (0, 2), training=True)[:, ::stride, ::stride], rtol=1e-12)


def test_a_subsample_puts_half_of_the_new_channels_in_front() -> None:
    layer = Subsample("l", OPS, (3, 4, 2), 5, F8)
    x = input_of(layer, 2)
    y = layer.forward(x, (0, 2), training=True)
    assert y.shape == (2, 2, 2, 5)
    assert np.array_equal(y[..., 1:3], x[:, ::2, ::2]) and not y[..., :1].any() and not y[..., 3:].any()
    with pytest.raises(ConfigError, match="no fewer channels"):
        Subsample("l", OPS, (3, 4, 2), 1, F8)


def test_an_even_kernel_is_refused() -> None:
    with pytest.raises(ConfigError, match="an odd kernel size"):
        Conv2D("l", OPS, (4, 4, 1), 1, F8, kernel=2)


@pytest.mark.parametrize("shape", [(4,), (3, 5, 4), (9, 9, 16)])
def test_batch_norm_gives_zero_mean_and_unit_variance_a_channel(shape: tuple[int, ...]) -> None:
    layer = BatchNorm("l", OPS, shape, F8)
    parameters = layer.initial_parameters(0)
    layer.bind(parameters, parameters)
    y = layer.forward(5 + 3 * input_of(layer, 40), (0, 40), training=True).reshape(-1, shape[-1])
    np.testing.assert_allclose(y.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(y.var(axis=0), 1, rtol=1e-4)


def test_running_statistics_move_a_tenth_of_the_way_and_serve_evaluation() -> None:
    layer = BatchNorm("l", OPS, (2, 2, 3), F8)
    parameters = layer.initial_parameters(0)
    layer.bind(parameters, parameters)
    x = 5 + 3 * input_of(layer)
    rows = x.reshape(-1, 3)
    layer.forward(x, (0, SAMPLES), training=True)
    state = {name: value.copy() for name, value in layer.state().items()}
    np.testing.assert_allclose(state["l.running_mean"], 0.1 * rows.mean(axis=0))
    np.testing.assert_allclose(state["l.running_var"], 0.9 + 0.1 * rows.var(axis=0, ddof=1))
    y = layer.forward(x, (0, SAMPLES), training=False)
    np.testing.assert_allclose(y, (x - state["l.running_mean"]) / np.sqrt(state["l.running_var"] + 1e-5))
    assert all(np.array_equal(state[name], value) for name, value in layer.state().items())


def test_batch_norm_of_a_single_row_is_beta_and_stays_finite() -> None:
    layer = BatchNorm("l", OPS, (3,), F8)
    parameters = layer.initial_parameters(0)
    parameters["l.beta"][:] = 2
    layer.bind(parameters, {name: value.copy() for name, value in parameters.items()})
    assert np.array_equal(layer.forward(input_of(layer, 1), (0, 1), training=True), [[2, 2, 2]])
    assert all(np.isfinite(value).all() for value in layer.state().values())


def test_the_first_of_equal_elements_takes_the_gradient_of_a_maximum() -> None:
    layer = MaxPool2D("l", OPS, (2, 2, 1), F8)
    for picture, winner in (([1, 1, 1, 1], 0), ([0, 1, 1, 0], 1), ([0, 0, 1, 1], 2), ([0, 0, 0, 1], 3)):
        layer.forward(np.array(picture, F8).reshape(1, 2, 2, 1), (0, 1), training=True)
        dx = layer.input_gradient(np.full((1, 1, 1, 1), 5.0), (0, 1))
        assert dx.ravel().tolist() == [5.0 if i == winner else 0.0 for i in range(4)]


def test_one_leaf_is_computed_straight_into_the_bound_array() -> None:
    layer = Dense("l", OPS, 5, 3, F8)
    _, gradients = bind(layer)
    targets = []
    layer.leaf_sum("weight", (0, SAMPLES), lambda leaf, out: targets.append(out))
    assert targets[0] is gradients["l.weight"]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 13])
def test_leaves_are_added_pair_by_pair(count: int) -> None:
    layer = Dense("l", OPS, 4, 3, np.float32)
    parameters = layer.initial_parameters(0)
    layer.bind(parameters, gradients := {name: np.full_like(value, np.nan) for name, value in parameters.items()})
    terms = np.random.default_rng(0).standard_normal((count, 4, 3)).astype(np.float32)
    layer.leaf_sum("weight", tuple(range(count + 1)), lambda leaf, out: np.copyto(out, terms[leaf[0]]))
    level = list(terms)
    while len(level) > 1:
        pairs = [level[i] + level[i + 1] for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(level) - len(level) % 2 :]
    assert gradients["l.weight"].tobytes() == level[0].tobytes()
