"""What 16 bits on the wire should give, written from its description alone, slowly."""

from __future__ import annotations

import numpy as np

from dpsim.comm.message_steps import chunk_bounds
from dpsim.comm.transport import Array
from dpsim.kernels.allreduce.tree import Tree


def rounded(values: Array, wire_dtype: str, scale: float = 1.0) -> Array:
    """Float32 values rounded once to 16 bits of ``values * scale``, and scaled back."""
    with np.errstate(over="ignore", invalid="ignore"):  # numbers that 16 bits cannot hold, signalling NaNs
        scaled = (values * np.float32(scale)).astype(np.float32)
        nearest = scaled.astype(np.float16).astype(np.float32) if wire_dtype == "float16" else _bfloat16(scaled)
        return np.asarray(nearest * np.float32(1 / scale), np.float32)


def _bfloat16(values: Array) -> Array:
    """The nearer one of the two neighbours whose low 16 bits are zero; of two equally near the one that is even."""
    bits = values.view(np.uint32)
    below = bits & np.uint32(0xFFFF0000)
    above = below + np.uint32(0x10000)
    exact = np.where(np.isfinite(values), values, 0).astype(np.float64)
    low, high = below.view(np.float32).astype(np.float64), above.view(np.float32).astype(np.float64)
    largest = (above & np.uint32(0x7FFFFFFF)) == np.uint32(0x7F800000)  # above it comes infinity, as if at 2^128
    high = np.where(largest, np.copysign(2.0**128, exact), high)
    to_low, to_high = np.abs(exact - low), np.abs(high - exact)
    even = (below >> np.uint32(16)) & np.uint32(1) == 0
    chosen = np.where((to_low < to_high) | ((to_low == to_high) & even), below, above).view(np.float32)
    return np.where(np.isfinite(values), chosen, values).astype(np.float32)


def direct_sum(contributions: list[Array], wire_dtype: str, scale: float) -> Array:
    """Every contribution rounded once, added in float32 along the tree, the sum rounded once."""
    return rounded(tree_sum([rounded(row, wire_dtype, scale) for row in contributions]), wire_dtype, scale)


def tree_sum(rows: list[Array]) -> Array:
    """The left half, the largest power of two of them that leaves some to the right, plus the right half."""
    if len(rows) == 1:
        return rows[0]
    left = 1
    while 2 * left < len(rows):
        left *= 2
    with np.errstate(over="ignore", invalid="ignore"):
        return tree_sum(rows[:left]) + tree_sum(rows[left:])


def node_sum(tree: Tree, slots: list[Array], wire_dtype: str, scale: float) -> Array:
    """Every slot is rounded already; every sum of two nodes of the tree is rounded."""
    if isinstance(tree, int):
        return slots[tree]
    left, right = (node_sum(node, slots, wire_dtype, scale) for node in tree)
    with np.errstate(over="ignore", invalid="ignore"):
        return rounded(left + right, wire_dtype, scale)


def hierarchical_sum(contributions: list[Array], of_a_node: int, wire_dtype: str, scale: float) -> Array:
    """Float32 sums along the tree in each node, a slice each; ``direct_sum`` across."""
    result = np.empty_like(contributions[0])
    bounds = chunk_bounds(len(result), of_a_node)
    nodes = [contributions[i : i + of_a_node] for i in range(0, len(contributions), of_a_node)]
    for place in range(of_a_node):
        part = slice(bounds[place], bounds[place + 1])
        sums = [tree_sum([row[part] for row in node]) for node in nodes]
        result[part] = direct_sum(sums, wire_dtype, scale) if len(nodes) > 1 else sums[0]
    return result
