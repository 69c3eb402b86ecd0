"""The loss: softmax cross-entropy, summed over samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dpsim.nn.layer import Buffers, leaf_ranges, slot_parts, tree_sum
from dpsim.nn.ops import Ops
from dpsim.replica import Array, BatchSums, DeferredSums, Leaves, Slot


def softmax_cross_entropy(
    ops: Ops,
    buffers: Buffers,
    logits_bC: Array,
    labels_b: NDArray[np.int64],
    leaves: Leaves,
    label_smoothing: float = 0.0,
    extra_slots: Sequence[Slot] = (),
) -> tuple[BatchSums | DeferredSums, Array]:
    """Sum over samples of -log softmax(logits)[label], in nats, and its gradient softmax(logits) - onehot(label).

    With label smoothing e, a sample's loss is (1 - e) times that plus e times the mean over the classes of
    -log softmax(logits) (Szegedy et al., arXiv:1512.00567; PyTorch's definition). Losses of samples are added in
    float64, a leaf at a time, and leaves along the tree of their slot. Legend: b samples, C classes.
    """
    losses_b = buffers.take("losses", (len(logits_bC),))
    grad_bC = buffers.take("logits gradient", logits_bC.shape)
    correct = ops.softmax_cross_entropy(logits_bC, labels_b, losses_b, grad_bC)
    if label_smoothing:
        ops.smooth_labels(logits_bC, labels_b, label_smoothing, losses_b, grad_bC)
    sums = ops.xp.empty(len(leaves) - 1, np.float64)
    for leaf, (start, stop) in enumerate(leaf_ranges(leaves)):
        sums[leaf] = losses_b[start:stop].sum(dtype=np.float64)
    slots = [tree_sum(of_slot) for of_slot in slot_parts(sums, extra_slots)]
    return ops.sums(slots, correct, len(labels_b)), grad_bC
