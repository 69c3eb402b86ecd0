"""Augmentation: a picture's move is its own, wherever it is computed; what it makes of pixels; none in evaluation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nn_setup import Recorder, batch_for, bound

from dpsim.nn import build_model
from dpsim.nn.layers import Augment
from dpsim.nn.numpy_ops import NumpyOps
from dpsim.replica import Array, Batch

SHAPE = (6, 5, 2)
PICTURES = np.arange(1, 1 + 20 * 60, dtype=np.float32).reshape(20, *SHAPE)


def augmented(first: int, stop: int, *, crop: int = 2, flip: float = 0.5, seed: int = 0, step: int = 0) -> Array:
    """What becomes of pictures ``first`` to ``stop - 1`` of a global batch."""
    layer = Augment("augment", NumpyOps(), SHAPE, np.float32, crop, flip)
    x = PICTURES[first:stop]
    layer.begin(
        Batch(x=x, labels=np.zeros(len(x), np.int64), leaves=(0, len(x)), seed=seed, step=step, first_sample=first)
    )
    return layer.forward(x, (0, len(x)), training=True).copy()


@given(cuts=st.lists(st.integers(0, 20), max_size=6))
def test_a_pictures_move_does_not_depend_on_how_the_batch_is_cut(cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), 20]
    parts = [augmented(a, b) for a, b in itertools.pairwise(bounds)]
    assert np.array_equal(np.concatenate(parts), augmented(0, 20))


def test_steps_and_seeds_have_moves_of_their_own() -> None:
    actual = [augmented(0, 20), augmented(0, 20, step=1), augmented(0, 20, seed=1)]
    assert len({each.tobytes() for each in actual}) == 3


def test_pictures_are_moved_and_mirrored_and_what_comes_in_is_zero() -> None:
    seen = set()
    for step in range(40):
        for before, after in zip(PICTURES, augmented(0, 20, crop=1, step=step), strict=True):
            framed = np.pad(before, ((1, 1), (1, 1), (0, 0)))
            moves = {
                (top, left, flipped)
                for top, left, flipped in itertools.product(range(3), range(3), (False, True))
                if np.array_equal(framed[top : top + 6, left : left + 5][:, :: -1 if flipped else 1], after)
            }
            assert len(moves) == 1
            seen |= moves
    assert len(seen) == 18


@pytest.mark.parametrize(("flip", "mirrored"), [(0.0, 0.0), (0.25, 0.25), (1.0, 1.0)])
def test_the_rate_is_kept(flip: float, mirrored: float) -> None:
    actual = [
        np.array_equal(after, before[:, ::-1])
        for step in range(100)
        for before, after in zip(PICTURES, augmented(0, 20, crop=0, flip=flip, step=step), strict=True)
    ]
    assert np.mean(actual) == pytest.approx(mirrored, abs=0.05)


def test_evaluation_moves_nothing_and_training_begins_with_it() -> None:
    plain, moved = (build_model(f"cnn:4,norm=none{more}", SHAPE, 3) for more in ("", ",crop=2,flip=0.5"))
    assert moved.layers[0].kind == "augment"
    sums = []
    for network in (plain, moved):
        bound(network)
        x, labels = batch_for(network, 16)
        batch = Batch(x=x, labels=labels, leaves=(0, 16))
        sums.append((network.evaluate(x, labels).loss, network.forward_backward(batch, Recorder()).loss))
    assert sums[0][0] == sums[1][0]
    assert sums[0][1] != sums[1][1]
