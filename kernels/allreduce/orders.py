"""The order in which an algorithm's steps add each unit of an array: its steps executed on expressions, not numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dpsim.kernels.allreduce.expression import Expression
from dpsim.kernels.allreduce.steps import SLOT, StepList
from dpsim.kernels.allreduce.tree import fold


class Order(NamedTuple):
    """How a sum is added: the ``expression``, in normal form.

    ``addends`` are what the last step adds: with 16 bits on the wire each of them is rounded before it.
    """

    expression: Expression
    addends: tuple[Expression, ...]


def unit_orders(lists: Sequence[StepList]) -> list[Order]:
    """Return the order of each unit of the sum that the lists make one after another, of the list with most units.

    The number of a partial sum stands for its numbers; the units of every list divide those of the largest evenly.
    A list that does not say which of its sums are ``final`` is an allreduce, of which rank 0 has the result.
    """
    units = max(listed.units for listed in lists)
    held: dict[tuple[str, int, int], Expression] = {}
    orders: dict[int, Order] = {}
    for listed in lists:
        each = units // listed.units
        for step in listed.steps:
            for offset in range(step.sources[0].elements * each):
                sources = [(source.memory, source.number, source.start * each + offset) for source in step.sources]
                addends = [held[key] if key in held or key[0] != SLOT else key[1] for key in sources]
                total = fold(step.tree, addends.__getitem__, _sum)
                for output in step.outputs:
                    unit = output.start * each + offset
                    held[output.memory, output.number, unit] = total
                    if step.final:
                        orders[unit] = Order(total, tuple(sorted(addends, key=_lowest)))
    return [orders[unit] if unit in orders else Order(held[SLOT, 0, unit], ()) for unit in range(units)]


def _sum(left: Expression, right: Expression) -> Expression:
    """Return the normal form of a sum of two normal forms."""
    return (left, right) if _lowest(left) < _lowest(right) else (right, left)


def _lowest(expression: Expression) -> int:
    """Return the lowest number of a normal form, which stands first."""
    while not isinstance(expression, int):
        expression = expression[0]
    return expression
