"""Ring and recursive halving-doubling in memory that all ranks see, adding in the fixed tree order: who adds what when.

A schedule is steps; between two of them all ranks wait for each other. No partial sum is carried on: it stays where
its last addition put it, in memory of the slots that it is a sum of, and is read from there when its sibling is there.
So the fixed order moves no more bytes than the order of a plain ring, and needs no memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from dpsim.kernels.allreduce.tree import PartialSums, Tree, fold, slots_below


@dataclass(frozen=True)
class Partial:
    """Where a part of the sum of a subtree lies: in ``keeper``'s memory.

    float32 sums of 16-bit numbers need twice a slot's memory: their lower halves lie in that of ``spare``, another slot
    of the same subtree. A subtree of one slot has none, and holds what the rank put there.
    """

    keeper: int
    spare: int | None = None


@dataclass(frozen=True)
class Move:
    """``rank`` adds ``sources``, from left to right, over a part of the elements, and puts the sum into ``target``.

    ``low`` to ``high``: the part, of 0 to 1. ``final``: the sum is the whole one and becomes the result; otherwise it
    stays a partial sum. One source and not ``final``: a result is copied.
    """

    rank: int
    low: Fraction
    high: Fraction
    sources: tuple[Partial, ...]
    target: Partial
    final: bool = False


Schedule = tuple[tuple[Move, ...], ...]


def moved(schedule: Schedule) -> Fraction:
    """What a schedule reads and writes, in arrays."""
    return sum(((m.high - m.low) * (len(m.sources) + 1) for step in schedule for m in step), Fraction(0))


def ring(slots: PartialSums) -> Schedule:
    """A ring's schedule: n - 1 steps that add, n - 1 that pass the results on.

    Part c of the elements visits ranks c + 1, c + 2, ..., c. Each adds its slots to the sums of whole subtrees that are
    complete by then (x + y and y + x are the same number), reading these where they lie.
    """
    n = slots.ranks
    visits: list[list[Move]] = [[] for _ in range(n)]
    for part in range(n):
        low, high = Fraction(part, n), Fraction(part + 1, n)
        complete: dict[Tree, Partial] = {}
        for position in range(n):
            rank = (part + 1 + position) % n
            for slot in slots.of(rank):
                node, sources = _arrive(slot, slots.tree, complete)
                final = node == slots.tree
                place = slots.of(rank)[0] if final else slot
                complete[node] = Partial(place, sources[1].keeper if len(sources) > 1 and not final else None)
                if final or len(sources) > 1:
                    visits[position].append(Move(rank, low, high, sources, complete[node], final))
    passes = [
        tuple(_copy(slots, rank, (rank - 1) % n, Fraction((rank - step) % n, n), n) for rank in range(n))
        for step in range(1, n)
    ]
    return tuple(tuple(step) for step in (*visits, *passes) if step)


def _arrive(slot: int, tree: Tree, complete: dict[Tree, Partial]) -> tuple[Tree, tuple[Partial, ...]]:
    """The largest subtree that ``slot`` completes, and what is added for it, the slot first."""
    node: Tree = slot
    sources = [Partial(slot)]
    for parent, sibling in _above(slot, tree):
        if sibling not in complete:
            break
        sources.append(complete.pop(sibling))
        node = parent
    return node, tuple(sources)


def _above(slot: int, tree: Tree) -> Iterator[tuple[Tree, Tree]]:
    """From a slot up: each node above it, and the sibling that is added on the way there."""
    if isinstance(tree, int):
        return
    for child, sibling in (tree, tree[::-1]):
        if slot in slots_below(child):
            yield from _above(slot, child)
            yield tree, sibling


def _copy(slots: PartialSums, rank: int, source: int, low: Fraction, n: int) -> Move:
    return Move(rank, low, low + Fraction(1, n), (Partial(slots.of(source)[0]),), Partial(slots.of(rank)[0]))


@dataclass(frozen=True)
class Share:
    """A part of a subtree's sum: ``rank`` holds elements ``low`` to ``high`` in ``place``."""

    rank: int
    low: Fraction
    high: Fraction
    place: Partial


def halving_doubling(slots: PartialSums) -> Schedule:
    """Recursive halving with the nearest partner first, then doubling back (Rabenseifner), along the tree.

    At each node, from the lowest up, the ranks below it divide the elements anew and add the sums of its two halves,
    each over its own share; with 2^k ranks of one slot that is plain recursive halving. Doubling goes the same way
    back: each rank copies the results that belong to its share of the half below. Steps: twice the tree's height.
    """
    height = _height(slots.tree)
    shares: dict[Tree, list[Share]] = {}
    adding = [[m for node in _at_height(slots.tree, h) for m in _meet(slots, node, shares)] for h in range(height + 1)]
    held = {share.rank: [share] for share in shares[slots.tree]}
    copying = [
        [m for node in _at_height(slots.tree, h) for m in _spread(slots, node, shares, held)]
        for h in range(height, 0, -1)
    ]
    return tuple(tuple(step) for step in (*adding, *copying) if step)


def _height(tree: Tree) -> int:
    height: int = fold(tree, lambda slot: 0, lambda left, right: max(left, right) + 1)
    return height


def _at_height(tree: Tree, height: int) -> list[Tree]:
    if isinstance(tree, int):
        return [tree] if height == 0 else []
    below = [node for half in tree for node in _at_height(half, height)]
    return [tree] if _height(tree) == height else below


def _meet(slots: PartialSums, node: Tree, shares: dict[Tree, list[Share]]) -> list[Move]:
    """The moves that make a node's sum of its halves' sums; notes where it lies then."""
    final = node == slots.tree
    if isinstance(node, int):
        rank = slots.owners[node]
        whole = Share(rank, Fraction(0), Fraction(1), Partial(slots.of(rank)[0] if final else node))
        shares[node] = [whole]
        return [Move(rank, whole.low, whole.high, (Partial(node),), whole.place, True)] if final else []
    moves, below = [], slots_below(node)
    for rank, low, high in _divided(node, shares):
        own = next(slot for slot in below if slots.owners[slot] == rank)
        place = Partial(slots.of(rank)[0]) if final else Partial(own, next(slot for slot in below if slot != own))
        shares.setdefault(node, []).append(Share(rank, low, high, place))
        for left in shares[node[0]]:
            for right in shares[node[1]]:
                start, stop = max(low, left.low, right.low), min(high, left.high, right.high)
                if start < stop:
                    moves.append(Move(rank, start, stop, (left.place, right.place), place, final))
    return moves


def _divided(node: tuple[Tree, Tree], shares: dict[Tree, list[Share]]) -> list[tuple[int, Fraction, Fraction]]:
    """Equal parts of the elements for the ranks below a node, each near what the rank held of the half below."""
    middle = {share.rank: (share.low + share.high, share.rank) for half in node for share in shares[half]}
    ranks = sorted(middle, key=middle.__getitem__)
    return [(rank, Fraction(i, len(ranks)), Fraction(i + 1, len(ranks))) for i, rank in enumerate(ranks)]


def _spread(
    slots: PartialSums, node: Tree, shares: dict[Tree, list[Share]], held: dict[int, list[Share]]
) -> list[Move]:
    """The moves that give each rank the results of its shares of a node's halves; ``held``: what it has of them."""
    moves = []
    for want in (share for half in (node if isinstance(node, tuple) else ()) for share in shares[half]):
        for source in shares[node]:
            for low, high in _without(max(want.low, source.low), min(want.high, source.high), held[want.rank]):
                place = Partial(slots.of(want.rank)[0])
                moves.append(Move(want.rank, low, high, (Partial(slots.of(source.rank)[0]),), place))
                held[want.rank].append(Share(want.rank, low, high, place))
    return moves


def _without(low: Fraction, high: Fraction, held: list[Share]) -> list[tuple[Fraction, Fraction]]:
    """The parts of ``low`` to ``high`` that are not held."""
    parts = [(low, high)]
    for share in held:
        parts = [
            part
            for start, stop in parts
            for part in ((start, min(stop, share.low)), (max(start, share.high), stop))
            if part[0] < part[1]
        ]
    return [part for part in parts if part[0] < part[1]]
