"""The order of a sum: its text and its normal form, and steps executed on expressions and on numbers alike."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsim.kernels.allreduce import algorithms
from dpsim.kernels.allreduce.expression import Expression, normal_form, text
from dpsim.kernels.allreduce.orders import unit_orders
from dpsim.kernels.allreduce.steps import SLOT, StepList
from dpsim.kernels.allreduce.tree import fold, slots_below

RANKS = (2, 3, 4, 5, 8)


def test_text_has_brackets_around_what_is_added_first() -> None:
    assert text((((0, 1), 2), 3)) == "((0+1)+2)+3"
    assert text(((0, 1), (2, 3))) == "(0+1)+(2+3)"
    assert text(0) == "0"


def test_operands_have_one_order_and_brackets_stay() -> None:
    assert normal_form((2, (1, 0))) == normal_form(((0, 1), 2)) == ((0, 1), 2)
    assert normal_form((0, (1, 2))) != normal_form(((0, 1), 2))


def test_a_ring_adds_each_chunk_in_another_order() -> None:
    assert [text(order.expression) for order in unit_orders([algorithms.PLAIN["ring"](4)])] == [
        "((0+1)+2)+3",
        "0+((1+2)+3)",
        "(0+(2+3))+1",
        "((0+3)+1)+2",
    ]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", algorithms.IN_TREE_ORDER)
def test_algorithms_in_tree_order_add_along_the_tree(name: str, ranks: int) -> None:
    sums = algorithms.node_by_node(ranks, ranks)
    orders = {order.expression for order in unit_orders([algorithms.IN_TREE_ORDER[name](sums)])}
    assert orders == {normal_form(sums.tree)}


@given(
    name=st.sampled_from(sorted(algorithms.PLAIN)),
    ranks=st.sampled_from(RANKS),
    elements=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_an_expression_has_the_bits_of_the_steps(name: str, ranks: int, elements: int, seed: int) -> None:
    listed = algorithms.PLAIN[name](ranks)
    drawn = np.random.default_rng(seed).standard_normal((ranks, listed.units, elements)).astype(np.float32)
    expected = [
        fold(order.expression, lambda rank, unit=unit: drawn[rank, unit], np.add)
        for unit, order in enumerate(unit_orders([listed]))
    ]
    for result in executed(listed, drawn):
        assert result.tobytes() == np.array(expected).tobytes()


def executed(listed: StepList, drawn: np.ndarray) -> np.ndarray:
    """The arrays of all ranks [rank, unit, element] after the steps, one after another."""
    memory = {(SLOT, rank): array.copy() for rank, array in enumerate(drawn)}
    for step in listed.steps:
        sources = [memory[source.memory, source.number][source.start : source.stop] for source in step.sources]
        total = fold(step.tree, sources.__getitem__, np.add).copy()
        for output in step.outputs:
            array = memory.setdefault((output.memory, output.number), np.zeros_like(drawn[0]))
            array[output.start : output.stop] = total
    return np.array([memory[SLOT, rank] for rank in range(len(drawn))])


@given(st.recursive(st.just(0), lambda inner: st.tuples(inner, inner), max_leaves=8), st.integers(0, 100))
@settings(max_examples=50, deadline=None)
def test_a_normal_form_has_the_bits_of_its_expression(shape: Expression, seed: int) -> None:
    numbers = iter(range(len(slots_below(shape))))
    expression = fold(shape, lambda _: next(numbers), lambda left, right: (left, right))
    drawn = np.random.default_rng(seed).standard_normal((8, 6)).astype(np.float32)
    turned = fold(expression, lambda number: number, lambda left, right: (right, left))
    assert normal_form(turned) == normal_form(expression)
    a, b = (fold(each, drawn.__getitem__, np.add) for each in (turned, normal_form(expression)))
    assert a.tobytes() == b.tobytes()
