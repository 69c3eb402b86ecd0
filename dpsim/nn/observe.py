"""Shows what layers compute, while they compute it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dpsim.nn.layer import Layer
from dpsim.replica import Array, Observer


def observe(layers: Sequence[Layer], observer: Observer) -> None:
    """Call ``observer`` from now on for every forward pass and input gradient of the layers."""
    for layer in layers:
        for operation in ("forward", "input_gradient"):
            setattr(layer, operation, _observed(operation, layer, observer))


def _observed(operation: str, layer: Layer, observer: Observer) -> Callable[..., Array]:
    compute = getattr(layer, operation)

    def computed(values: Array, *rest: Any, **settings: Any) -> Array:
        before = values.copy() if operation == "input_gradient" else values  # which may be overwritten
        result: Array = compute(values, *rest, **settings)
        observer(operation, layer.name, before, result)
        return result

    return computed
