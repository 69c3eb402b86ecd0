"""MNIST and data sets of its kind from IDX files.

An IDX file is two zero bytes, a type code, the number of dimensions, each dimension (big-endian, 4 bytes), and the
elements. Source: https://yann.lecun.com/exdb/mnist/ ("the IDX file format").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dpsim.data.dataset import Dataset, Labels, pictures
from dpsim.data.files import check_folder, find, open_plain_or_gzip, path_of, read_at_most, reading
from dpsim.errors import FileFormatError

_CLASSES = 10
_UNSIGNED_BYTE = 0x08
_FILES = "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte"
_SPELLINGS = f"{_FILES} (or .idx3-ubyte, .idx1-ubyte; each also as .gz)"


@dataclass(frozen=True, kw_only=True)
class IdxSet:
    """A published data set in IDX files: mean and deviation of its training pixels / 255, and where to get it."""

    mean: float
    std: float
    source: str

    @property
    def remedy(self) -> str:
        return f"download the four .gz files from {self.source}"


IDX_SETS = {
    "mnist": IdxSet(mean=0.1307, std=0.3081, source="https://ossci-datasets.s3.amazonaws.com/mnist/"),
    "fashion-mnist": IdxSet(mean=0.2860, std=0.3530, source="https://github.com/zalandoresearch/fashion-mnist"),
}


def idx_set(kind: str, token: str, text: str, dtype: DTypeLike) -> Dataset:
    """Return the set ``kind`` of ``IDX_SETS`` in the folder ``text``: grey pictures [N, H, W, 1] in 10 classes.

    Pixels are stored as uint8 and normalised with the published mean and deviation of the training set.
    Raises ``ConfigError``, ``FileFormatError``.
    """
    source, folder = IDX_SETS[kind], path_of(text)
    check_folder(folder, _SPELLINGS, source.remedy)
    train_x, train_y = _part(folder, "train", source.remedy)
    test_x, test_y = _part(folder, "t10k", source.remedy)
    if train_x.shape[1:] != test_x.shape[1:]:
        raise FileFormatError(
            f"{folder}: training pictures of {_by(train_x.shape[1:3])}, test pictures of {_by(test_x.shape[1:3])}",
            allowed="pictures of one size",
            remedy=source.remedy,
        )
    return pictures(token, (train_x, train_y), (test_x, test_y), _CLASSES, source.mean, source.std, dtype)


def _part(folder: Path, part: str, remedy: str) -> tuple[NDArray[np.uint8], Labels]:
    """Return pictures [N, H, W, 1] and labels [N] of one part."""
    images = _path(folder, f"{part}-images", 3, remedy)
    labels = _path(folder, f"{part}-labels", 1, remedy)
    x, y = _read(images, 3, remedy), _read(labels, 1, remedy)
    if len(x) != len(y):
        raise FileFormatError(
            f"{images} has {len(x)} pictures and {labels} has {len(y)} labels",
            allowed="one label a picture",
            remedy=remedy,
        )
    wrong = np.flatnonzero(y >= _CLASSES)
    if len(wrong):
        raise FileFormatError(
            f"{labels}: label {y[wrong[0]]} at byte {8 + wrong[0]}",
            allowed=f"labels 0 to {_CLASSES - 1}",
            remedy=remedy,
        )
    return x[..., None], y.astype(np.int64)


def _path(folder: Path, name: str, dimensions: int, remedy: str) -> Path:
    plain = [f"{name}{mark}idx{dimensions}-ubyte" for mark in "-."]
    path = find(folder, [*plain, *(f"{spelling}.gz" for spelling in plain)])
    if path is None:
        raise FileFormatError(f"{plain[0]} not found in {folder}", allowed=f"the files {_SPELLINGS}", remedy=remedy)
    return path


def _read(path: Path, dimensions: int, remedy: str) -> NDArray[np.uint8]:
    """Return the elements of one IDX file of unsigned bytes with so many dimensions, none of them 0."""

    def refused(what: str, allowed: str) -> FileFormatError:
        return FileFormatError(f"{path} {what}", allowed=allowed, remedy=f"it is damaged or of another kind; {remedy}")

    magic, header = bytes([0, 0, _UNSIGNED_BYTE, dimensions]), 4 + 4 * dimensions
    with reading(path, "gzip file" if path.suffix == ".gz" else "IDX file"), open_plain_or_gzip(path) as file:
        start = read_at_most(file, header)
        if start[:4] != magic:
            expected = f"the magic number 0x{magic.hex()}: unsigned bytes in {dimensions} dimensions"
            raise refused(f"begins with 0x{start[:4].hex()}", expected)
        if len(start) < header:
            raise refused(f"ends at byte {len(start)}, within its header", f"a header of {header} bytes")
        shape = tuple(np.frombuffer(start[4:], ">u4").tolist())
        size = math.prod(shape)
        if not size:
            raise refused(f"has no elements: {_by(shape)}", "dimensions of 1 or more")
        data = read_at_most(file, size + 1)
    if len(data) != size:
        end = f"goes on after byte {header + size}" if len(data) > size else f"ends at byte {header + len(data)}"
        raise refused(end, f"{header + size} bytes: a header of {header} and {_by(shape)} elements")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _by(sides: tuple[int, ...]) -> str:
    return "x".join(map(str, sides))
