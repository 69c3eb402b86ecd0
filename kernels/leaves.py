"""How a kernel goes over leaves and adds what they give along the tree (``allreduce.tree.leaf_tree``)."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_DOUBLINGS = 12
"""Sums that wait for their pair at once: there may be 2^11 leaves or fewer."""


@functools.lru_cache(maxsize=4096)
def leaf_program(leaves: tuple[int, ...]) -> NDArray[Any]:
    """Return [leaves, 3] of int64: first sample, the one after the last, and how many sums are complete with it.

    A binary counter: with leaf i as many pairs are complete as i has trailing one bits, with the last all there are.
    Adding what is complete, the sum before it plus its own, leaves the sums that still wait.
    """
    rows, depth = [], 0
    for number, (start, stop) in enumerate(itertools.pairwise(leaves)):
        ones = (~number & (number + 1)).bit_length() - 1
        merges = ones if number < len(leaves) - 2 else depth
        rows.append((start, stop, merges))
        depth += 1 - merges
    return np.array(rows, np.int64)
