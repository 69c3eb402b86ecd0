"""Data sets by token: ``digits`` (bundled with scikit-learn), ``synthetic:...`` (any shape), and those in files."""

from __future__ import annotations

import gzip
import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dpsim import rng
from dpsim.data.arrays import from_npy, from_npz
from dpsim.data.cifar import cifar10
from dpsim.data.dataset import Dataset, stratified
from dpsim.data.idx import IDX_SETS, idx_set
from dpsim.errors import ConfigError, FileFormatError, unknown

_SYNTHETIC_FORM = "synthetic:HxWxC,classes=K,train=N,test=M"
_SYNTHETIC_DEFAULTS = {"classes": 10, "train": 2048, "test": 512}
_DIGITS_PIXELS = (8, 8, 1)
_DIGITS_MEAN = 0.305  # of pixels / 16
_FORMS = {
    "digits": "digits",
    "synthetic": _SYNTHETIC_FORM,
    "cifar10": "cifar10:DIR",
    "mnist": "mnist:DIR",
    "fashion-mnist": "fashion-mnist:DIR",
    "npz": "npz:FILE",
    "npy": "npy:X.npy,Y.npy",
}
DATASETS = tuple(_FORMS)


def load_dataset(token: str, seed: int = 0, dtype: DTypeLike = np.float32) -> Dataset:
    """The data set a token names, the same on every rank. ``seed`` moves synthetic data only.

    ``digits``: 1797 pictures of 8x8x1, one fixed stratified 80/20 split. ``synthetic:HxWxC,classes=K,train=N,test=M``
    (classes, train and test may be left out): a prototype a class plus noise of the same size. The others are read
    from files; everything after the first colon is the path: see ``cifar10``, ``idx_set``, ``from_npz``, ``from_npy``.
    Raises ``ConfigError`` for an unknown token, ``FileFormatError`` for a file that is missing or damaged.
    """
    kind, colon, text = token.partition(":")
    if token == "digits":
        return _digits(dtype)
    if kind == "synthetic":
        return _synthetic(token, text, seed, dtype)
    if kind not in _FORMS or kind == "digits":
        near = unknown("data set", kind.lower(), DATASETS, remedy="write one of these forms").remedy
        raise ConfigError(f"unknown data set {token!r}", allowed=", ".join(_FORMS.values()), remedy=near)
    if not colon or not text:
        raise ConfigError(f"data set {token!r} names no file", allowed=_FORMS[kind])
    if kind == "cifar10":
        return cifar10(token, text, dtype)
    if kind in IDX_SETS:
        return idx_set(kind, token, text, dtype)
    return from_npz(token, text, dtype) if kind == "npz" else from_npy(token, text, dtype)


def _digits(dtype: DTypeLike) -> Dataset:
    table = _read_digits()
    x = (table[:, :-1] / 16.0 - _DIGITS_MEAN).astype(dtype).reshape(-1, *_DIGITS_PIXELS)
    y = table[:, -1].astype(np.int64)
    test = stratified(y, 0.2)
    return Dataset(name="digits", train_x=x[~test], train_y=y[~test], test_x=x[test], test_y=y[test], classes=10)


def _read_digits() -> NDArray[np.float64]:
    """1797 rows of 64 pixels (0 to 16) and a label, from the file bundled with scikit-learn (whose import is slow)."""
    package = importlib.util.find_spec("sklearn")
    folder = Path(package.origin).parent if package and package.origin else Path("sklearn")
    path = folder / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        raise FileFormatError(
            f"the data set digits is not at {path}",
            allowed="the file bundled with scikit-learn",
            remedy=f"pip install scikit-learn, or use {_SYNTHETIC_FORM}",
        )
    text = gzip.decompress(path.read_bytes()).decode("ascii")
    return np.array(text.replace("\n", ",").rstrip(",").split(","), np.float64).reshape(1797, 65)


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
