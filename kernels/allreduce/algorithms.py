"""The algorithms, each as one list of steps of all ranks on memory that all of them see.

The versions for one machine, for messages and for GPUs are all made from these lists. ``IN_TREE_ORDER`` add the partial
sums along their tree, ``PLAIN`` one a rank in an order of their own. Those of pairs have a module of their own.
Source of the ring: Patarasuk and Yuan 2009.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from dpsim.kernels.allreduce.halving_doubling import halving_doubling, plain_halving_doubling, recursive_doubling
from dpsim.kernels.allreduce.steps import SLOT, STAGING, Region, Step, StepList
from dpsim.kernels.allreduce.tree import PartialSums, Tree, leaf_tree, slots, slots_below

Algorithm = Callable[[PartialSums], StepList]


def one_shot(sums: PartialSums) -> StepList:
    """Copy all partial sums to staging memory; then each rank adds all of them for itself: one synchronisation."""
    every = range(len(sums.owners))
    shown = [
        Step(sums.owners[number], 0, (Region(SLOT, number, 0, 1),), (Region(STAGING, number, 0, 1),))
        for number in every
    ]
    sources = tuple(Region(STAGING, number, 0, 1) for number in every)
    totals = [
        Step(rank, sums.tree, sources, (Region(SLOT, first, 0, 1),), final=True)
        for rank, first in enumerate(sums.firsts)
    ]
    return StepList((tuple(shown), tuple(totals)), 1)


def two_shot(sums: PartialSums) -> StepList:
    """Rank r adds slice r of all partial sums where they lie and writes the sum to all ranks: the fewest bytes."""
    steps = [
        Step(
            rank,
            sums.tree,
            tuple(Region(SLOT, number, rank, rank + 1) for number in range(len(sums.owners))),
            tuple(Region(SLOT, first, rank, rank + 1) for first in sums.firsts),
            final=True,
        )
        for rank in range(sums.ranks)
    ]
    return StepList((tuple(steps),), sums.ranks)


def reduce_scatter(sums: PartialSums) -> StepList:
    """Rank r adds slice r of all partial sums where they lie and keeps the sum, its shard: a two-shot's first half."""
    first = sums.firsts
    steps = [
        step._replace(outputs=(Region(SLOT, first[step.rank], step.rank, step.rank + 1),))
        for step in two_shot(sums).steps
    ]
    return StepList((tuple(steps),), sums.ranks)


def all_gather(sums: PartialSums) -> StepList:
    """Copy slice r from rank r to every rank, the next rank's first."""
    n, firsts = sums.ranks, sums.firsts
    steps = []
    for rank, distance in itertools.product(range(n), range(1, n)):
        other = (rank + distance) % n
        have = Region(SLOT, firsts[other], other, other + 1)
        steps.append(Step(rank, 0, (have,), (have._replace(number=firsts[rank]),)))
    return StepList((tuple(steps),), n)


def of_shards(kind: str, sums: PartialSums, replicas: int = 1, *, ring: bool = False) -> StepList:
    """Return a reduce-scatter or an all-gather, directly or around a plain ring: of one group of ranks, or of each.

    With several ``replicas`` the ranks are as many groups of neighbours, the partial sums of each of which are a
    subtree; there is an allreduce too, which adds each shard over the groups where a reduce-scatter has left it.
    """
    collective = _OF_SHARDS[kind, ring]
    if kind == "allreduce":
        return _between_groups(collective, sums, replicas)
    return collective(sums) if replicas == 1 else _in_groups(collective, sums, replicas)


def _in_groups(collective: Algorithm, sums: PartialSums, replicas: int) -> StepList:
    """Return what a collective does in each of ``replicas`` groups of neighbours, all at once."""
    size, lists = sums.ranks // replicas, []
    for rank in range(0, sums.ranks, size):
        (tree,) = _inside(sums, sums.tree, range(rank, rank + size))
        numbers = slots_below(tree)
        owners = tuple(sums.owners[number] - rank for number in numbers)
        own = PartialSums(owners, _over_parts(tree, {number: number for number in numbers}, []))
        lists.append(_placed(collective(own), range(rank, rank + size), numbers))
    return StepList.of(map(_joined, itertools.zip_longest(*lists, fillvalue=())), size)


def _between_groups(collective: Algorithm, sums: PartialSums, replicas: int) -> StepList:
    """Return what a collective of the ranks at one position of all groups does with their shard, at each position."""
    size, lists, parts = sums.ranks // replicas, [], dict[Tree, int]()
    for group in range(replicas):
        (tree,) = _inside(sums, sums.tree, range(group * size, group * size + size))
        parts[tree] = group
    listed = collective(PartialSums(tuple(range(replicas)), _over_parts(sums.tree, parts, [])))
    for position in range(size):
        ranks = range(position, sums.ranks, size)
        firsts = [sums.firsts[rank] for rank in ranks]
        lists.append(_placed(listed, ranks, firsts, position * listed.units))
    return StepList.of(map(_joined, itertools.zip_longest(*lists, fillvalue=())), size * listed.units)


def _placed(listed: StepList, ranks: Sequence[int], numbers: Sequence[int], unit: int = 0) -> list[list[Step]]:
    """Return the rounds of a list with these ranks and partial sums in place of its own, from ``unit`` on."""

    def region(of: Region) -> Region:
        return Region(of.memory, numbers[of.number], of.start + unit, of.stop + unit)

    rounds = listed.renumbered(region).rounds
    return [[step._replace(rank=ranks[step.rank]) for step in steps] for steps in rounds]


def _joined(lists: Iterable[Sequence[Step]]) -> list[Step]:
    return [*itertools.chain.from_iterable(lists)]


def _circuit(ranks: int) -> Iterable[tuple[int, int, int]]:
    """Yield (hop, chunk, rank): chunk c visits ranks c, c + 1, ..., c + n - 1 of a ring, all chunks hop by hop."""
    for hop, chunk in itertools.product(range(ranks), range(ranks)):
        yield hop, chunk, (chunk + hop) % ranks


def _pass_on(firsts: list[int]) -> list[list[Step]]:
    """Copy each chunk, complete at the last rank of its circuit, from rank to rank around the ring again."""
    n = len(firsts)
    rounds: list[list[Step]] = [[] for _ in range(n)]
    for hop, chunk, rank in _circuit(n):
        have = Region(SLOT, firsts[(rank - 1) % n], chunk, chunk + 1)
        rounds[hop].append(Step(rank, 0, (have,), (have._replace(number=firsts[rank]),)))
    return rounds[:-1]


def ring(sums: PartialSums) -> StepList:
    """Send chunk c from rank c around the ring to rank c - 1, then on around once more as the sum.

    A rank adds the subtrees that its own partial sums complete. It reads the other half where the rank that made it
    left it, so the tree's order costs no byte more than the ring's own.
    """
    return StepList.of([*_ring_sums(sums), *_pass_on(sums.firsts)], sums.ranks)


def _ring_sums(sums: PartialSums) -> list[list[Step]]:
    """Return the first circuit of a ring, after which rank c - 1 has the sum of chunk c."""
    n, firsts = sums.ranks, sums.firsts
    rounds: list[list[Step]] = [[] for _ in range(n)]
    places: list[dict[Tree, int]] = [{number: number for number in range(len(sums.owners))} for _ in range(n)]
    for hop, chunk, rank in _circuit(n):
        visited = {(chunk + earlier) % n for earlier in range(hop + 1)}
        for node in [sums.tree] if n == 1 else _completed(sums, sums.tree, rank, visited):
            sources: list[int] = []
            shape = _over_parts(node, places[chunk], sources)
            final = node == sums.tree
            target = firsts[rank] if final else next(i for i in slots_below(node) if sums.owners[i] == rank)
            regions = tuple(Region(SLOT, number, chunk, chunk + 1) for number in sources)
            rounds[hop].append(Step(rank, shape, regions, (Region(SLOT, target, chunk, chunk + 1),), final=final))
            places[chunk][node] = target
    return rounds


def plain_ring_reduce_scatter(ranks: int) -> StepList:
    """Return the first circuit of ``plain_ring``, with chunks numbered by the ranks that end up with them."""
    return _numbered_by_rank(_plain_ring_sums(ranks), ranks)


def ring_all_gather(ranks: int) -> StepList:
    """Return the second circuit of a ring: chunk r travels from rank r around the ring to rank r - 1."""
    return _numbered_by_rank(_pass_on(list(range(ranks))), ranks)


def _numbered_by_rank(rounds: list[list[Step]], ranks: int) -> StepList:
    """Return the rounds of a ring, where chunk c becomes chunk c - 1: that of the rank which completes it."""

    def region(of: Region) -> Region:
        chunk = (of.start - 1) % ranks
        return of._replace(start=chunk, stop=chunk + 1)

    return StepList.of(rounds, ranks).renumbered(region)


def plain_ring(ranks: int) -> StepList:
    """Send around a ring where each rank adds its own chunk to what comes: every chunk has its own order."""
    return StepList.of([*_plain_ring_sums(ranks), *_pass_on(list(range(ranks)))], ranks)


def _plain_ring_sums(ranks: int) -> list[list[Step]]:
    """Return the first circuit of a plain ring, after which rank c - 1 has the sum of chunk c."""
    rounds: list[list[Step]] = [[] for _ in range(ranks)]
    for hop, chunk, rank in _circuit(ranks):
        if hop:
            own = Region(SLOT, rank, chunk, chunk + 1)
            coming = own._replace(number=(rank - 1) % ranks)
            rounds[hop].append(Step(rank, (0, 1), (own, coming), (own,), final=hop == ranks - 1))
    return rounds


def _completed(sums: PartialSums, node: Tree, rank: int, visited: set[int]) -> list[Tree]:
    """Return the largest sums that a rank completes when the ranks ``visited``, itself the last, have added theirs."""
    if isinstance(node, int):
        return []
    owners = {sums.owners[number] for number in slots_below(node)}
    if owners <= visited:
        return [node] if rank in owners else []
    return [*_completed(sums, node[0], rank, visited), *_completed(sums, node[1], rank, visited)]


def _over_parts(node: Tree, places: dict[Tree, int], sources: list[int]) -> Tree:
    """Return the tree of a node over the largest parts of it that have a place; appends their places to ``sources``."""
    if node in places:
        sources.append(places[node])
        return len(sources) - 1
    assert not isinstance(node, int)
    left = _over_parts(node[0], places, sources)
    return left, _over_parts(node[1], places, sources)


def hierarchical(sums: PartialSums, devices_a_node: int) -> StepList:
    """Sum inside each node first, then two-shot between nodes. Rank r has position r % k on node r // k.

    The rank at position c adds chunk c of its node's partial sums as far as they make whole subtrees; those at position
    c of all nodes do a two-shot with these; and every rank copies the other chunks from its own node.
    """
    k, firsts = devices_a_node, sums.firsts
    m = sums.ranks // k
    steps: list[Step] = []
    for position in range(k):
        low, high = position * m, position * m + m
        parts: dict[Tree, int] = {}
        regions: list[Region] = []
        for node in range(m):
            rank = node * k + position
            for part in _inside(sums, sums.tree, range(node * k, node * k + k)):
                parts[part] = len(parts)
                if isinstance(part, int) and sums.owners[part] == rank:
                    regions.append(Region(SLOT, part, low, high))
                    continue
                sources: list[int] = []
                shape = _over_parts(part, {number: number for number in slots_below(part)}, sources)
                regions.append(Region(STAGING, position * len(sums.owners) + parts[part], low, high))
                inputs = tuple(Region(SLOT, number, low, high) for number in sources)
                steps.append(Step(rank, shape, inputs, (regions[-1],)))
        order: list[int] = []
        shape = _over_parts(sums.tree, parts, order)
        for node in range(m):
            first = low + node
            outputs = tuple(Region(SLOT, firsts[other * k + position], first, first + 1) for other in range(m))
            inputs = tuple(regions[number]._replace(start=first, stop=first + 1) for number in order)
            steps.append(Step(node * k + position, shape, inputs, outputs, final=True))
    for rank in range(sums.ranks):
        for position in range(k):
            other = rank // k * k + position
            if other != rank:
                have = Region(SLOT, firsts[other], position * m, position * m + m)
                steps.append(Step(rank, 0, (have,), (have._replace(number=firsts[rank]),)))
    return StepList((tuple(steps),), sums.ranks)


def node_by_node(ranks: int, devices_a_node: int) -> PartialSums:
    """Return a partial sum a rank, added along a tree in each node and then along a tree over the nodes."""

    def over(tree: Tree, leaf: Callable[[int], Tree]) -> Tree:
        return leaf(tree) if isinstance(tree, int) else (over(tree[0], leaf), over(tree[1], leaf))

    def node(number: int) -> Tree:
        return over(leaf_tree(devices_a_node), lambda position: number * devices_a_node + position)

    return PartialSums(tuple(range(ranks)), over(leaf_tree(ranks // devices_a_node), node))


def _inside(sums: PartialSums, tree: Tree, ranks: range) -> list[Tree]:
    """Return the largest subtrees all of whose partial sums are of these ranks."""
    owners = [sums.owners[number] in ranks for number in slots_below(tree)]
    if all(owners):
        return [tree]
    if isinstance(tree, int) or not any(owners):
        return []
    return [*_inside(sums, tree[0], ranks), *_inside(sums, tree[1], ranks)]


IN_TREE_ORDER: dict[str, Algorithm] = {
    "halving-doubling": halving_doubling,
    "ring": ring,
    "one-shot": one_shot,
    "two-shot": two_shot,
}
_OF_SHARDS: dict[tuple[str, bool], Algorithm] = {
    ("reduce-scatter", False): reduce_scatter,
    ("reduce-scatter", True): lambda sums: plain_ring_reduce_scatter(sums.ranks),
    ("all-gather", False): all_gather,
    ("all-gather", True): lambda sums: ring_all_gather(sums.ranks),
    ("allreduce", False): two_shot,
    ("allreduce", True): lambda sums: plain_ring(sums.ranks),
}
PLAIN: dict[str, Callable[[int], StepList]] = {
    "halving-doubling": plain_halving_doubling,
    "recursive-doubling": recursive_doubling,
    "ring": plain_ring,
    "direct": lambda ranks: two_shot(slots(range(ranks + 1))),
}
