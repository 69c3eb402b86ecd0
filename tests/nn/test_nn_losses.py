"""Label smoothing: its definition, its gradient, and that evaluation has none of it."""

from __future__ import annotations

import numpy as np
import pytest
from nn_setup import Recorder, batch_for, bound

from dpsim.errors import ConfigError
from dpsim.nn import build_model
from dpsim.nn.layer import Buffers
from dpsim.nn.losses import softmax_cross_entropy
from dpsim.nn.numpy_ops import NumpyOps
from dpsim.replica import Array, Batch

OPS = NumpyOps()


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_the_smoothed_loss_and_its_gradient_are_the_definition(smoothing: float) -> None:
    random = np.random.default_rng(0)
    logits, labels = 4 * random.standard_normal((6, 5)), random.integers(0, 5, 6)
    sums, grad = softmax_cross_entropy(OPS, Buffers(OPS, np.float64), logits, labels, (0, 2, 6), smoothing)
    log_p = log_softmax(logits)
    target = np.full((6, 5), smoothing / 5)
    target[np.arange(6), labels] += 1 - smoothing
    assert sums.loss == pytest.approx(-(target * log_p).sum(), rel=1e-12)
    np.testing.assert_allclose(grad, np.exp(log_p) - target, atol=1e-12)
    assert sums.correct == np.count_nonzero(logits.argmax(axis=1) == labels)


def test_training_is_smoothed_and_evaluation_is_not() -> None:
    plain, smoothed = (build_model("mlp:4", (3, 2, 1), 3, label_smoothing=value) for value in (0.0, 0.2))
    for network in (plain, smoothed):
        bound(network)
    x, labels = batch_for(plain, 10)
    batch = Batch(x=x, labels=labels, leaves=(0, 10))
    losses = [network.forward_backward(batch, Recorder()).loss for network in (plain, smoothed)]
    assert losses[0] != losses[1]
    assert plain.evaluate(x, labels) == smoothed.evaluate(x, labels)
    assert plain.evaluate(x, labels).loss == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_a_smoothing_outside_its_range_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="less than 1"):
        build_model("mlp:4", (3, 2, 1), 3, label_smoothing=value)
