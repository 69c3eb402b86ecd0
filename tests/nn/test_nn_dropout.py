"""Dropout: a sample's mask is its own, wherever the sample is computed; its rate; nothing of it in evaluation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nn_setup import Recorder, batch_for, bound, gradients_of

from dpsim import rng
from dpsim.errors import ConfigError
from dpsim.nn import build_model
from dpsim.nn.layers import Dropout
from dpsim.nn.numpy_ops import NumpyOps
from dpsim.replica import Array, Batch

SHAPE = (3, 5)


def dropped(first: int, samples: int, *, name: str = "l", rate: float = 0.5, seed: int = 0, step: int = 0) -> Array:
    """What dropout makes of ones: samples ``first``, ``first + 1``, ... of a global batch."""
    layer = Dropout(name, NumpyOps(), SHAPE, np.float32, rate)
    x = np.ones((samples, *SHAPE), np.float32)
    layer.begin(
        Batch(x=x, labels=np.zeros(samples, np.int64), leaves=(0, samples), seed=seed, step=step, first_sample=first)
    )
    return layer.forward(x, (0, samples), training=True)


@given(cuts=st.lists(st.integers(0, 20), max_size=6))
def test_a_samples_mask_does_not_depend_on_how_the_batch_is_cut(cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), 20]
    parts = [dropped(a, b - a) for a, b in itertools.pairwise(bounds)]
    assert np.array_equal(np.concatenate(parts), dropped(0, 20))


def test_samples_steps_seeds_and_layers_have_masks_of_their_own() -> None:
    masks = [*dropped(0, 4), dropped(0, 1, step=1)[0], dropped(0, 1, seed=1)[0], dropped(0, 1, name="other")[0]]
    assert len({mask.tobytes() for mask in masks}) == len(masks)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_the_rate_is_kept_and_the_mean_stays(rate: float) -> None:
    y = dropped(0, 20_000, rate=rate)
    assert (y == 0).mean() == pytest.approx(rate, abs=0.005)
    assert y.mean() == pytest.approx(1, abs=0.02) and y.dtype == np.float32
    places = (y == 0).mean(axis=0)  # of each element by itself
    assert np.abs(places - rate).max() < 0.02
    kept = y != 0
    both = (kept[:, 0, 0] & kept[:, 0, 1]).mean()
    assert both == pytest.approx((1 - rate) ** 2, abs=0.02)


def test_evaluation_drops_nothing() -> None:
    layer = Dropout("l", NumpyOps(), SHAPE, np.float32, 0.5)
    x = np.ones((4, *SHAPE), np.float32)
    assert np.array_equal(layer.forward(x, (0, 4), training=False), x)


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="0 or more, and less than 1"):
        Dropout("l", NumpyOps(), SHAPE, np.float32, rate)


def test_bits_of_a_sample_are_those_of_its_words() -> None:
    words = rng.random_words("p", 7, 6, stream=3)
    expected = np.stack([words & 0xFFFF, words >> 16], axis=1).reshape(-1)[:11]
    assert np.array_equal(rng.sample_bits("p", 7, (2, 11), stream=3)[0], expected)
    assert np.array_equal(
        rng.sample_bits("p", 7, (2, 11), stream=3)[1], rng.sample_bits("p", 7, (1, 11), stream=3, first_sample=1)[0]
    )


def test_a_step_draws_masks_by_the_names_of_its_batch() -> None:
    network = build_model("mlp:6,dropout=0.5", (3, 2, 1), 3, np.float64)
    _, gradients = bound(network)
    x, labels = batch_for(network, 8)
    actual = []
    for step in (0, 1, 0):
        network.forward_backward(Batch(x=x, labels=labels, leaves=(0, 8), step=step), Recorder())
        actual.append(gradients["dense1.weight"].copy())
    assert np.array_equal(actual[0], actual[2]) and not np.array_equal(actual[0], actual[1])


def test_a_search_for_a_nan_draws_the_masks_of_the_step_before() -> None:
    network = build_model("mlp:6,dropout=0.5", (3, 2, 1), 3, np.float32)
    parameters, _ = bound(network)
    x, labels = batch_for(network, 1)
    batch = Batch(x=x, labels=labels, leaves=(0, 1), step=3)
    network.forward_backward(batch, Recorder())
    (layer,) = (layer for layer in network.chain if layer.kind == "dropout")
    hidden = np.ones((1, 6), np.float32)
    kept = layer.forward(hidden, (0, 1), training=True)[0] != 0
    assert 0 < kept.sum() < 6
    parameters["dense1.bias"][...] = 1e38
    parameters["dense2.weight"][...] = 0
    parameters["dense2.weight"][~kept] = 1e38  # overflows only where the step's own mask would not let it
    assert network.first_nonfinite_layer(x, labels) is None
    parameters["dense2.weight"][kept] = 1e38
    assert network.first_nonfinite_layer(x, labels) == "the output of layer 'dense2'"


def test_networks_without_randomness_ignore_the_names_of_samples() -> None:
    network = build_model("cnn:3,norm=group", (4, 4, 1), 3)
    x, labels = batch_for(network, 4)
    plain = gradients_of(network, x, labels)
    _, gradients = bound(network)
    network.forward_backward(Batch(x=x, labels=labels, leaves=(0, 4), seed=5, step=9, first_sample=7), Recorder())
    assert all(np.array_equal(plain[name], value) for name, value in gradients.items())
