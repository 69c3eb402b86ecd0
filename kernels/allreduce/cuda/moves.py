"""Ring and halving-doubling for GPUs: their steps as moves between which all ranks wait for each other.

A schedule is rounds of moves, made from the same list of steps as the versions for messages and for processes. No
partial sum is carried on: it stays where its last addition put it, in memory of the partial sums that it consists of,
and is read from there when its sibling is complete. So the fixed order moves no more bytes than the order of a plain
ring, and needs no memory of its own.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from fractions import Fraction

from dpsim.kernels.allreduce.algorithms import Algorithm
from dpsim.kernels.allreduce.steps import Step
from dpsim.kernels.allreduce.tree import PartialSums, Tree


@dataclass(frozen=True)
class Partial:
    """Where a part of the sum of a subtree lies: in ``keeper``'s memory.

    float32 sums of 16-bit numbers need twice the memory of one partial sum: their lower halves lie in that of
    ``spare``, another one of the same subtree. What a rank itself produced has none.
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
    """Return what a schedule reads and writes, in arrays."""
    return sum(((m.high - m.low) * (len(m.sources) + 1) for moves in schedule for m in moves), Fraction(0))


def schedule(algorithm: Algorithm, sums: PartialSums) -> Schedule:
    """Return the moves of an algorithm, in its rounds."""
    listed = algorithm(sums)
    builder = _Builder(sums, listed.units)
    return tuple(tuple(move for step in steps for move in builder.moves(step)) for steps in listed.rounds)


class _Builder:
    """A builder that turns steps into moves, and notes where partial sums' lower halves lie, unit by unit."""

    def __init__(self, sums: PartialSums, units: int) -> None:
        self._sums, self._units = sums, units
        self._spare: dict[tuple[int, int], int | None] = {}

    def moves(self, step: Step) -> list[Move]:
        """Return a step's moves: one that adds along a chain, and before it one for each subtree off the chain."""
        moves: list[Move] = []
        sources = self._chain(step, step.tree, moves)
        return moves + self._add(step, sources, step.outputs[0].number, final=step.final)

    def _chain(self, step: Step, node: Tree, moves: list[Move]) -> list[int]:
        """Return what to add from left to right; addition commutes to the bit, so either child may come first."""
        if isinstance(node, int):
            return [step.sources[node].number]
        longer, other = sorted(node, key=lambda half: isinstance(half, int))
        chain = self._chain(step, longer, moves)
        subtree = self._chain(step, other, moves)
        if len(subtree) > 1:
            target = next(number for number in subtree if self._sums.owners[number] == step.rank)
            moves += self._add(step, subtree, target, final=False)
            subtree = [target]
        return chain + subtree

    def _add(self, step: Step, sources: list[int], target: int, *, final: bool) -> list[Move]:
        """Return one move, or several where parts of a source have their lower halves in different places."""
        spare = next((number for number in sources if number != target), None) if len(sources) > 1 else None
        total = Partial(target, None if final else spare)
        moves = []
        units = range(step.outputs[0].start, step.outputs[0].stop)
        for spares, group in itertools.groupby(units, lambda unit: [self._spare.get((n, unit)) for n in sources]):
            first, *rest = group
            low, high = Fraction(first, self._units), Fraction(first + len(rest) + 1, self._units)
            moves.append(Move(step.rank, low, high, tuple(map(Partial, sources, spares)), total, final))
        self._spare |= {(target, unit): total.spare for unit in units}
        return moves
