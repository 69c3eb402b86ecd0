"""The order of sums of an FSDP unit; ``test_ddp_bits`` compares it with the gradients that FSDP makes."""

from __future__ import annotations

from dpsim.kernels.allreduce.expression import text
from dpsim.torch.fsdp_bits import unit_expressions


def in_words(*shapes: tuple[int, ...], ranks: int = 3) -> list[list[tuple[int, str]]]:
    return [[(end, text(expression)) for end, expression in each] for each in unit_expressions(shapes, ranks)]


def test_a_rank_is_the_last_to_add_to_the_rows_that_it_keeps() -> None:
    assert in_words((6, 5)) == [[(10, "(2+1)+0"), (20, "(0+2)+1"), (30, "(1+0)+2")]]


def test_padding_is_not_of_the_gradient_and_a_rank_may_keep_no_rows() -> None:
    assert in_words((4, 3), (1, 2)) == [[(6, "(2+1)+0"), (12, "(0+2)+1")], [(2, "(2+1)+0")]]


def test_where_a_shard_is_odd_the_next_ones_first_elements_are_of_its_chunk() -> None:
    assert in_words((9,)) == [[(3, "(2+1)+0"), (4, "(2+1)+0"), (6, "(0+2)+1"), (8, "(0+2)+1"), (9, "(1+0)+2")]]
