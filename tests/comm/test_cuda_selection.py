"""Which version of the kernels ``auto`` takes on GPUs."""

from __future__ import annotations

import itertools

from dpsim.comm.cuda.selection import ONE_WAVE_BYTES, SAVED_BYTES, one_shot_bytes, version_of_auto
from dpsim.kernels.allreduce import registry


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
