"""The divergence of local statistics, against simulated batches of samples whose pixels are alike."""

from __future__ import annotations

import numpy as np
import pytest

from dpsim.model.statistics_divergence import divergence, independent_rows, rms_difference, spread


def samples(count: int) -> np.ndarray:
    """[count, 16 rows, 6 channels]: each sample has a level and a contrast of its own."""
    generator = np.random.default_rng(1)
    level, contrast = generator.normal(size=(count, 1, 6)), generator.gamma(2, size=(count, 1, 6))
    return 1 + 0.5 * level + contrast * generator.normal(size=(count, 16, 6))


def moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return x.mean(axis=1), (x * x).mean(axis=1)


@pytest.mark.parametrize("local_batch", [1, 2, 8, 32])
def test_prediction_agrees_with_many_batches_and_beats_independent_rows(local_batch: int) -> None:
    every, total = samples(64 * 400), 64
    squares: dict[str, list[float]] = {"mean": [], "variance": []}
    for batch in every.reshape(400, 64, 16, 6):
        m, q = moments(batch)
        for name, value in rms_difference(m, q, m, q, local_batch).items():
            squares[name].append(value)
    m, q = moments(every[:4096])
    fourth = ((every[:4096] - m.mean(axis=0)) ** 4).mean(axis=(0, 1))
    of_samples = spread(m, q, fourth, 16)
    predicted, null = (f(of_samples, local_batch, total) for f in (divergence, independent_rows))
    for name, values in squares.items():
        actual = float(np.sqrt(np.mean(values)))
        assert predicted[name] == pytest.approx(actual, rel=0.1), name
        assert abs(null[name] / actual - 1) > 2 * abs(predicted[name] / actual - 1), name


def test_the_whole_batch_does_not_diverge_and_dead_channels_do_not_count() -> None:
    x = samples(64)
    m, q = moments(x)
    assert rms_difference(m, q, m, q, 64) == pytest.approx({"mean": 0, "variance": 0}, abs=1e-12)
    assert divergence(spread(m, q, np.ones(6), 16), 64, 64) == {"mean": 0, "variance": 0}
    zero = np.zeros((64, 2))
    assert divergence(spread(zero, zero, np.zeros(2), 16), 2, 64) == {"mean": 0, "variance": 0}
    assert rms_difference(zero, zero, zero, zero, 2) == {"mean": 0, "variance": 0}
