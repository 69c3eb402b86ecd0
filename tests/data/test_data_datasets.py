"""Data sets: the fixed split of digits, synthetic data of any shape, and what is said about a wrong token."""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from dpsim.data import load_dataset
from dpsim.errors import ConfigError, DpsimError, FileFormatError


def test_digits_are_split_class_by_class_and_the_split_is_fixed() -> None:
    digits = load_dataset("digits")
    again = load_dataset("digits", seed=7)
    assert len(digits.train_y) + len(digits.test_y) == 1797
    per_class = np.bincount(digits.test_y) / (np.bincount(digits.test_y) + np.bincount(digits.train_y))
    assert np.all(np.abs(per_class - 0.2) < 0.003)
    assert digits.train_x.tobytes() == again.train_x.tobytes() and digits.test_x.tobytes() == again.test_x.tobytes()


def test_digits_are_these_pictures_in_this_order_split_in_this_way() -> None:
    digits = load_dataset("digits", dtype=np.float64)
    parts = (digits.train_x, digits.train_y, digits.test_x, digits.test_y)
    sha = hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()
    assert sha == "bd7a8b9bfaf09682861e2752537c7a0818f87c3b997bbfa3fb5199dde1d7635b"


def test_digits_that_are_changed_after_they_were_loaded_do_not_change_those_loaded_next() -> None:
    first = load_dataset("digits")
    before = [part.copy() for part in (first.train_x, first.train_y, first.test_x, first.test_y)]
    for part in (first.train_x, first.train_y, first.test_x, first.test_y):
        part[...] = 0
    again = load_dataset("digits")
    for part, expected in zip((again.train_x, again.train_y, again.test_x, again.test_y), before, strict=True):
        assert np.array_equal(part, expected)


def test_digits_have_about_zero_mean_and_unit_range() -> None:
    digits = load_dataset("digits")
    assert digits.input_shape == (8, 8, 1) and digits.classes == 10
    assert digits.train_x.dtype == np.float32 and digits.train_y.dtype == np.int64
    assert abs(digits.train_x.mean()) < 0.01 and np.ptp(digits.train_x) == pytest.approx(1.0)
    assert load_dataset("digits", dtype=np.float64).train_x.dtype == np.float64


@pytest.mark.parametrize(("content", "said"), [(None, "is missing"), (b"1,2", "has another SHA-256")])
def test_digits_that_were_changed_are_refused(
    content: bytes | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (tmp_path / "digits.csv.gz").write_bytes(content)
    monkeypatch.setattr(resources, "files", lambda package: tmp_path)
    with pytest.raises(FileFormatError, match=said):
        load_dataset("digits")


def test_synthetic_data_have_the_shape_asked_for_and_depend_on_the_seed_alone() -> None:
    token = "synthetic:5x7x3,classes=4,train=21,test=9"
    data, again, other = load_dataset(token), load_dataset(token), load_dataset(token, seed=1)
    assert data.train_x.shape == (21, 5, 7, 3) and data.test_x.shape == (9, 5, 7, 3) and data.classes == 4
    assert data.train_x.dtype == np.float32 and set(data.train_y.tolist()) == {0, 1, 2, 3}
    assert data.train_x.tobytes() == again.train_x.tobytes() != other.train_x.tobytes()


def test_noise_and_fewer_samples_of_digits_depend_on_the_seed_alone() -> None:
    token = "digits:noise=0.35,samples=640"
    data, again, other = load_dataset(token), load_dataset(token), load_dataset(token, seed=1)
    assert data.train_x.shape == (640, 8, 8, 1) and len(data.test_y) == 359 and data.name == token
    for part in ("train_x", "train_y", "test_x"):
        assert getattr(data, part).tobytes() == getattr(again, part).tobytes() != getattr(other, part).tobytes()
    clean = load_dataset("digits")
    noise = data.test_x - clean.test_x
    assert abs(noise.std() - 0.35) < 0.01 and abs(noise.mean()) < 0.01
    assert load_dataset("digits:samples=1438").train_x.tobytes() == clean.train_x.tobytes()


def test_synthetic_classes_can_be_told_apart() -> None:
    data = load_dataset("synthetic:6x6x2,train=500,test=200")
    means = np.stack([data.train_x[data.train_y == k].mean(axis=0) for k in range(data.classes)])
    distance = ((data.test_x[:, None] - means) ** 2).sum(axis=(2, 3, 4))
    assert np.mean(distance.argmin(axis=1) == data.test_y) > 0.9


@pytest.mark.parametrize(
    ("token", "text"),
    [
        ("digit", "did you mean 'digits'"),
        ("imagenet", "synthetic:HxWxC,classes=K"),
        ("digits:8", "allowed: noise, samples"),
        ("digits:", "allowed: noise, samples"),
        ("digits:noise=-1", "a standard deviation from 0"),
        ("digits:noise=loud", "a standard deviation from 0"),
        ("digits:noise=0.1,noise=0.2", "noise once"),
        ("digits:samples=1439", "from 2 to 1438"),
        ("digits:sample=640", "did you mean 'samples'"),
        ("synthetic", "for example synthetic:32x32x3"),
        ("synthetic:32x32", "for example synthetic:32x32x3"),
        ("synthetic:8x8x0", "whole numbers > 0"),
        ("synthetic:8x8x1,classes=1", "2 classes or more"),
        ("synthetic:8x8x1,train=many", "whole numbers > 0"),
        ("synthetic:8x8x1,clases=3", "did you mean 'classes'"),
    ],
)
def test_a_wrong_token_is_answered_with_what_is_allowed(token: str, text: str) -> None:
    with pytest.raises(DpsimError, match=text) as caught:
        load_dataset(token)
    assert isinstance(caught.value, ConfigError) and caught.value.allowed
