"""Looking into a step: what each layer made of each sample, as digests that another run's can be held against."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsim.nn import Network
from dpsim.nn.layer import Layer
from dpsim.replica import Array

Watch = Callable[[str, Layer, Array, Array], None]
"""(``forward`` or ``input_gradient``, the layer, what it was given, what it gave), while it computes."""


def watch(network: Network, see: Watch) -> None:
    """Let ``see`` see all that the layers of ``network`` compute from now on; for a network of its own."""
    for layer in network.chain:
        for what in ("forward", "input_gradient"):
            setattr(layer, what, _seen(what, layer, getattr(layer, what), see))


def _seen(what: str, layer: Layer, compute: Callable[..., Array], see: Watch) -> Callable[..., Array]:
    def computed(given: Array, *rest: Any, **settings: Any) -> Array:
        before = given.copy() if what == "input_gradient" else given  # which it may overwrite
        found = compute(given, *rest, **settings)
        see(what, layer, before, found)
        return found

    return computed


class SampleDigests:
    """A digest of what each layer made of each sample of this rank: ``forward NAME`` and ``input_gradient NAME``.

    ``found`` is in the order of computation, and begins with ``input``: the samples themselves.
    """

    def __init__(self) -> None:
        self.found: dict[str, list[bytes]] = {}

    def see(self, what: str, layer: Layer, given: Array, made: Array) -> None:
        if not self.found:
            self.found["input"] = digests(given)
        self.found.setdefault(f"{what} {layer.name}", []).extend(digests(made))


def digests(rows: Array) -> list[bytes]:
    """8 bytes of the SHA-256 of each row."""
    return [hashlib.sha256(row.tobytes()).digest()[:8] for row in rows]


def as_numbers(found: list[bytes]) -> NDArray[np.uint64]:
    """Digests as an array."""
    return np.frombuffer(b"".join(found), np.uint64)
