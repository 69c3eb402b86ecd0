"""The order of a sum as an expression: which ranks' numbers are added first, and which sums are added to which.

An addition commutes to the bit, so ``(0, 1)`` and ``(1, 0)`` are one order; it does not associate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from dpsim.kernels.allreduce.tree import Tree, slots_below

Kind = TypeVar("Kind")
Expression = Tree
"""The number of a rank (or of a partial sum), or the sum of two expressions."""


def normal_form(expression: Expression) -> Expression:
    """Return the expression with the operands of every sum ordered by their lowest number.

    Two expressions of the same numbers have the same bits for all values if their normal forms are equal.
    """
    if isinstance(expression, int):
        return expression
    left, right = sorted(map(normal_form, expression), key=lambda operand: min(slots_below(operand)))
    return left, right


def part(ranges: Sequence[tuple[int, Kind]], start: int, stop: int) -> list[tuple[int, Kind]]:
    """Return the ranges, each an end and what holds up to it, of elements ``start`` to ``stop - 1``, from ``start``."""
    begins = [0, *(end for end, _ in ranges)]
    return [
        (min(end, stop) - start, order)
        for begin, (end, order) in zip(begins, ranges, strict=False)
        if max(begin, start) < min(end, stop)
    ]


def text(expression: Expression) -> str:
    """Return ``((0+1)+2)+3`` for ``(((0, 1), 2), 3)``."""
    if isinstance(expression, int):
        return str(expression)
    return "+".join(str(operand) if isinstance(operand, int) else f"({text(operand)})" for operand in expression)
