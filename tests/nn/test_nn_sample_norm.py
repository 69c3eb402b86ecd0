"""Norms of one sample: their definitions, independence of the other samples, and what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dpsim.errors import ConfigError
from dpsim.nn.numpy_ops import NumpyOps
from dpsim.nn.sample_norm import GroupNorm, InstanceNorm, LayerNorm
from dpsim.replica import Array

OPS = NumpyOps()
KINDS = ["layer", "instance", "group"]
SHAPES = [(8, 8, 6), (16, 16, 64), (5, 3, 6)]


def build(kind: str, shape: tuple[int, ...], dtype: type = np.float64) -> GroupNorm:
    layers = {"layer": LayerNorm, "instance": InstanceNorm}
    layer = GroupNorm("l", OPS, shape, dtype, groups=2) if kind == "group" else layers[kind]("l", OPS, shape, dtype)
    parameters = layer.initial_parameters(0)
    random = np.random.default_rng(1)
    for value in parameters.values():
        value += random.standard_normal(value.shape).astype(dtype)
    layer.bind(parameters, {name: np.empty_like(value) for name, value in parameters.items()})
    return layer


def defined(kind: str, x: Array, gamma: Array, beta: Array) -> Array:
    """The definition, a sample at a time."""
    y = np.empty_like(x)
    for sample, out in zip(x, y, strict=True):
        if kind == "layer":
            axes: tuple[int, ...] = (-1,)
            parts = sample
        elif kind == "instance":
            axes = (0, 1)
            parts = sample
        else:
            axes = (*range(sample.ndim - 1), -1)
            parts = sample.reshape(*sample.shape[:-1], 2, -1)
        mean, var = parts.mean(axis=axes, keepdims=True), parts.var(axis=axes, keepdims=True)
        out[...] = ((parts - mean) / np.sqrt(var + 1e-5)).reshape(sample.shape) * gamma + beta
    return y


@pytest.mark.parametrize(("kind", "shape"), [*itertools.product(KINDS, SHAPES), ("layer", (6,)), ("group", (6,))])
def test_a_norm_of_a_sample_is_its_definition(kind: str, shape: tuple[int, ...]) -> None:
    layer = build(kind, shape)
    x = 5 + 3 * np.random.default_rng(0).standard_normal((3, *shape))
    expected = defined(kind, x, layer.parameters["gamma"], layer.parameters["beta"])
    for training in (True, False):
        np.testing.assert_allclose(layer.forward(x, (0, 3), training=training), expected, rtol=1e-10, atol=1e-10)
    assert not layer.state()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_has_the_same_bits_alone_and_among_others(kind: str, shape: tuple[int, ...]) -> None:
    layer = build(kind, shape, np.float32)
    random = np.random.default_rng(0)
    x, grad = (random.standard_normal((7, *shape)).astype(np.float32) for _ in range(2))
    y = layer.forward(x, (0, 7), training=True).copy()
    dx = layer.input_gradient(grad.copy(), (0, 7)).copy()
    for first, last in ((0, 1), (3, 4), (2, 7)):
        some = (0, last - first)
        assert layer.forward(x[first:last], some, training=True).tobytes() == y[first:last].tobytes()
        assert layer.input_gradient(grad[first:last].copy(), some).tobytes() == dx[first:last].tobytes()


def test_group_norm_lies_between_instance_norm_and_one_group() -> None:
    x = np.random.default_rng(0).standard_normal((2, 4, 4, 6))
    instance = InstanceNorm("l", OPS, (4, 4, 6), np.float64)
    six = GroupNorm("l", OPS, (4, 4, 6), np.float64, groups=6)
    for layer in (instance, six):
        parameters = layer.initial_parameters(0)
        layer.bind(parameters, parameters)
    assert np.array_equal(*(layer.forward(x, (0, 2), training=True) for layer in (instance, six)))


def test_what_would_always_normalise_to_zero_is_refused() -> None:
    for refused in (
        lambda: InstanceNorm("l", OPS, (1, 1, 8), np.float32),
        lambda: LayerNorm("l", OPS, (4, 4, 1), np.float32),
        lambda: GroupNorm("l", OPS, (8,), np.float32, groups=8),
    ):
        with pytest.raises(ConfigError, match="two elements or more"):
            refused()
    for groups in (0, 4, 7):
        with pytest.raises(ConfigError, match="a divisor of 6"):
            GroupNorm("l", OPS, (4, 4, 6), np.float32, groups=groups)
