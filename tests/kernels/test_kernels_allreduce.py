"""The allreduce of one node: programs that cannot race, the fixed order to the bit, bytes and waits as stated."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsim.kernels.allreduce import algorithms, reference
from dpsim.kernels.allreduce.registry import floor_bytes, register, versions
from dpsim.kernels.allreduce.shards import line_bound
from dpsim.kernels.allreduce.steps import (
    SLOT,
    STAGING,
    Arrive,
    Programs,
    Region,
    Step,
    StepList,
    Wait,
    moved_elements,
    programs,
)
from dpsim.kernels.allreduce.tree import PartialSums, fold, leaf_tree, slots, subtrees

OnRanks = Callable[..., Any]


def scaled(steps: StepList, elements: int) -> list[Step]:
    """The steps as the processes of one machine do them: slices begin at cache lines."""
    return steps.scaled(line_bound(elements, steps.units))


def leaf_slots(ranks: int, leaves: int) -> PartialSums:
    """Ranks with as equal blocks of leaves as there are."""
    return slots([rank * leaves // ranks for rank in range(ranks + 1)])


def test_the_tree_of_addition_is_cut_at_the_largest_power_of_two() -> None:
    assert leaf_tree(2) == (0, 1)
    assert leaf_tree(5) == (((0, 1), (2, 3)), 4)
    assert leaf_tree(6) == (((0, 1), (2, 3)), (4, 5))


@given(leaves=st.integers(1, 70), data=st.data())
def test_slots_are_the_largest_whole_subtrees_of_every_rank(leaves: int, data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, leaves))
    actual = leaf_slots(ranks, leaves)
    bounds = [rank * leaves // ranks for rank in range(ranks + 1)]
    ranges = [piece for low, high in itertools.pairwise(bounds) for piece in subtrees(leaves, low, high)]
    owners = [rank for rank in range(ranks) for _ in subtrees(leaves, bounds[rank], bounds[rank + 1])]
    assert list(actual.owners) == owners
    assert [low for low, _ in ranges] == [0, *(high for _, high in ranges)][:-1]  # they cover the leaves in order
    # adding leaves inside the slots, then the slots, is adding the leaves along the one tree over them

    def sums(tree: Any, name: Callable[[int], Any]) -> Any:
        return fold(tree, name, lambda a, b: (a, b))

    def slot(number: int) -> Any:
        low, high = ranges[number]
        return sums(leaf_tree(high - low), lambda leaf: low + leaf)

    assert sums(actual.tree, slot) == sums(leaf_tree(leaves), lambda leaf: leaf)


def test_extra_slots_are_those_of_ranks_that_hold_no_whole_subtree() -> None:
    assert [leaf_slots(ranks, 8).extra for ranks in range(1, 9)] == [0, 0, 2, 0, 1, 0, 0, 0]


class _Machine:
    """Executes programs an instruction at a time, on arrays that owners fill and spoil.

    Either any rank may be next, or, by ``seed``, ranks run in an order of precedence: some far ahead of others.
    """

    def __init__(self, actual: Programs, owners: PartialSums, values: list[Any], seed: int) -> None:
        self.program, self.slots, self.values = actual, owners, values
        self.memory: dict[tuple[str, int], Any] = {(SLOT, i): np.full_like(v, np.nan) for i, v in enumerate(values)}
        for slot in range(len(values)):
            self.memory[STAGING, slot] = np.full_like(values[0], np.nan)
        self.draw = random.Random(seed)
        self.results: dict[int, Any] = {}

    def run(self) -> None:
        ranks = len(self.program.of)
        precedence = self.draw.sample(range(ranks), ranks) if self.draw.random() < 0.8 else []
        places, arrived, running = [-1] * ranks, [0] * ranks, set(range(ranks))
        while running:
            able = [r for r in running if not self._waits(r, places[r], arrived)]
            assert able, "all ranks wait for ever"
            rank = min(able, key=precedence.index) if precedence else self.draw.choice(able)
            place, places[rank] = places[rank], places[rank] + 1
            mine = self.slots.of(rank)
            if place < 0:  # the rank's data becomes final
                for slot in mine:
                    self.memory[SLOT, slot][:] = self.values[slot]
                continue
            if place == len(self.program.of[rank]):  # it takes the result and writes anew
                self.results[rank] = self.memory[SLOT, mine[0]].copy()
                for slot in mine:
                    self.memory[SLOT, slot][:] = np.nan
                running.discard(rank)
                continue
            one = self.program.of[rank][place]
            if isinstance(one, Arrive):
                assert one.number == arrived[rank] + 1
                arrived[rank] = one.number
            elif isinstance(one, Step):
                self._add(one)

    def _waits(self, rank: int, place: int, arrived: list[int]) -> bool:
        program = self.program.of[rank]
        one = program[place] if 0 <= place < len(program) else None
        return isinstance(one, Wait) and arrived[one.rank] < one.number

    def _view(self, region: Region) -> Any:
        return self.memory[region.memory, region.number][region.start : region.stop]

    def _add(self, step: Step) -> None:
        total = fold(step.tree, lambda i: self._view(step.sources[i]), lambda a, b: a + b)
        for piece in step.outputs:
            self._view(piece)[:] = total


@settings(max_examples=300)
@given(
    name=st.sampled_from(sorted(algorithms.IN_TREE_ORDER)),
    ranks=st.integers(1, 9),
    extra=st.integers(0, 9),
    elements=st.integers(0, 200),
    seed=st.integers(0, 2**32),
)
def test_programs_give_the_reference_to_the_bit_whoever_runs_when(
    name: str, ranks: int, extra: int, elements: int, seed: int
) -> None:
    owners = leaf_slots(ranks, ranks + extra)
    values = [np.random.default_rng([seed, i]).standard_normal(elements) for i in range(len(owners.owners))]
    machine = _Machine(
        programs(scaled(algorithms.IN_TREE_ORDER[name](owners), elements), owners.owners), owners, values, seed
    )
    machine.run()
    expected = reference.allreduce(values, owners)
    for rank in range(ranks):
        np.testing.assert_array_equal(machine.results[rank], expected)


@pytest.mark.parametrize("name", sorted(algorithms.IN_TREE_ORDER))
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_a_program_without_one_of_its_waits_can_go_wrong(name: str, ranks: int) -> None:
    owners = leaf_slots(ranks, ranks)
    values = [np.arange(64.0) + 100 * rank for rank in range(ranks)]
    whole = programs(scaled(algorithms.IN_TREE_ORDER[name](owners), 64), owners.owners)
    expected = reference.allreduce(values, owners)
    for rank, program in enumerate(whole.of):
        waits = [place for place, one in enumerate(program) if isinstance(one, Wait)]
        for place in waits[:1] + waits[-1:]:
            without = [*whole.of]
            without[rank] = program[:place] + program[place + 1 :]
            broken = Programs(tuple(without), whole.arrivals, whole.synchronisations)
            wrong = False
            for seed in range(500):
                machine = _Machine(broken, owners, values, seed)
                machine.run()
                wrong = any(not np.array_equal(result, expected) for result in machine.results.values())
                if wrong:
                    break
            assert wrong, f"rank {rank} need not wait at {place}: {program[place]}"


@pytest.mark.parametrize("ranks", range(2, 9))
def test_versions_move_and_wait_as_published(ranks: int) -> None:
    """The table of memory traffic (reference formulas); a ring adds several slots at once where it can, and saves."""
    size, owners = 10**6, leaf_slots(ranks, ranks)
    moved = {version.name: version.bytes_moved(owners, size) / size for version in versions("cpu")}
    waits = {version.name: version.synchronisations(owners) for version in versions("cpu")}
    assert moved["two-shot"] == 2 * ranks == floor_bytes(ranks, size) / size
    assert moved["one-shot"] == ranks**2 + ranks + 2 * ranks  # and copies to the stage
    assert moved["halving-doubling"] == pytest.approx(5 * (ranks - 1))
    assert 2 * ranks <= moved["ring"] <= 5 * (ranks - 1)
    assert (waits["one-shot"], waits["two-shot"]) == (1, 2)
    assert waits["halving-doubling"] == 2 * (ranks - 1).bit_length() + 1
    assert waits["ring"] <= 2 * (ranks - 1) + 1


def test_two_shot_moves_no_byte_more_than_the_bound_and_extra_slots_are_read_once() -> None:
    size = 8 * 16 * 840
    for ranks in range(2, 9):
        owners = leaf_slots(ranks, 8)
        steps = scaled(algorithms.two_shot(owners), 16 * 840)
        assert 8 * moved_elements(steps) == floor_bytes(ranks, size) + owners.extra * size


def test_names_are_registered_once() -> None:
    names = [(version.backend, version.name) for version in versions()]
    assert len(set(names)) == len(names) and ("numpy", "reference") in names
    with pytest.raises(ValueError, match="registered twice"):
        register(versions("cpu")[0])


@pytest.mark.parametrize("devices", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4, 5))])
def test_processes_get_the_reference_to_the_bit(devices: int, on_ranks: OnRanks) -> None:
    actual = on_ranks("ranks_allreduce:versions_on_ranks", devices=devices)
    assert actual["wrong"] == []
    assert actual["cases"] >= 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "rounds", "yields"), [(2, 100_000, True), (2, 5_000, False), (3, 10_000, True), (4, 3_000, True)]
)
def test_no_round_of_a_hundred_thousand_is_wrong(
    devices: int, rounds: int, yields: bool, on_ranks: OnRanks, record_property: Callable[[str, object], None]
) -> None:
    """Random sizes, payloads, versions and pauses; every rank checks every sum. A busy machine does fewer rounds."""
    actual = on_ranks("ranks_allreduce:stress", {"rounds": rounds, "yields": yields}, devices=devices)
    record_property("rounds", actual["rounds"])
    assert actual["wrong"] == 0
    assert actual["rounds"] >= 1000 and actual["versions"] == len(versions("cpu"))


def test_a_wait_lets_ctrl_c_and_other_work_through(on_ranks: OnRanks) -> None:
    assert on_ranks("ranks_allreduce:interrupted", devices=2) == {"interrupted": True, "right": True}


def test_one_shot_refuses_what_its_stage_cannot_hold(on_ranks: OnRanks) -> None:
    assert "at most 64 KiB" in on_ranks("ranks_allreduce:too_large", devices=2)
