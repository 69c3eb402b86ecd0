"""Which samples the ranks of a run had, against those of the first run: repeated, padded, or only shuffled otherwise.

Loads no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from dpsim.torch.script.probe.reproduce.report import Loader, RankStep
from dpsim.torch.script.reproduce.observation import Observed

Identity = tuple[int, int]
_PASS = 0.9
"""The part of a data set from which on an epoch is a pass over it, and no selection."""


class Samples(Enum):
    """What the samples of a step are, compared with those of the first run."""

    SAME = "the same"
    SAME_ON_ALL_RANKS = "the same on every rank"
    OVERLAP = "shared by several ranks"
    PADDED = "padded"
    DROPPED = "fewer"
    OTHER = "others"
    UNKNOWN = "drawn by the script"


@dataclass(frozen=True)
class Overlap:
    """An epoch that ranks draw by seeds of their own: how many samples train more than once, and how many never."""

    repeated: int
    never: int
    size: int


def overlap(first: Observed, other: Observed) -> Overlap | None:
    """Return how the ranks' shards of a loader's first epoch overlap; None where they divide it, or are not known.

    In the first run the epoch is a pass over the data. Shards in which a rank itself repeats samples were drawn with
    replacement, which ranks may do apart. As many samples as a global batch has may be padding, where all are drawn.
    """
    for number, (shards, _) in other.shards.items():
        whole, sizes = first.shards.get(number, ([], [0]))
        if len(shards) == 1 or not sum(map(len, whole)):
            continue
        passed, drawn = np.unique(np.concatenate(whole)), np.concatenate(shards)
        unique, counts = np.unique(drawn, return_counts=True)
        batch = sum(rank.samples for rank in other.step(0))
        with_replacement = any(len(shard) - len(np.unique(shard)) > batch for shard in (*shards, *whole))
        same = all(np.array_equal(shard, shards[0]) for shard in shards)
        if with_replacement or same or len(passed) < _PASS * sizes[0] or len(drawn) < _PASS * len(passed):
            continue
        never = len(np.setdiff1d(passed, unique, assume_unique=True))
        if len(drawn) - len(unique) > (len(shards) if never > len(shards) else batch):
            return Overlap(int(np.count_nonzero(counts > 1)), never, len(np.union1d(passed, unique)))
    return None


def compared(first: Observed, other: Observed, number: int) -> Samples:
    """Compare the samples of all ranks in a step with those of the first run.

    Samples that no loader with indices gave are told apart by their values. Such batches say nothing of a sampler
    unless no two of their samples are alike, and each step has others.
    """
    ours, theirs = first.step(number), other.step(number)
    known = told_by_index(first, other, number)
    before, ranks = _of(ours, known=known), _of(theirs, known=known)
    expected, seen = sum(before, Counter()), sum(ranks, Counter())
    if expected == seen:
        return Samples.SAME
    alike = len(ranks) > 1 and all(rank == ranks[0] for rank in ranks)
    if not known:
        if alike and told_apart(first, other, number) and ranks[0] != _neighbour(other, number):
            return Samples.SAME_ON_ALL_RANKS
        return Samples.DROPPED if _by_index(theirs) and not seen - expected else Samples.UNKNOWN
    if alike:
        return Samples.SAME_ON_ALL_RANKS
    loader = _loader_of(other, theirs)
    own = sum((rank - Counter(dict.fromkeys(rank, 1)) for rank in (*ranks, *before)), Counter())
    repeated = seen - Counter(dict.fromkeys(seen, 1)) - own
    extra = 0 if loader is None else loader.sampler_size * len(ranks) - loader.data_size
    if 0 < extra < len(ranks):
        return Samples.PADDED if repeated or seen.total() > expected.total() else Samples.OTHER
    if (repeated or extra > 0) and not own and not first.shards.keys() & other.shards.keys():
        return Samples.OVERLAP  # shards of an epoch, where they are known, say more than a step does
    return Samples.DROPPED if seen.total() < expected.total() and not seen - expected else Samples.OTHER


def told_by_index(first: Observed, other: Observed, number: int) -> bool:
    """Whether the samples of a step of both runs are known by their indices in one data set."""
    ours, theirs = first.step(number), other.step(number)
    return _by_index(ours) and _by_index(theirs) and _data_sizes(ours) == _data_sizes(theirs)


def told_apart(first: Observed, other: Observed, number: int) -> bool:
    """Whether no two samples of a rank in a step can be taken for each other: by their indices, or their values."""
    if told_by_index(first, other, number):
        return True
    ranks = (*_of(first.step(number), known=False), *_of(other.step(number), known=False))
    return all(max(rank.values(), default=1) == 1 for rank in ranks)


def _neighbour(run: Observed, number: int) -> Counter[Identity] | None:
    """The samples of rank 0 by their values in the step before or after; None without one."""
    near = number - 1 if number else 1
    return _of(run.step(near)[:1], known=False)[0] if near < run.steps else None


def padding(other: Observed) -> tuple[int, int]:
    """Return how many samples the sampler of a distributed loader repeats in an epoch, and the data set's size."""
    for loader in other.reports[0].loaders:
        extra = loader.sampler_size * other.run.devices - loader.data_size
        if loader.sampler == "DistributedSampler" and 0 < extra < other.run.devices:
            return extra, loader.data_size
    return 0, 0


def _by_index(ranks: Sequence[RankStep]) -> bool:
    return all(micro.data_size for rank in ranks for micro in rank.micro_batches)


def _data_sizes(ranks: Sequence[RankStep]) -> set[int]:
    return {micro.data_size for rank in ranks for micro in rank.micro_batches}


def _of(ranks: Sequence[RankStep], *, known: bool) -> list[Counter[Identity]]:
    return [
        Counter(
            (micro.epoch if known else 0, each)
            for micro in rank.micro_batches
            for each in (micro.indices if known else micro.rows)
        )
        for rank in ranks
    ]


def _loader_of(run: Observed, ranks: Sequence[RankStep]) -> Loader | None:
    sizes = _data_sizes(ranks)
    return next((each for each in run.reports[0].loaders if each.data_size in sizes and each.sampler_size), None)
