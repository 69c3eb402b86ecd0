"""Shards: which part of an array belongs to which rank in a reduce-scatter and an all-gather."""

from __future__ import annotations

from collections.abc import Callable

LINE = 16
"""Elements between the bounds of shards: at least a cache line, so that no two ranks write to the same one."""


def line_bound(elements: int, units: int) -> Callable[[int], int]:
    """Return where each unit begins: whole cache lines, spread evenly over the units (``StepList.scaled``)."""
    lines = -(-elements // LINE)
    return lambda unit: min(unit * lines // units * LINE, elements)


def shard_bounds(elements: int, ranks: int) -> list[int]:
    """Return ``ranks + 1`` boundaries: rank r has elements ``[r]`` to ``[r + 1] - 1``, which may be none."""
    return list(map(line_bound(elements, ranks), range(ranks + 1)))


def largest_shard(elements: int, ranks: int) -> int:
    """Return the elements of memory that the largest shard takes: whole cache lines."""
    return -(-elements // (LINE * ranks)) * LINE
