"""Questions to a chain of layers besides training: what each computes, where a NaN comes from, whether leaves' bits
depend on other leaves.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from dpsim.kernels.allreduce.tree import fold, leaf_tree
from dpsim.nn.layer import Layer, leaf_ranges
from dpsim.replica import Array, Batch, Leaves, Observer

LossGradient = Callable[[Array, Array, Leaves], Array]
"""(logits, labels, leaves) -> the gradient of the loss by the logits."""
Fetch = Callable[[Sequence[Array]], list[Array]]


class _Pass(NamedTuple):
    """The results of a pass, as host arrays by name: rows of samples, and the gradients of parameters."""

    rows: dict[str, Array]
    gradients: dict[str, Array]


def leaf_difference(chain: Sequence[Layer], loss_gradient: LossGradient, batch: Batch, fetch: Fetch) -> str | None:
    """Return the first operation of a training pass that gives a leaf other bits alone than amid the others, or None.

    Training in leaves takes for granted that there is none. On the CPU a table chooses code that is known to be so; a
    GPU's libraries choose their own code, so there it is tried.
    The layers are bound to one slot of gradients. The arrays of ``batch`` are where the layers compute, and ``fetch``
    makes host arrays of those.
    """
    at_once = _passed(chain, loss_gradient, batch, fetch)
    of_leaves = []
    for start, stop in leaf_ranges(batch.leaves):
        if start == stop:
            of_leaves.append({name: np.zeros_like(value) for name, value in at_once.gradients.items()})
            continue
        leaf = replace(
            batch,
            x=batch.x[start:stop],
            labels=batch.labels[start:stop],
            leaves=(0, stop - start),
            first_sample=batch.first_sample + start,
        )
        alone = _passed(chain, loss_gradient, leaf, fetch)
        for name, rows in alone.rows.items():
            if rows.tobytes() != at_once.rows[name][start:stop].tobytes():
                return name
        of_leaves.append(alone.gradients)
    sums = fold(leaf_tree(len(of_leaves)), of_leaves.__getitem__, _added)
    return next((name for name, total in sums.items() if total.tobytes() != at_once.gradients[name].tobytes()), None)


def _added(left: dict[str, Array], right: dict[str, Array]) -> dict[str, Array]:
    return {name: operator.add(value, right[name]) for name, value in left.items()}


def _passed(chain: Sequence[Layer], loss_gradient: LossGradient, batch: Batch, fetch: Fetch) -> _Pass:
    """Return one pass over a batch, forward and backward."""
    result = _Pass({}, {})
    x = batch.x
    for layer in chain:
        layer.begin(batch)
    for layer in chain:
        x = layer.forward(x, batch.leaves, training=True)
        result.rows[f"the forward pass of layer {layer.name!r}"] = np.array(*fetch([x]))
    grad = loss_gradient(x, batch.labels, batch.leaves)
    first_trained = next(layer for layer in chain if layer.tensors)
    for layer in reversed(chain):
        layer.write_gradients(grad, batch.leaves)
        for role, gradient in layer.gradients.items():
            result.gradients[f"the gradient {role} of layer {layer.name!r}"] = np.array(*fetch([gradient]))
        if layer is first_trained:
            break
        grad = layer.input_gradient(grad, batch.leaves)
        result.rows[f"the input gradient of layer {layer.name!r}"] = np.array(*fetch([grad]))
    return result


def nonfinite_forward(layers: Sequence[Layer], x: Array) -> tuple[str | None, Array]:
    """Forward in training mode up to the first parameter or output that is not finite.

    Returns its description and the last output; None if all are finite.
    """
    for layer in layers:
        for role, value in layer.parameters.items():
            if not is_finite(value):
                return f"parameter {layer.name}.{role} of layer {layer.name!r}", x
        x = layer.forward(x, (0, len(x)), training=True)
        if not is_finite(x):
            return f"the output of layer {layer.name!r}", x
    return None, x


def nonfinite_gradient(layers: Sequence[Layer]) -> str | None:
    """Return the first bound gradient that is not finite, from the last layer to the first; None if all are finite."""
    for layer in reversed(layers):
        for role, value in layer.gradients.items():
            if not is_finite(value):
                return f"gradient {layer.name}.{role} of layer {layer.name!r}"
    return None


def is_finite(value: Array) -> bool:
    return bool(np.isfinite(value).all())


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
