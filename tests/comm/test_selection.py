"""Which allreduce ``auto`` takes at each size: decided from times, and measured on ranks that share no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsim import codec
from dpsim.cost_tables import BY_MESSAGES
from dpsim.machine import Selection

SIZES = (4, 1024, 4096, 16384)


def test_the_fastest_at_each_size_is_taken_up_to_the_middle_by_ratio() -> None:
    times_s = {
        4: {"mpi": 3.0, "recursive-doubling": 2.0, "ring": 9.0},
        1024: {"mpi": 4.0, "recursive-doubling": 3.0, "ring": 9.0},
        4096: {"mpi": 5.0, "recursive-doubling": 9.0, "ring": 8.0},
        16384: {"mpi": 30.0, "recursive-doubling": 36.0, "ring": 20.0},
    }
    actual = Selection.fastest(3, times_s)
    assert actual == Selection(devices=3, algorithms=("recursive-doubling", "mpi", "ring"), below_bytes=(2049, 8193))
    assert actual.by_messages
    assert [actual.algorithm(size) for size in (2048, 2049, 10**9)] == ["recursive-doubling", "mpi", "ring"]


@pytest.mark.parametrize(("slower", "changes"), [(1.01, 0), (1.2, 2)])
def test_a_difference_as_small_as_noise_changes_nothing(slower: float, changes: int) -> None:
    times_s = {size: {"mpi": 1.0, "ring": slower} for size in SIZES}
    times_s[1024] = {"mpi": slower, "ring": 1.0}
    actual = Selection.fastest(2, times_s)
    assert len(actual.below_bytes) == changes
    assert actual.algorithm(4) == "mpi"


@given(st.lists(st.tuples(*[st.floats(1e-6, 1.0)] * len(BY_MESSAGES)), min_size=1, max_size=len(SIZES)))
def test_what_is_taken_is_within_two_changes_of_the_fastest(rows: list[tuple[float, ...]]) -> None:
    times_s = {size: dict(zip(BY_MESSAGES, row, strict=True)) for size, row in zip(SIZES, rows, strict=False)}
    actual = Selection.fastest(4, times_s)
    for size, of_size in times_s.items():
        assert of_size[actual.algorithm(size)] <= min(of_size.values()) * 1.03**2 * (1 + 1e-9)
    assert codec.decode(codec.to_builtins(actual), Selection, "selection") == actual


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_all_ranks_that_share_no_memory_measure_the_same_and_auto_runs_it(
    devices: int, on_ranks: Callable[..., Any]
) -> None:
    ranks = on_ranks("ranks_selection:measured", devices=devices)
    assert all(rank["selection"] == ranks[0]["selection"] for rank in ranks)
    selection = codec.decode(ranks[0]["selection"], Selection, "selection")
    assert selection.devices == devices
    assert selection.by_messages == (devices > 1)
    assert [rank["wrong"] for rank in ranks] == [[]] * devices
    if devices > 1:
        assert all(rank["native"] == [False, True, False] for rank in ranks)
