"""The order in which an algorithm's steps add each unit of an array: its steps executed on expressions, not numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dpsim.kernels.allreduce.expression import Expression, normal_form
from dpsim.kernels.allreduce.steps import SLOT, StepList
from dpsim.kernels.allreduce.tree import fold, slots_below


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
                total = normal_form(fold(step.tree, addends.__getitem__, _sum))
                for output in step.outputs:
                    unit = output.start * each + offset
                    held[output.memory, output.number, unit] = total
                    if step.final:
                        orders[unit] = Order(total, tuple(sorted(map(normal_form, addends), key=slots_below)))
    return [orders[unit] if unit in orders else Order(held[SLOT, 0, unit], ()) for unit in range(units)]


def _sum(left: Expression, right: Expression) -> Expression:
    return left, right
