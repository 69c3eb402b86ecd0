"""CIFAR-10 from the files of its binary version.

A record is one byte of label and 3072 of pixels: 1024 red, then green, then blue, row by row.
Source: https://www.cs.toronto.edu/~kriz/cifar.html.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dpsim.data.dataset import Dataset, Labels, pictures
from dpsim.data.files import check_folder, find, path_of, reading
from dpsim.errors import FileFormatError

_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_TEST = ("test_batch.bin",)
_FILES = "data_batch_1.bin to data_batch_5.bin and test_batch.bin"
_UNPACKED = "cifar-10-batches-bin"
_CLASSES = 10
_SIDE = 32
_RECORD = 1 + 3 * _SIDE * _SIDE
_REMEDY = "download https://www.cs.toronto.edu/~kriz/cifar.html, CIFAR-10 binary version, and unpack it"
_MEAN = (0.4914, 0.4822, 0.4465)  # of pixels / 255 of the training set, as commonly published
_STD = (0.2470, 0.2435, 0.2616)


def cifar10(token: str, text: str, dtype: DTypeLike) -> Dataset:
    """Return CIFAR-10 from folder ``text``, or from its ``cifar-10-batches-bin``: 32x32x3 pictures in 10 classes.

    Pixels are stored as uint8 and normalised a channel with the published mean and deviation of the training set.
    Raises ``ConfigError``, ``FileFormatError``.
    """
    folder = path_of(text)
    check_folder(folder, _FILES, _REMEDY)
    folder = find(folder, [_UNPACKED]) or folder
    train, test = _read(folder, _TRAIN), _read(folder, _TEST)
    return pictures(token, train, test, _CLASSES, _MEAN, _STD, dtype)


def _read(folder: Path, names: Sequence[str]) -> tuple[NDArray[np.uint8], Labels]:
    """Return pixels [N, 32, 32, 3] and labels [N] of all records of files."""
    missing = [name for name in names if find(folder, [name]) is None]
    if missing:
        python = find(folder, ["data_batch_1", "test_batch"]) is not None
        raise FileFormatError(
            f"{', '.join(missing)} not found in {folder}" + (", which holds the Python version" if python else ""),
            allowed=f"a folder with {_FILES}",
            remedy=_REMEDY,
        )
    records = [_records(folder / name) for name in names]
    count = sum(map(len, records))
    x, y, start = np.empty((count, _SIDE * _SIDE, 3), np.uint8), np.empty(count, np.int64), 0
    for part in records:
        y[start : start + len(part)] = part[:, 0]
        planes = part[:, 1:].reshape(len(part), 3, _SIDE * _SIDE)
        for channel in range(3):
            x[start : start + len(part), :, channel] = planes[:, channel]
        start += len(part)
    return x.reshape(count, _SIDE, _SIDE, 3), y


def _records(path: Path) -> NDArray[np.uint8]:
    """Return the records of one file, [N, 3073]."""
    with reading(path, "CIFAR-10 binary file"):
        data = np.frombuffer(path.read_bytes(), np.uint8)
    count, rest = divmod(len(data), _RECORD)
    if rest or not count:
        raise FileFormatError(
            f"{path} has {len(data)} bytes: {count} records" + (f" and {rest} bytes more" if rest else ""),
            allowed=f"one or more whole records of {_RECORD} bytes",
            remedy=f"it is cut off or of another kind; {_REMEDY}",
        )
    records = data.reshape(count, _RECORD)
    wrong = np.flatnonzero(records[:, 0] >= _CLASSES)
    if len(wrong):
        first = int(wrong[0])
        raise FileFormatError(
            f"{path}: label {records[first, 0]} at byte {first * _RECORD} (record {first})",
            allowed=f"labels 0 to {_CLASSES - 1}",
            remedy=f"it is damaged or of another kind; {_REMEDY}",
        )
    return records
