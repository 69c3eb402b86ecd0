"""Closed forms of the allreduce algorithms: their rounds, and their cost by alpha, beta and gamma of a link."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpsim.layout import node_counts
from dpsim.machine import Link
from dpsim.wire_dtype import SIXTEEN_BITS

Floats = NDArray[np.float64]
_ONE_MIB = float(2**20)


def wire_share(wire_dtype: str) -> float:
    """Bytes on the wire for a byte of gradients: a half where float32 travels as 16 bits."""
    return 0.5 if wire_dtype in SIXTEEN_BITS else 1.0


def on_the_wire(link: Link, wire_dtype: str) -> Link:
    """A link as bytes of gradients see it that travel as ``wire_dtype``: M costs what its share of M bytes does."""
    share = wire_share(wire_dtype)
    return msgspec.structs.replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / share)


def link_points(link: Link, algorithm: str, devices: int) -> Floats:
    """Points of the link's formula, which is a line in M (``mpi``: the lower of two lines).

    ring, direct, two-shot   2(n-1) alpha + 2(n-1)/n M beta + (n-1)/n M gamma
    halving-doubling     2 log2(p) alpha + 2(p-1)/p M beta + (p-1)/p M gamma
    recursive-doubling   log2(p) (alpha + M beta + M gamma)
    mpi, auto            min(recursive-doubling, halving-doubling), as MPI libraries choose by size
    one-shot             (n-1) (alpha + M beta + M gamma): everyone sends everything to everyone

    p is the largest power of two <= n; where p < n the two logarithmic ones pay 2 (alpha + M beta) + M gamma more to
    fold the other ranks in and to send them the sums. Source: ``reference formulas``, Thakur et al. 2005.
    """
    alpha, beta, gamma = link.latency_s, 1.0 / link.bandwidth_bytes_per_s, link.reduce_s_per_byte
    n, rounds = devices, devices.bit_length() - 1
    p = 2**rounds
    fold, fold_slope = (0.0, 0.0) if p == n else (2 * alpha, 2 * beta + gamma)
    doubling = (rounds * alpha + fold, rounds * (beta + gamma) + fold_slope)
    halving = (2 * rounds * alpha + fold, (2 * beta + gamma) * (p - 1) / p + fold_slope)
    ring = (2 * (n - 1) * alpha, (2 * beta + gamma) * (n - 1) / n)
    if algorithm == "one-shot":
        base, slope = (n - 1) * alpha, (n - 1) * (beta + gamma)
        return np.array([[0.0, _ONE_MIB], [base, base + slope * _ONE_MIB]])
    if algorithm not in ("mpi", "auto"):
        base, slope = {"recursive-doubling": doubling, "halving-doubling": halving}.get(algorithm, ring)
        return np.array([[0.0, _ONE_MIB], [base, base + slope * _ONE_MIB]])
    gain = doubling[1] - halving[1]
    if gain <= 0:
        return np.array([[0.0, _ONE_MIB], [doubling[0], doubling[0] + doubling[1] * _ONE_MIB]])
    cross = max((halving[0] - doubling[0]) / gain, 1.0)
    sizes = np.array([0.0, cross, 2 * cross])
    return np.array([sizes, np.minimum(doubling[0] + doubling[1] * sizes, halving[0] + halving[1] * sizes)])


def hierarchical_points(link: Link, link_in_node: Link, nodes: int, of_a_node: int) -> Floats:
    """Points of the two-level formula for m nodes of k devices, a line in M.

    2(k-1) alpha_in + (2 beta_in + gamma_in) (k-1)/k M  +  2(m-1) alpha + (2 beta + gamma) (m-1)/m M/k

    The first part is the reduce-scatter and the all-gather inside a node, over ``link_in_node``, the second ``direct``
    among the nodes on a slice of M/k bytes, over ``link``.
    """
    base = slope = 0.0
    for level, members, share in ((link_in_node, of_a_node, 1.0), (link, nodes, 1.0 / of_a_node)):
        base += 2 * (members - 1) * level.latency_s
        beta = 1.0 / level.bandwidth_bytes_per_s
        slope += (2 * beta + level.reduce_s_per_byte) * (members - 1) / members * share
    return np.array([[0.0, _ONE_MIB], [base, base + slope * _ONE_MIB]])


def rounds(algorithm: str, devices: int, layout: str = "") -> int:
    """Message rounds of an allreduce that follow one another, after each of which someone must look.

    mpi, one-shot 1; direct, two-shot, auto 2; ring 2(n-1); recursive doubling log2(p); halving-doubling 2 log2(p); the
    last two 2 more where n is no power of two (p the largest one below it); hierarchical 2 a level that has more than
    one member.
    """
    if devices == 1:
        return 1
    if algorithm == "hierarchical":
        return sum(2 for members in node_counts(layout, devices) if members > 1)
    log2 = devices.bit_length() - 1
    fold = 0 if 2**log2 == devices else 2
    known = {
        "mpi": 1, "one-shot": 1, "two-shot": 2, "auto": 2, "direct": 2, "ring": 2 * (devices - 1),
        "recursive-doubling": log2 + fold,
    }  # fmt: skip
    return known.get(algorithm, 2 * log2 + fold)
