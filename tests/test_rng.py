"""Random numbers: the published vectors, independence of how much is drawn, distributions, permutations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsim import rng

# Random123, tests/kat_vectors: "philox4x32 10", counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(counter: str, key: str, result: str) -> None:
    k0, k1 = words(key)
    assert rng.philox(np.array([words(counter)], np.uint32), (k0, k1)).tolist() == [words(result)]


def test_philox_of_many_counters_does_not_depend_on_their_grouping() -> None:
    counters = np.arange(4 * 20_000, dtype=np.uint32).reshape(-1, 4)
    together = rng.philox(counters, (1, 2))
    apart = np.concatenate([rng.philox(counters[:7], (1, 2)), rng.philox(counters[7:], (1, 2))])
    assert np.array_equal(together, apart)


@given(count=st.integers(0, 50), more=st.integers(0, 50))
def test_a_longer_draw_begins_with_the_shorter_one(count: int, more: int) -> None:
    assert np.array_equal(rng.random_words("a", 3, count), rng.random_words("a", 3, count + more)[:count])
    assert np.array_equal(rng.normal("a", 3, (count,)), rng.normal("a", 3, (count + more,))[:count])


def test_purpose_seed_and_stream_each_change_the_numbers() -> None:
    draws = [
        rng.random_words("a", 0, 8),
        rng.random_words("b", 0, 8),
        rng.random_words("a", 1, 8),
        rng.random_words("a", 1 << 32, 8),
        rng.random_words("a", 0, 8, stream=1),
    ]
    assert len({draw.tobytes() for draw in draws}) == len(draws)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_uniform_and_normal_have_their_moments_and_dtype(dtype: type) -> None:
    u = rng.uniform("u", 0, (400, 250), dtype=dtype)
    z = rng.normal("z", 0, (400, 250), dtype=dtype)
    assert u.dtype == z.dtype == dtype
    assert u.shape == z.shape == (400, 250)
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 4e-3 and abs(u.var() - 1 / 12) < 1e-3
    assert abs(z.mean()) < 0.02 and abs(z.var() - 1) < 0.02 and abs((z**4).mean() - 3) < 0.1
    assert abs((z[:, 0::2] * z[:, 1::2]).mean()) < 0.02


@given(n=st.integers(0, 300), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 2**32 - 1))
def test_a_permutation_holds_every_index_once_and_repeats_for_its_seed_and_epoch(n: int, seed: int, epoch: int) -> None:
    order = rng.permutation(n, seed, epoch)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(n))
    assert np.array_equal(order, rng.permutation(n, seed, epoch))


def test_permutations_of_other_seeds_and_epochs_differ() -> None:
    orders = {rng.permutation(100, seed, epoch).tobytes() for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_a_permutation_puts_every_element_anywhere_about_equally_often() -> None:
    first = np.array([rng.permutation(5, 0, epoch)[0] for epoch in range(1000)])
    assert np.all(np.abs(np.bincount(first, minlength=5) - 200) < 60)
