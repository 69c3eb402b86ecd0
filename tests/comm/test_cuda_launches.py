"""The kernels of the CUDA transport: compiled before any is launched, agreed on, kept within bounds, given up."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

from dpsim.launch import jobs

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (pip install -e '.[dev]')")
RANKS = [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))]


@functools.cache
def ran(ranks: int) -> dict[str, Any]:
    """What ``ranks`` ranks met, in one job in numba's simulator."""
    support = str(Path(__file__).parents[1] / "support")
    env = {"PYTHONPATH": support, "NUMBA_ENABLE_CUDASIM": "1"}
    return jobs.on_ranks("ranks_cuda_launches:run", {}, devices=ranks, timeout_s=100, env=env)  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_kernels_are_compiled_when_memory_is_prepared_and_bound_to_all_of_it_before_the_first_launch(
    ranks: int,
) -> None:
    compiled, binds, later = 1, 3, 0
    actual = ran(ranks)
    for counts in (*actual["compiled"].values(), actual["coded"]):
        assert counts == [[compiled, binds, later]] * ranks


@pytest.mark.parametrize("ranks", RANKS)
def test_launches_of_varying_parts_are_kept_within_bounds_and_stay_right(ranks: int) -> None:
    assert ran(ranks)["varying"] == {"right": True, "kept": [1 + 4] * ranks}


@pytest.mark.parametrize("ranks", RANKS)
def test_all_ranks_start_as_many_blocks_as_run_at_once_on_each_of_their_gpus(ranks: int) -> None:
    assert ran(ranks)["fewest"] == {"right": [True] * ranks, "blocks": [1] * ranks}


@pytest.mark.parametrize("ranks", RANKS)
def test_a_kernel_that_a_rank_cannot_compile_is_refused_by_all_before_any_is_launched(ranks: int) -> None:
    actual, text = ran(ranks), f"rank {ranks - 1}: no such kernel here\n  allowed: others\n  to do:   choose another"
    assert actual["refused"] == {"said": [text] * ranks, "started": [0] * ranks}
    assert actual["refused_in_benchmark"] == [text] * ranks


@pytest.mark.parametrize("ranks", RANKS)
def test_a_rank_that_does_not_come_to_an_allreduce_is_named_by_all_others(ranks: int) -> None:
    actual = ran(ranks)["late"]
    *waiting, absent = actual["said"]
    assert absent == ""
    for said, again, taken_s in zip(waiting, actual["again"], actual["taken_s"], strict=False):
        named = re.match(r"rank (\d) has waited 4 s for rank (\d) in an allreduce on GPUs", said)
        assert named is not None and int(named[1]) < ranks - 1 and int(named[2]) == ranks - 1
        assert again == said  # nothing is launched afterwards
        assert taken_s < 60


@pytest.mark.parametrize("ranks", RANKS)
def test_auto_takes_one_shot_for_small_arrays_alone_and_one_shot_refuses_large_ones(ranks: int) -> None:
    actual = ran(ranks)["chosen"]
    assert actual["right"] == [True] * ranks
    assert actual["versions"] == [["one-shot"], ["two-shot"]]
    text = "rank 0: a one-shot allreduce of 400 B on GPUs\n  allowed: at most 300 B"
    assert all(said.startswith(text) for said in actual["said"])


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_meet_between_the_stages_of_a_kernel_when_the_stage_before_is_done(ranks: int) -> None:
    assert all(times >= 1 for times in ran(ranks)["met"])


@pytest.mark.parametrize("ranks", RANKS)
def test_memory_is_given_back_when_the_device_has_done_all_work(ranks: int) -> None:
    assert ran(ranks)["closed"] == [True] * ranks
