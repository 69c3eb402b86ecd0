"""Whether a leaf has the same bits alone as amid other leaves: what training in leaves takes for granted.

On the CPU a table chooses code that is known to. A GPU's libraries choose their own code, so there it is tried.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dpsim.kernels.allreduce.tree import fold, leaf_tree
from dpsim.nn.layer import Layer, leaf_ranges
from dpsim.replica import Array, Batch, Leaves

LossGradient = Callable[[Array, Array, Leaves], Array]
"""(logits, labels, leaves) -> the gradient of the loss by the logits."""
Fetch = Callable[[Sequence[Array]], list[Array]]


class _Pass(NamedTuple):
    """What a pass computed, as host arrays by name: rows of samples, and the gradients of parameters."""

    rows: dict[str, Array]
    gradients: dict[str, Array]


def leaf_difference(chain: Sequence[Layer], loss_gradient: LossGradient, batch: Batch, fetch: Fetch) -> str | None:
    """The first operation of a training pass that gives a leaf other bits alone than amid the others; None if none.

    The layers are bound to one slot of gradients. The arrays of ``batch`` are where the layers compute, and ``fetch``
    makes host arrays of those.
    """
    whole = _passed(chain, loss_gradient, batch, fetch)
    of_leaves = []
    for start, stop in leaf_ranges(batch.leaves):
        if start == stop:
            of_leaves.append({name: np.zeros_like(value) for name, value in whole.gradients.items()})
            continue
        leaf = Batch(
            x=batch.x[start:stop],
            labels=batch.labels[start:stop],
            leaves=(0, stop - start),
            seed=batch.seed,
            step=batch.step,
            first_sample=batch.first_sample + start,
        )
        alone = _passed(chain, loss_gradient, leaf, fetch)
        for name, rows in alone.rows.items():
            if rows.tobytes() != whole.rows[name][start:stop].tobytes():
                return name
        of_leaves.append(alone.gradients)
    sums = fold(leaf_tree(len(of_leaves)), of_leaves.__getitem__, _added)
    return next((name for name, total in sums.items() if total.tobytes() != whole.gradients[name].tobytes()), None)


def _added(left: dict[str, Array], right: dict[str, Array]) -> dict[str, Array]:
    return {name: operator.add(value, right[name]) for name, value in left.items()}


def _passed(chain: Sequence[Layer], loss_gradient: LossGradient, batch: Batch, fetch: Fetch) -> _Pass:
    """One pass over a batch, forward and backward."""
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
