"""Algorithms of pairs of ranks as steps (Thakur, Rabenseifner and Gropp 2005): halving-doubling, recursive doubling."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import NamedTuple

from dpsim.kernels.allreduce.steps import SLOT, STAGING, Region, Step, StepList
from dpsim.kernels.allreduce.tree import PartialSums, Tree, slots, slots_below


class _Share(NamedTuple):
    """The part of a subtree's sum, from ``low`` to ``high`` of 0 to 1, that lies in the partial sum ``number``."""

    rank: int
    low: Fraction
    high: Fraction
    number: int


class _Sum(NamedTuple):
    """A step over the part from ``low`` to ``high`` of 0 to 1."""

    rank: int
    low: Fraction
    high: Fraction
    sources: tuple[int, ...]
    target: int
    final: bool = False


def halving_doubling(sums: PartialSums) -> StepList:
    """Halve recursively, nearest partner first, then double back (Rabenseifner), along the tree.

    At each node, from the lowest up, the ranks below it divide the elements anew and add the sums of its two halves,
    each over its own share; with 2^k ranks of one partial sum that is plain recursive halving. Doubling goes the same
    way back: each rank copies the results that belong to its share of the half below.
    """
    return _unit_steps(_halved(sums, sums.tree))


def plain_halving_doubling(ranks: int) -> StepList:
    """Halve recursively, farthest partner first, then double back.

    A group of any size is brought to a power of two first: of the first 2r ranks, odd ones hand their data to the rank
    below them and get the result from it at the end.
    """
    members, handed = _core(ranks)
    none, all_ = Fraction(0), Fraction(1)

    def farthest_first(of: list[int]) -> Tree:
        return of[0] if len(of) == 1 else (farthest_first(of[::2]), farthest_first(of[1::2]))

    first = [_Sum(keeper, none, all_, (keeper, giver), keeper) for keeper, giver in handed]
    last = [_Sum(giver, none, all_, (keeper,), giver) for keeper, giver in handed]
    halved = _halved(slots(range(ranks + 1)), farthest_first(members)) if len(members) > 1 else []
    return _unit_steps([first, *halved, last])


def recursive_doubling(ranks: int) -> StepList:
    """Exchange everything and add it in log2(n) rounds of pairs at distance 1, 2, 4, ...

    A group of any size is brought to a power of two as in ``plain_halving_doubling``. Addition commutes to the bit, so
    both partners hold the same sum.
    """
    members, handed = _core(ranks)
    own = [Region(SLOT, rank, 0, 1) for rank in range(ranks)]
    received = [Region(STAGING, rank, 0, 1) for rank in range(ranks)]
    rounds = [[Step(keeper, (0, 1), (own[keeper], own[giver]), (own[keeper],)) for keeper, giver in handed]]
    for level in range(len(members).bit_length() - 1):
        pairs = [(rank, members[number ^ 1 << level]) for number, rank in enumerate(members)]
        rounds.append([Step(rank, 0, (own[other],), (received[rank],)) for rank, other in pairs])
        rounds.append([Step(rank, (0, 1), (own[rank], received[rank]), (own[rank],)) for rank, _ in pairs])
    rounds.append([Step(giver, 0, (own[keeper],), (own[giver],)) for keeper, giver in handed])
    return StepList.of(rounds, 1)


def _core(ranks: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the largest power of two of ranks, and the (keeper, giver) that bring the other ranks' data to them."""
    handed = [(rank, rank + 1) for rank in range(0, 2 * (ranks - (1 << (ranks.bit_length() - 1))), 2)]
    givers = {giver for _, giver in handed}
    return [rank for rank in range(ranks) if rank not in givers], handed


def _unit_steps(rounds: list[list[_Sum]]) -> StepList:
    units = math.lcm(*(bound.denominator for parts in rounds for part in parts for bound in (part.low, part.high)))

    def step(part: _Sum) -> Step:
        first, stop = int(part.low * units), int(part.high * units)
        sources = tuple(Region(SLOT, number, first, stop) for number in part.sources)
        shape: Tree = (0, 1) if len(sources) == 2 else 0
        return Step(part.rank, shape, sources, (Region(SLOT, part.target, first, stop),), final=part.final)

    return StepList.of([[step(part) for part in parts] for parts in rounds], units)


def _halved(sums: PartialSums, tree: Tree) -> list[list[_Sum]]:
    """Return the rounds that bring the sum along a tree to all ranks that own a part of it."""
    firsts = sums.firsts
    levels: list[list[Tree]] = [_nodes(tree, height) for height in range(_height(tree) + 1)]
    shares: dict[Tree, list[_Share]] = {}
    rounds = [
        [part for node in nodes for part in _add_halves(sums, node, shares, firsts, final=node == tree)]
        for nodes in levels
    ]
    held = {share.rank: [share] for share in shares[tree]}
    rounds += [[part for node in nodes for part in _spread(node, shares, held, firsts)] for nodes in levels[::-1]]
    return rounds


def _height(tree: Tree) -> int:
    return 0 if isinstance(tree, int) else 1 + max(map(_height, tree))


def _nodes(tree: Tree, height: int) -> list[Tree]:
    """Return the nodes of a tree at a height above its lowest one."""
    below = [] if isinstance(tree, int) else [node for half in tree for node in _nodes(half, height)]
    return [*below, tree] if _height(tree) == height else below


def _add_halves(
    sums: PartialSums, node: Tree, shares: dict[Tree, list[_Share]], firsts: list[int], *, final: bool
) -> list[_Sum]:
    """Return the steps that make a node's sum of its halves' sums; notes in ``shares`` where it lies then."""
    if isinstance(node, int):
        share = _Share(sums.owners[node], Fraction(0), Fraction(1), node)
        shares[node] = [share]
        return [_Sum(share.rank, share.low, share.high, (node,), node, final)] if final else []
    steps = []
    for rank, low, high in _divided(node, shares):
        own = next(number for number in slots_below(node) if sums.owners[number] == rank)
        target = firsts[rank] if final else own
        shares.setdefault(node, []).append(_Share(rank, low, high, target))
        for left, right in itertools.product(shares[node[0]], shares[node[1]]):
            start, stop = max(low, left.low, right.low), min(high, left.high, right.high)
            if start < stop:
                steps.append(_Sum(rank, start, stop, (left.number, right.number), target, final))
    return steps


def _divided(node: tuple[Tree, Tree], shares: dict[Tree, list[_Share]]) -> list[tuple[int, Fraction, Fraction]]:
    """Divide the elements equally among the ranks below a node, each near what the rank held of its child."""
    middle = {share.rank: (share.low + share.high, share.rank) for half in node for share in shares[half]}
    ranks = sorted(middle, key=middle.__getitem__)
    return [(rank, Fraction(i, len(ranks)), Fraction(i + 1, len(ranks))) for i, rank in enumerate(ranks)]


def _spread(
    node: Tree, shares: dict[Tree, list[_Share]], held: dict[int, list[_Share]], firsts: list[int]
) -> list[_Sum]:
    """Return the steps that give each rank the results of its shares of a node's children; ``held``: its own."""
    steps = []
    for want in (share for half in (node if isinstance(node, tuple) else ()) for share in shares[half]):
        target = firsts[want.rank]
        for source in shares[node]:
            for low, high in _without(max(want.low, source.low), min(want.high, source.high), held[want.rank]):
                steps.append(_Sum(want.rank, low, high, (firsts[source.rank],), target))
                held[want.rank].append(_Share(want.rank, low, high, target))
    return steps


def _without(low: Fraction, high: Fraction, held: list[_Share]) -> list[tuple[Fraction, Fraction]]:
    """Return the parts of ``low`` to ``high`` that are not held."""
    parts = [(low, high)]
    for share in held:
        parts = [
            part
            for start, stop in parts
            for part in ((start, min(stop, share.low)), (max(start, share.high), stop))
            if part[0] < part[1]
        ]
    return [part for part in parts if part[0] < part[1]]
