"""The algorithms as steps of all ranks on memory that all of them see; every one adds along the tree of the slots.

Sources: Thakur, Rabenseifner and Gropp 2005 (halving-doubling); Patarasuk and Yuan 2009 (ring).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from dpsim.kernels.allreduce.steps import MOMENTUM, SLOT, STAGING, WEIGHTS, Region, Step
from dpsim.kernels.allreduce.tree import PartialSums, Tree, slots_below

LINE = 16
"""Elements between the bounds of slices, so that no two ranks write to one cache line of 64 bytes."""

Algorithm = Callable[[PartialSums, int], list[Step]]


def slice_bounds(elements: int, parts: int) -> list[int]:
    """``parts + 1`` bounds of equal slices, to a cache line."""
    lines = -(-elements // LINE)
    return [min(part * lines // parts * LINE, elements) for part in range(parts + 1)]


def _firsts(slots: PartialSums) -> list[int]:
    """The slot of each rank in which the result lands: its first."""
    return [slots.owners.index(rank) for rank in range(slots.ranks)]


def one_shot(slots: PartialSums, elements: int) -> list[Step]:
    """Every rank puts its slots on the stage, then adds all of them for itself: one synchronisation."""
    every = range(len(slots.owners))
    shown = [
        Step(slots.owners[slot], 0, (Region(SLOT, slot, 0, elements),), (Region(STAGING, slot, 0, elements),))
        for slot in every
    ]
    sources = tuple(Region(STAGING, slot, 0, elements) for slot in every)
    return shown + [
        Step(rank, slots.tree, sources, (Region(SLOT, first, 0, elements),), final=True)
        for rank, first in enumerate(_firsts(slots))
    ]


def two_shot(slots: PartialSums, elements: int) -> list[Step]:
    """Rank r adds slice r of all slots where they lie and writes the sum to all ranks: the least bytes there can be."""
    bounds = slice_bounds(elements, slots.ranks)
    return [
        Step(
            rank,
            slots.tree,
            tuple(Region(SLOT, slot, bounds[rank], bounds[rank + 1]) for slot in range(len(slots.owners))),
            tuple(Region(SLOT, first, bounds[rank], bounds[rank + 1]) for first in _firsts(slots)),
            final=True,
        )
        for rank in range(slots.ranks)
    ]


def two_shot_sgd(slots: PartialSums, elements: int) -> list[Step]:
    """As ``two_shot``, but rank r updates slice r of the weights at once and writes these to all ranks.

    Each rank holds the momentum of its own slice alone; gradients are read and not written.
    """
    bounds = slice_bounds(elements, slots.ranks)

    def step(rank: int) -> Step:
        low, high = bounds[rank], bounds[rank + 1]
        return Step(
            rank,
            slots.tree,
            tuple(Region(SLOT, slot, low, high) for slot in range(len(slots.owners))),
            tuple(Region(WEIGHTS, other, low, high) for other in range(slots.ranks)),
            final=True,
            update=(Region(WEIGHTS, rank, low, high), Region(MOMENTUM, rank, low, high)),
        )

    return [step(rank) for rank in range(slots.ranks)]


def ring(slots: PartialSums, elements: int) -> list[Step]:
    """Chunk c travels from rank c + 1 around the ring to rank c, then on around once more as the sum.

    A rank adds what makes a whole subtree by its own slots, reading the other half where the rank that made it left
    it: so the tree's order costs no byte more than the ring's own.
    """
    n, firsts = slots.ranks, _firsts(slots)
    bounds = slice_bounds(elements, n)
    steps: list[Step] = []
    final: dict[int, Region] = {}
    places: list[dict[Tree, int]] = [{slot: slot for slot in range(len(slots.owners))} for _ in range(n)]
    for hop in range(n):
        for chunk in range(n):
            rank = (chunk + 1 + hop) % n
            there = {(chunk + 1 + earlier) % n for earlier in range(hop + 1)}
            found = _completed(slots, slots.tree, rank, there)
            for node in found:
                sources: list[int] = []
                shape = _over_parts(node, places[chunk], sources)
                into = firsts[rank] if node == slots.tree else _some_slot(slots, node, rank)
                pieces = tuple(Region(SLOT, slot, bounds[chunk], bounds[chunk + 1]) for slot in sources)
                out = Region(SLOT, into, bounds[chunk], bounds[chunk + 1])
                steps.append(Step(rank, shape, pieces, (out,), final=node == slots.tree))
                if node == slots.tree:
                    final[chunk] = out
                else:
                    places[chunk][node] = into
    for hop in range(n - 1):
        for chunk in range(n):
            rank = (chunk + 1 + hop) % n
            before = final[chunk]
            final[chunk] = before._replace(number=firsts[rank])
            steps.append(Step(rank, 0, (before,), (final[chunk],)))
    return steps


def _some_slot(slots: PartialSums, node: Tree, rank: int) -> int:
    return next(slot for slot in slots_below(node) if slots.owners[slot] == rank)


def _completed(slots: PartialSums, node: Tree, rank: int, there: set[int]) -> list[Tree]:
    """The largest subtrees of two slots or more that this rank completes when the ranks ``there`` have added theirs."""
    if isinstance(node, int):
        return []
    owners = {slots.owners[slot] for slot in slots_below(node)}
    if owners <= there:
        return [node] if rank in owners else []
    return [*_completed(slots, node[0], rank, there), *_completed(slots, node[1], rank, there)]


def _over_parts(node: Tree, places: dict[Tree, int], sources: list[int]) -> Tree:
    """The tree of a node over the largest parts of it that lie somewhere; appends their slots to ``sources``."""
    if node in places:
        sources.append(places[node])
        return len(sources) - 1
    assert not isinstance(node, int)
    left = _over_parts(node[0], places, sources)
    return left, _over_parts(node[1], places, sources)


def halving_doubling(slots: PartialSums, elements: int) -> list[Step]:
    """Up the tree, the two who hold a piece of a node's halves add one part of it each; down it, they copy.

    With 2^k ranks this is recursive halving with the nearest partner first, and doubling back. For any other tree the
    parts are as large as the subtrees, so that every rank ends with an equal share.
    """
    steps: list[Step] = []
    _halve(slots.tree, slots, elements, steps)
    return steps


def _halve(node: Tree, slots: PartialSums, elements: int, steps: list[Step]) -> None:
    """Append the steps that bring the sum over a tree to all its slots."""
    split: list[list[tuple[Region, Region]]] = []
    _up(node, slots, elements, steps, split, top=True)
    for pairs in reversed(split):
        for left, right in pairs:
            for have, lack in ((left, right._replace(number=left.number)), (right, left._replace(number=right.number))):
                source = right if have is left else left
                steps.append(Step(slots.owners[lack.number], 0, (source,), (lack,)))


def _up(
    node: Tree,
    slots: PartialSums,
    elements: int,
    steps: list[Step],
    split: list[list[tuple[Region, Region]]],
    *,
    top: bool,
) -> Sequence[Region]:
    """Reduce-scatter a node among its slots; the pieces of its sum. ``split``: who parted with whom, node by node."""
    if isinstance(node, int):
        return [Region(SLOT, node, 0, elements)]
    left = _up(node[0], slots, elements, steps, split, top=False)
    right = _up(node[1], slots, elements, steps, split, top=False)
    weight = len(slots_below(node[0])) / len(slots_below(node))
    pieces: list[Region] = []
    pairs: list[tuple[Region, Region]] = []
    for a, b in _overlaps(left, right):
        middle = a.start + min(round(weight * a.elements / LINE) * LINE, a.elements)
        low = (a._replace(stop=middle), b._replace(stop=middle))
        high = (a._replace(start=middle), b._replace(start=middle))
        for sources, out in ((low, low[0]), (high, high[1])):
            steps.append(Step(slots.owners[out.number], (0, 1), sources, (out,), final=top))
        pieces += [low[0], high[1]]
        pairs.append((low[0], high[1]))
    split.append(pairs)
    return pieces


def _overlaps(left: Sequence[Region], right: Sequence[Region]) -> list[tuple[Region, Region]]:
    """The pieces of both cut where either is cut, in pairs of the same elements."""
    edges = sorted({edge for piece in (*left, *right) for edge in (piece.start, piece.stop)})
    pairs = []
    for start, stop in itertools.pairwise(edges):
        a, b = (next(p for p in side if p.start <= start and stop <= p.stop) for side in (left, right))
        pairs.append((a._replace(start=start, stop=stop), b._replace(start=start, stop=stop)))
    return pairs


def hierarchical(slots: PartialSums, elements: int, of_a_node: int) -> list[Step]:
    """Ranks r and s are on one node where r // of_a_node == s // of_a_node; a rank's place is r % of_a_node.

    The rank at place c adds chunk c of its node's slots as far as they make whole subtrees; the ranks at place c of
    all nodes do a two-shot with these; and every rank copies the other chunks from its own node.
    """
    k, firsts = of_a_node, _firsts(slots)
    nodes = slots.ranks // k
    chunks = slice_bounds(elements, k)
    steps: list[Step] = []
    for place in range(k):
        low, high = chunks[place], chunks[place + 1]
        parts: dict[Tree, int] = {}
        stages: list[Region] = []
        for node in range(nodes):
            rank = node * k + place
            for part in _inside(slots, slots.tree, range(node * k, node * k + k)):
                sources: list[int] = []
                shape = _over_parts(part, {slot: slot for slot in slots_below(part)}, sources)
                stages.append(Region(STAGING, place * len(slots.owners) + len(parts), low, high))
                parts[part] = len(parts)
                steps.append(Step(rank, shape, tuple(Region(SLOT, slot, low, high) for slot in sources), (stages[-1],)))
        order: list[int] = []
        shape = _over_parts(slots.tree, parts, order)
        bounds = [low + bound for bound in slice_bounds(high - low, nodes)]
        for node in range(nodes):
            first, stop = bounds[node], bounds[node + 1]
            outputs = tuple(Region(SLOT, firsts[other * k + place], first, stop) for other in range(nodes))
            sum_of = tuple(stages[number]._replace(start=first, stop=stop) for number in order)
            steps.append(Step(node * k + place, shape, sum_of, outputs, final=True))
    for rank in range(slots.ranks):
        for place in range(k):
            other = rank // k * k + place
            if other != rank:
                piece = Region(SLOT, firsts[other], chunks[place], chunks[place + 1])
                steps.append(Step(rank, 0, (piece,), (piece._replace(number=firsts[rank]),)))
    return steps


def _inside(slots: PartialSums, tree: Tree, ranks: range) -> list[Tree]:
    """The largest subtrees all of whose slots are of these ranks."""
    owners = [slots.owners[slot] in ranks for slot in slots_below(tree)]
    if all(owners):
        return [tree]
    if isinstance(tree, int) or not any(owners):
        return []
    return [*_inside(slots, tree[0], ranks), *_inside(slots, tree[1], ranks)]
