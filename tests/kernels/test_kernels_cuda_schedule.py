"""Schedules of ring and halving-doubling: what they add in which order, that nobody is disturbed, what they move."""

from __future__ import annotations

import itertools
from collections import defaultdict
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsim.kernels.allreduce import reference, registry
from dpsim.kernels.allreduce.algorithms import ring
from dpsim.kernels.allreduce.cuda.moves import Move, Schedule, moved, schedule
from dpsim.kernels.allreduce.halving_doubling import halving_doubling
from dpsim.kernels.allreduce.tree import PartialSums, slots

SCHEDULES = {
    "ring": lambda order: schedule(ring, order),
    "halving-doubling": lambda order: schedule(halving_doubling, order),
}


@st.composite
def leaf_bounds(draw: st.DrawFn) -> list[int]:
    return [0, *itertools.accumulate(draw(st.lists(st.integers(1, 6), min_size=1, max_size=9)))]


def parts_of(schedule: Schedule) -> list[Fraction]:
    """Where any move begins or ends: between two of them all elements fare alike."""
    ends = {end for step in schedule for move in step for end in (move.low, move.high)}
    return sorted(ends | {Fraction(0), Fraction(1)})


def atoms(move: Move, ends: list[Fraction]) -> range:
    return range(ends.index(move.low), ends.index(move.high))


def executed(schedule: Schedule, order: PartialSums, values: np.ndarray) -> np.ndarray:
    """The slots after the schedule, one number for each part of ``parts_of``: values[slot, part], float32."""
    held, ends = values.copy(), parts_of(schedule)
    for move in (move for step in schedule for move in step):
        for part in atoms(move, ends):
            total = held[move.sources[0].keeper, part]
            for source in move.sources[1:]:
                total = total + held[source.keeper, part]
            held[move.target.keeper, part] = total
    return held


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=60)
@given(leaf_bounds())
def test_every_rank_ends_with_the_sum_in_tree_order(name: str, bounds: list[int]) -> None:
    order = slots(bounds)
    made = SCHEDULES[name](order)
    parts = len(parts_of(made)) - 1
    random = np.random.default_rng(len(bounds))
    numbers = random.standard_normal((len(order.owners), parts)) * 2.0 ** random.integers(-9, 9, parts)
    values = numbers.astype(np.float32)
    held = executed(made, order, values)
    for rank in range(len(bounds) - 1):
        assert held[order.of(rank)[0]].tobytes() == reference.allreduce(list(values), order).tobytes()


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=60)
@given(leaf_bounds())
def test_no_rank_touches_in_a_step_what_another_writes_in_it(name: str, bounds: list[int]) -> None:
    made = SCHEDULES[name](slots(bounds))
    ends = parts_of(made)
    for step in made:
        touched: dict[tuple[int | None, int], set[int]] = defaultdict(set)
        written: dict[tuple[int | None, int], set[int]] = defaultdict(set)
        for move in step:
            for part in atoms(move, ends):
                for place in (*move.sources, move.target):
                    for slot in (place.keeper, place.spare):
                        touched[slot, part].add(move.rank)
                for slot in (move.target.keeper, move.target.spare):
                    written[slot, part].add(move.rank)
        for where, ranks in written.items():
            assert where[0] is None or (touched[where] == ranks and len(ranks) == 1)


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=60)
@given(leaf_bounds())
def test_the_two_halves_of_a_partial_sum_stay_as_they_are_until_it_is_read(name: str, bounds: list[int]) -> None:
    """Each place notes which sum was put there; a sum is read from where both of its halves still are."""
    order = slots(bounds)
    made = SCHEDULES[name](order)
    ends = parts_of(made)
    notes: dict[tuple[int, int], object] = {}
    for number, move in enumerate(move for step in made for move in step):
        for part in atoms(move, ends):
            for source in move.sources:
                if source.spare is not None:
                    assert notes[source.keeper, part] == notes[source.spare, part]
            notes[move.target.keeper, part] = number
            if move.target.spare is not None:
                assert move.target.spare != move.target.keeper
                notes[move.target.spare, part] = number


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 16])
def test_the_tree_order_moves_no_more_than_a_ring(ranks: int) -> None:
    order = slots(range(ranks + 1))
    assert moved(schedule(ring, order)) <= max(5 * (ranks - 1), 2)
    if ranks in (2, 4, 8, 16):
        assert moved(schedule(halving_doubling, order)) == 5 * (ranks - 1)


def test_cuda_versions_state_what_they_move() -> None:
    order, with_extra = slots(range(5)), slots([0, 3, 5, 6, 8])
    actual = {
        v.name: (v.bytes_moved(order, 100), v.bytes_moved(with_extra, 100), v.synchronisations(order))
        for v in registry.versions("cuda")
    }
    assert with_extra.extra == 2
    assert actual["one-shot"] == (2000, 2800, 2)
    assert actual["two-shot"] == (registry.floor_bytes(4, 100), 1000, 2)
    assert (actual["ring"][0], actual["ring"][2]) == (1300.0, 7)
    assert (actual["halving-doubling"][0], actual["halving-doubling"][2]) == (1500.0, 5)
    assert actual["ring"][0] < actual["ring"][1] and actual["halving-doubling"][0] < actual["halving-doubling"][1]
