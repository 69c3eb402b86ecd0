"""Sharding and batches: nothing lost, nothing twice, the same for any number of devices."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsim.data import epoch_batches, shard
from dpsim.errors import ConfigError


@given(batch=st.integers(0, 500), devices=st.integers(1, 70))
def test_shards_cut_a_batch_into_neighbouring_parts_of_almost_one_size(batch: int, devices: int) -> None:
    parts = [shard(batch, devices, rank) for rank in range(devices)]
    assert parts[0][0] == 0 and parts[-1][1] == batch
    assert all(left[1] == right[0] for left, right in itertools.pairwise(parts))
    sizes = [stop - start for start, stop in parts]
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 0


@given(
    n=st.integers(1, 200),
    global_batch=st.integers(1, 250),
    devices=st.integers(1, 9),
    seed=st.integers(0, 1000),
    epoch=st.integers(0, 1000),
)
def test_an_epoch_holds_every_sample_once_in_one_order_for_any_number_of_devices(
    n: int, global_batch: int, devices: int, seed: int, epoch: int
) -> None:
    seen = []
    for batch in epoch_batches(n, global_batch, seed, epoch):
        assert 1 <= len(batch) <= global_batch
        for rank in range(devices):
            start, stop = shard(len(batch), devices, rank)
            seen.append(batch[start:stop])
    order = np.concatenate(seen)
    assert np.array_equal(order, np.concatenate(epoch_batches(n, global_batch, seed, epoch)))
    assert np.array_equal(np.sort(order), np.arange(n))


def test_only_the_last_batch_is_short() -> None:
    assert [len(batch) for batch in epoch_batches(1437, 64, 0, 0)] == [64] * 22 + [29]


@pytest.mark.parametrize(("batch", "devices", "rank"), [(-1, 1, 0), (4, 0, 0), (4, 2, 2), (4, 2, -1)])
def test_an_impossible_shard_is_refused(batch: int, devices: int, rank: int) -> None:
    with pytest.raises(ConfigError, match="0 <= rank < devices"):
        shard(batch, devices, rank)


@pytest.mark.parametrize(("n", "global_batch"), [(0, 4), (4, 0)])
def test_an_epoch_without_samples_or_with_empty_batches_is_refused(n: int, global_batch: int) -> None:
    with pytest.raises(ConfigError, match="1 sample or more"):
        epoch_batches(n, global_batch, 0, 0)
