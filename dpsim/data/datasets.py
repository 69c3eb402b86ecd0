"""Data sets by token: ``digits`` (part of dpsim), ``synthetic:...`` (any shape), and those in files."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dpsim import rng
from dpsim.data.arrays import from_npy, from_npz
from dpsim.data.cifar import cifar10
from dpsim.data.dataset import Dataset
from dpsim.data.digits import DIGITS_FORM, digits
from dpsim.data.idx import IDX_SETS, idx_set
from dpsim.errors import ConfigError, unknown

_SYNTHETIC_FORM = "synthetic:HxWxC,classes=K,train=N,test=M"
_SYNTHETIC_DEFAULTS = {"classes": 10, "train": 2048, "test": 512}
_FORMS = {
    "digits": DIGITS_FORM,
    "synthetic": _SYNTHETIC_FORM,
    "cifar10": "cifar10:DIR",
    "mnist": "mnist:DIR",
    "fashion-mnist": "fashion-mnist:DIR",
    "npz": "npz:FILE",
    "npy": "npy:X.npy,Y.npy",
}
DATASETS = tuple(_FORMS)


def load_dataset(token: str, seed: int = 0, dtype: DTypeLike = np.float32) -> Dataset:
    """Return the data set of a token, equal on every rank. ``seed`` changes synthetic data and digits' noise only.

    ``digits``: 1797 pictures of 8x8x1, one fixed stratified 80/20 split; ``digits:noise=0.35,samples=640`` adds noise
    and trains on fewer, see ``dpsim.data.digits``. ``synthetic:HxWxC,classes=K,train=N,test=M``
    (classes, train and test may be left out): a prototype a class plus noise of the same size. The others are read
    from files; everything after the first colon is the path: see ``cifar10``, ``idx_set``, ``from_npz``, ``from_npy``.
    Raises ``ConfigError`` for an unknown token, ``FileFormatError`` for a file that is missing or damaged.
    """
    kind, colon, text = token.partition(":")
    if token == "digits" or token.startswith("digits:"):
        return digits(token, text if colon else None, seed, dtype)
    if kind == "synthetic":
        return _synthetic(token, text, seed, dtype)
    if kind not in _FORMS:
        near = unknown("data set", kind.lower(), DATASETS, remedy="write one of these forms").remedy
        raise ConfigError(f"unknown data set {token!r}", allowed=", ".join(_FORMS.values()), remedy=near)
    if not colon or not text:
        raise ConfigError(f"data set {token!r} names no file", allowed=_FORMS[kind])
    if kind == "cifar10":
        return cifar10(token, text, dtype)
    if kind in IDX_SETS:
        return idx_set(kind, token, text, dtype)
    return from_npz(token, text, dtype) if kind == "npz" else from_npy(token, text, dtype)


_MOST_ELEMENTS = 2**30


def _synthetic(token: str, text: str, seed: int, dtype: DTypeLike) -> Dataset:
    shape, sizes = _parse_synthetic(token, text)
    classes = sizes["classes"]
    prototypes = rng.normal("synthetic prototypes", seed, (classes, *shape), dtype=dtype)

    def draw(part: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
        y = (np.arange(sizes[part]) % classes).astype(np.int64)
        x = rng.normal(f"synthetic {part}", seed, (len(y), *shape), dtype=dtype)
        x += prototypes[y]
        x *= 0.5
        return x, y

    (train_x, train_y), (test_x, test_y) = draw("train"), draw("test")
    return Dataset(name=token, train_x=train_x, train_y=train_y, test_x=test_x, test_y=test_y, classes=classes)


def _parse_synthetic(token: str, text: str) -> tuple[tuple[int, int, int], dict[str, int]]:
    shape, *settings = text.split(",")
    sides = re.fullmatch(r"(\d{1,9})x(\d{1,9})x(\d{1,9})", shape)
    sizes = dict(_SYNTHETIC_DEFAULTS)
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in sizes:
            raise unknown(f"setting of {token!r}:", key, sizes, remedy=f"write {_SYNTHETIC_FORM}")
        sizes[key] = int(value) if re.fullmatch(r"\d{1,9}", value) else 0
    if not sides or min(int(side) for side in sides.groups()) < 1 or min(sizes.values()) < 1 or sizes["classes"] < 2:
        raise ConfigError(
            f"data set {token!r} is not understood",
            allowed=f"{_SYNTHETIC_FORM}, whole numbers > 0, 2 classes or more",
            remedy="for example synthetic:32x32x3,classes=10,train=2048,test=512",
        )
    height, width, channels = map(int, sides.groups())
    elements = height * width * channels * sum(sizes.values())
    if elements > _MOST_ELEMENTS:
        raise ConfigError(
            f"data set {token!r} has {elements:,} numbers",
            allowed=f"{_MOST_ELEMENTS:,} (4 GiB)",
            remedy="give fewer samples or smaller pictures",
        )
    return (height, width, channels), sizes
