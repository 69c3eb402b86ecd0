"""What a training ends in: the sums over the test set, and the digest of what was trained."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsim.data import Dataset
from dpsim.replica import BatchSums

_SAMPLES = 256


def evaluated(
    evaluate: Callable[[NDArray[Any], NDArray[np.int64]], BatchSums], dataset: Dataset, low: int, high: int
) -> NDArray[np.float64]:
    """Return loss, correct predictions and number of test samples ``low`` to ``high - 1``, computed 256 at a time."""
    total = np.zeros(3)
    for start in range(low, high, _SAMPLES):
        sums = evaluate(*dataset.test_batch(start, min(start + _SAMPLES, high)))
        total += (sums.loss, sums.correct, sums.samples)
    return total


def digest(parts: Iterable[Mapping[str, NDArray[Any]]]) -> str:
    """Return the SHA-256 of the names and tensors of each part, in the order of the names."""
    sha = hashlib.sha256()
    for part in parts:
        for name in sorted(part):
            sha.update(name.encode())
            sha.update(np.ascontiguousarray(part[name]).tobytes())
    return sha.hexdigest()
