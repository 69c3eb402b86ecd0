"""A data set in memory, and how its stored numbers become the samples that a model sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from dpsim import rng
from dpsim.errors import FileFormatError

Labels = NDArray[np.int64]
_AT_ONCE = 128  # samples; their float64 copies stay in a cache


@dataclass(frozen=True, kw_only=True)
class Normalisation:
    """``(pixel - mean) / std`` as ``pixel * scale + offset``, both [H W C] in the dtype of the samples.

    Two roundings an element, whatever the batch: a sample has the same bits in every batch and on every rank.
    """

    scale: NDArray[Any]
    offset: NDArray[Any]

    @classmethod
    def of_channels(cls, mean: ArrayLike, std: ArrayLike, shape: tuple[int, ...], dtype: DTypeLike) -> Normalisation:
        """Normalise samples of shape (H, W, C) with ``mean`` and ``std`` a channel, in units of a pixel (0..255)."""
        scale = np.broadcast_to(1.0 / np.asarray(std, np.float64), shape)
        offset = np.broadcast_to(-np.asarray(mean, np.float64) / np.asarray(std, np.float64), shape)
        return cls(scale=scale.ravel().astype(dtype), offset=offset.ravel().astype(dtype))

    def __call__(self, pixels: NDArray[np.uint8]) -> NDArray[Any]:
        samples: NDArray[Any] = np.multiply(pixels.reshape(len(pixels), len(self.scale)), self.scale)
        samples += self.offset
        return samples.reshape(pixels.shape)


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Samples [N, H, W, C] and class labels [N], for training and for testing.

    With a ``normalisation`` the samples are stored as pixels (uint8) and converted a batch at a time; without one
    they are what a model sees, of about zero mean. ``train_batch`` and ``test_batch`` serve both.
    """

    name: str
    train_x: NDArray[Any]
    train_y: Labels
    test_x: NDArray[Any]
    test_y: Labels
    classes: int
    normalisation: Normalisation | None = None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of a sample, (H, W, C)."""
        return self.train_x.shape[1:]

    def train_batch(self, indices: NDArray[np.int64]) -> tuple[NDArray[Any], Labels]:
        """Return the training samples at ``indices``, as a model sees them, and their labels."""
        return self._seen(self.train_x[indices]), self.train_y[indices]

    def test_batch(self, start: int, stop: int) -> tuple[NDArray[Any], Labels]:
        """Test samples ``start`` to ``stop``, as a model sees them, and their labels."""
        return self._seen(self.test_x[start:stop]), self.test_y[start:stop]

    def _seen(self, stored: NDArray[Any]) -> NDArray[Any]:
        return stored if self.normalisation is None else self.normalisation(stored)


def channel_statistics(x: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return mean and deviation of each channel of [N, H, W, C], in float64; a constant channel has deviation 1."""
    channels = x.shape[-1]
    count = x.size // channels

    def total(subtract: NDArray[np.float64] | None) -> NDArray[np.float64]:
        sums = np.zeros(x[0].size)
        for start in range(0, len(x), _AT_ONCE):
            part = x[start : start + _AT_ONCE].astype(np.float64)
            if subtract is not None:
                part -= subtract
                part *= part
            sums += part.reshape(len(part), -1).sum(axis=0)
        total: NDArray[np.float64] = sums.reshape(-1, channels).sum(axis=0)
        return total

    mean = total(None) / count
    std = np.sqrt(total(mean) / count)
    return mean, np.where(std > 0, std, 1.0)


def standardised(
    x: NDArray[Any], mean: NDArray[np.float64], std: NDArray[np.float64], dtype: DTypeLike
) -> NDArray[Any]:
    """Return (x - mean) / std a channel, computed in float64."""
    every_mean, every_std = (np.broadcast_to(value, x.shape[1:]).ravel() for value in (mean, std))
    result = np.empty(x.shape, dtype)
    for start in range(0, len(x), _AT_ONCE):
        part = x[start : start + _AT_ONCE].astype(np.float64)
        flat = part.reshape(len(part), -1)
        flat -= every_mean
        flat /= every_std
        result[start : start + _AT_ONCE] = part
    return result


def stratified(labels: Labels, fraction: float) -> NDArray[np.bool_]:
    """Return a fixed mask of ``fraction`` of the samples of every class, drawn by the random stream of that class."""
    chosen = np.zeros(len(labels), bool)
    for label in range(int(labels.max()) + 1):
        members = np.flatnonzero(labels == label)
        order = rng.permutation(len(members), 0, label, purpose="stratified split")
        chosen[members[order[: round(fraction * len(members))]]] = True
    return chosen


def learnable(dataset: Dataset) -> Dataset:
    """Return ``dataset`` if one can train on it and test what was learnt. Raises ``FileFormatError``."""
    name = dataset.name
    if len(dataset.train_y) == 0 or len(dataset.test_y) == 0:
        raise FileFormatError(
            f"data set {name} has {len(dataset.train_y)} samples to train on and {len(dataset.test_y)} to test on",
            allowed="1 or more of each",
            remedy="a set of one part is split 80/20 a class: give 3 samples a class or more",
        )
    trained = np.unique(dataset.train_y)
    if len(trained) < 2:
        raise FileFormatError(
            f"every training sample of data set {name} is of class {trained[0]}", allowed="2 classes or more"
        )
    never = np.setdiff1d(dataset.test_y, trained)
    if len(never):
        raise FileFormatError(
            f"data set {name} tests on class {never[0]}, of which there is no training sample",
            allowed=f"classes that are trained on: {', '.join(map(str, trained[:20]))}",
            remedy="choose the parts so that every class is in the training part",
        )
    return dataset


def pictures(
    name: str,
    train: tuple[NDArray[np.uint8], Labels],
    test: tuple[NDArray[np.uint8], Labels],
    classes: int,
    mean: ArrayLike,
    std: ArrayLike,
    dtype: DTypeLike,
) -> Dataset:
    """Return a data set of pictures [N, H, W, C] and labels [N], stored as uint8.

    ``mean`` and ``std``, in all or by channel, are those of pixels / 255 and normalise the samples. Raises
    ``FileFormatError`` as ``learnable``.
    """
    (train_x, train_y), (test_x, test_y) = train, test
    normalisation = Normalisation.of_channels(np.multiply(mean, 255), np.multiply(std, 255), train_x.shape[1:], dtype)
    return learnable(
        Dataset(
            name=name,
            train_x=train_x,
            train_y=train_y,
            test_x=test_x,
            test_y=test_y,
            classes=classes,
            normalisation=normalisation,
        )
    )
