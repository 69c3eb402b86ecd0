"""Digests of the results of each layer for each sample of one step, to compare two runs of it."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from dpsim.replica import Array


class SampleDigests:
    """Collects digests of a rank's samples; ``add`` is a ``dpsim.replica.Observer``.

    ``digests`` by ``input`` (the samples themselves), ``forward LAYER`` and ``input_gradient LAYER``, in the order of
    computation.
    """

    def __init__(self) -> None:
        self.digests: dict[str, list[bytes]] = {}

    def add(self, operation: str, layer: str, values: Array, result: Array) -> None:
        if not self.digests:
            self.digests["input"] = _row_digests(values)
        self.digests.setdefault(f"{operation} {layer}", []).extend(_row_digests(result))


def _row_digests(rows: Array) -> list[bytes]:
    """8 bytes of the SHA-256 of each row."""
    return [hashlib.sha256(row.tobytes()).digest()[:8] for row in rows]


def as_numbers(digests: list[bytes]) -> NDArray[np.uint64]:
    """Digests as an array."""
    return np.frombuffer(b"".join(digests), np.uint64)
