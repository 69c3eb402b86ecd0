"""The kernels of the CUDA transport: compiled before any is launched, agreed on, kept within bounds, given up."""

from __future__ import annotations

import functools
import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from dpsim.comm.cuda.peer_memory import ONE_WAVE_BYTES, SAVED_BYTES, one_shot_bytes, version_of_auto
from dpsim.kernels.allreduce import registry
from dpsim.launch import jobs

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (pip install -e '.[dev]')")
RANKS = [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))]


@functools.cache
def ran(ranks: int) -> dict[str, Any]:
    """What ``ranks`` ranks met, in one job in numba's simulator."""
    support = str(Path(__file__).parents[1] / "support")
    env = {"PYTHONPATH": support, "NUMBA_ENABLE_CUDASIM": "1"}
    return jobs.on_ranks("ranks_cuda_peer_memory:run", {}, devices=ranks, timeout_s=100, env=env)  # type: ignore[no-any-return]


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


def test_one_shot_is_taken_up_to_where_it_reads_no_more_than_it_saves() -> None:
    assert one_shot_bytes(2) == ONE_WAVE_BYTES  # two ranks read as much either way
    for ranks in (3, 4, 8, 16):
        size_bytes = one_shot_bytes(ranks)
        more = (ranks - 1) * size_bytes - 2 * (ranks - 1) / ranks * size_bytes
        assert SAVED_BYTES * 0.999 < more <= SAVED_BYTES or size_bytes == ONE_WAVE_BYTES
    limits = [one_shot_bytes(ranks) for ranks in range(2, 65)]
    assert all(later <= earlier for earlier, later in itertools.pairwise(limits))


def test_large_arrays_and_those_of_16_bits_and_kernels_that_end_where_ranks_wait_take_two_shot() -> None:
    for ranks in (2, 4, 8):
        limit = one_shot_bytes(ranks)
        assert version_of_auto(ranks, limit, "flags", sixteen_bits=False) == "one-shot"
        assert version_of_auto(ranks, limit + 1, "flags", sixteen_bits=False) == "two-shot"
        assert version_of_auto(ranks, 4, "split", sixteen_bits=False) == "two-shot"
        assert version_of_auto(ranks, 4, "flags", sixteen_bits=True) == "two-shot"


def test_one_shot_has_an_upper_size_above_that_of_auto() -> None:
    version = registry.find("cuda", "one-shot")
    assert version.most_bytes is not None and version.most_bytes > one_shot_bytes(2)
