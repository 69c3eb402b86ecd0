"""The fixed order in which an allreduce adds, so that its bits depend on no rank count, algorithm or bucket.

The global batch is cut into leaves, and one binary tree says in which order they are added: the left half of a node is
the largest power of two of its leaves that leaves some to the right. A rank holds a block of leaves. It adds up whole
subtrees of these alone: they are its **partial sums**, in **slots** that are numbered over all ranks. The allreduce
adds the partial sums of all ranks along the rest of the tree. With one leaf a rank every rank has one slot.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Tree = int | tuple["Tree", "Tree"]
"""The number of a partial sum, or the sum of two trees."""
T = TypeVar("T")
MOST_DOUBLINGS = 12
"""Sums that wait for their pair at once: there may be 2^11 leaves or fewer."""


@dataclass(frozen=True)
class PartialSums:
    """The partial sums that one allreduce adds, in the order of their leaves.

    ``owners``: the rank that holds each; ``tree``: the order in which they are added, by their numbers.
    """

    owners: tuple[int, ...]
    tree: Tree

    @property
    def ranks(self) -> int:
        return max(self.owners) + 1

    @property
    def extra(self) -> int:
        """How many partial sums there are beyond one a rank, because ranks do not hold whole subtrees."""
        return len(self.owners) - self.ranks

    @property
    def firsts(self) -> list[int]:
        """Each rank's first partial sum, in which its result lands."""
        return [self.owners.index(rank) for rank in range(self.ranks)]

    def of(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of a rank's partial sums."""
        return tuple(slot for slot, owner in enumerate(self.owners) if owner == rank)


def left_part(leaves: int) -> int:
    """Return the leaves left of a node: the largest power of two below ``leaves``, which are 2 or more."""
    return 1 << ((leaves - 1).bit_length() - 1)


def leaf_tree(leaves: int) -> Tree:
    """Return the tree over ``leaves`` leaves."""
    return slots(range(leaves + 1)).tree


def slots(bounds: Sequence[int]) -> PartialSums:
    """Return the ranks' partial sums: rank r holds leaves ``bounds[r]`` to ``bounds[r + 1] - 1``, one or more."""
    owners: list[int] = []

    def walk(low: int, high: int) -> Tree:
        owner = next(rank for rank in range(len(bounds) - 1) if low < bounds[rank + 1])
        if high <= bounds[owner + 1]:
            owners.append(owner)
            return len(owners) - 1
        middle = low + left_part(high - low)
        left = walk(low, middle)
        return left, walk(middle, high)

    tree = walk(bounds[0], bounds[-1])
    return PartialSums(tuple(owners), tree)


def subtrees(leaves: int, first: int, stop: int) -> list[tuple[int, int]]:
    """Return the largest subtrees of the tree over ``leaves`` in ``first`` to ``stop - 1``, as ranges of leaves."""
    ranges: list[tuple[int, int]] = []

    def walk(low: int, high: int) -> None:
        if first <= low and high <= stop:
            ranges.append((low, high))
        elif low < stop and first < high:
            middle = low + left_part(high - low)
            walk(low, middle)
            walk(middle, high)

    walk(0, leaves)
    return ranges


def slots_below(tree: Tree) -> tuple[int, ...]:
    """Return the numbers of the partial sums in a tree, from left to right."""
    return fold(tree, lambda slot: (slot,), lambda left, right: left + right)


def fold(tree: Tree, slot: Callable[[int], T], add: Callable[[T, T], T]) -> T:
    """Add along the tree: ``slot(i)`` is partial sum i."""
    if isinstance(tree, int):
        return slot(tree)
    left = fold(tree[0], slot, add)
    return add(left, fold(tree[1], slot, add))


@functools.lru_cache(maxsize=4096)
def leaf_program(leaves: tuple[int, ...]) -> NDArray[Any]:
    """Return [leaves, 3] for a kernel: first sample, the one after the last, and how many sums are complete then.

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
