"""Which samples form a global batch, and which of them a device computes."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from dpsim import rng
from dpsim.errors import ConfigError


def epoch_batches(n: int, global_batch: int, seed: int, epoch: int) -> list[NDArray[np.int64]]:
    """Sample indices of each step: one permutation of 0..n-1 for (seed, epoch), cut every ``global_batch`` samples.

    The last batch is short if B does not divide n; nothing is dropped or repeated. Raises ``ConfigError``.
    """
    if n < 1 or global_batch < 1:
        raise ConfigError(f"{n} samples in batches of {global_batch}", allowed="1 sample or more, batches of 1 or more")
    order = rng.permutation(n, seed, epoch)
    return [order[start : start + global_batch] for start in range(0, n, global_batch)]


def check_batch(n: int, global_batch: int) -> None:
    """Refuse a global batch that no step of an epoch of ``n`` samples would have. Raises ``ConfigError``."""
    if global_batch > n:
        raise ConfigError(
            f"a global batch of {global_batch} of {n} training samples",
            allowed=f"1 to {n}",
            remedy="lower --global-batch, or take a larger data set",
        )


def shard(batch: int, devices: int, rank: int) -> tuple[int, int]:
    """(start, stop) = (floor(rank b / n), floor((rank + 1) b / n)): device ``rank``'s samples of a batch of b.

    Contiguous, nothing dropped or padded, sizes differ by at most one; a device may get none of a short batch.
    Raises ``ConfigError``.
    """
    if batch < 0 or not 0 <= rank < devices:
        raise ConfigError(
            f"rank {rank} of {devices} devices for {batch} samples", allowed="0 <= rank < devices, 0 or more samples"
        )
    return rank * batch // devices, (rank + 1) * batch // devices


def leaf_bounds(batch: int, leaves: int) -> tuple[int, ...]:
    """Return (floor(i b / V)) for i = 0..V: leaf i of a batch of b samples is i to i + 1 of them, on any devices.

    Leaves differ by at most one sample; where b < V some are empty.
    """
    return tuple(i * batch // leaves for i in range(leaves + 1))


def largest_share(batch: int, devices: int, leaves: int) -> int:
    """Return the largest local batch: ceil(b / n), or with leaves that of the device whose leaves have the most."""
    if not leaves:
        return -(-batch // devices)
    bounds, owned = leaf_bounds(batch, leaves), device_leaves(leaves, devices)
    return max(bounds[stop] - bounds[first] for first, stop in itertools.pairwise(owned))


def device_leaves(leaves: int, devices: int) -> tuple[int, ...]:
    """Return (floor(r V / n)) for r = 0..n: device r owns leaves r to r + 1 of them, one or more where n <= V."""
    return tuple(rank * leaves // devices for rank in range(devices + 1))
