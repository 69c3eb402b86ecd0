"""Small data sets in the published file formats, written for tests."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def pictures(count: int, shape: tuple[int, ...], classes: int = 10, seed: int = 0) -> tuple[Bytes, Bytes]:
    """Pictures [count, *shape] that resemble their class's own, and labels [count] of all classes in turn."""
    random = np.random.default_rng(seed)
    labels = (np.arange(count) % classes).astype(np.uint8)
    typical, noise = random.integers(0, 216, (classes, *shape)), random.integers(0, 40, (count, *shape))
    return (typical[labels] + noise).astype(np.uint8), labels


def write_cifar(folder: Path, train: tuple[int, ...] = (12, 11, 10, 9, 8), test: int = 7) -> tuple[Bytes, Bytes]:
    """Six files of ``train`` and ``test`` records; the training pictures [N, 32, 32, 3] and labels."""
    folder.mkdir(parents=True, exist_ok=True)
    x, y = pictures(sum(train) + test, (32, 32, 3))
    records = np.concatenate([y[:, None], x.transpose(0, 3, 1, 2).reshape(len(y), -1)], axis=1)
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    at = 0
    for name, count in zip(names, (*train, test), strict=True):
        (folder / name).write_bytes(records[at : at + count].tobytes())
        at += count
    return x[: sum(train)], y[: sum(train)]


def idx_bytes(array: NDArray[Any]) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + array.astype(np.uint8).tobytes()


def write_idx(folder: Path, train: int = 50, test: int = 17, mark: str = "-", suffix: str = "") -> tuple[Bytes, Bytes]:
    """The four files of an MNIST-like set of 6x5 pictures; the training pictures [N, 6, 5] and labels."""
    folder.mkdir(parents=True, exist_ok=True)
    x, y = pictures(train + test, (6, 5))
    for part, cut in (("train", slice(train)), ("t10k", slice(train, None))):
        for what, data in (("images", x[cut]), ("labels", y[cut])):
            content = idx_bytes(data)
            path = folder / f"{part}-{what}{mark}idx{data.ndim}-ubyte{suffix}"
            path.write_bytes(gzip.compress(content, mtime=0) if suffix else content)
    return x[:train], y[:train]
