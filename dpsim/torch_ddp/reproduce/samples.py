"""Which samples the ranks of a run had, against those of the first run: repeated, padded, or only shuffled otherwise.

Loads no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import Enum

from dpsim.torch_ddp.reproduce.observation import Loader, Observed, RankStep

Identity = tuple[int, int]


class Samples(Enum):
    """What the samples of a step are, compared with those of the first run."""

    SAME = "the same"
    SAME_ON_ALL_RANKS = "the same on every rank"
    OVERLAP = "shared by several ranks"
    PADDED = "padded"
    DROPPED = "fewer"
    OTHER = "others"
    UNKNOWN = "drawn by the script"


def compared(first: Observed, other: Observed, number: int) -> Samples:
    """Compare the samples of all ranks in a step with those of the first run."""
    ours, theirs = first.step(number), other.step(number)
    known = _by_index(ours) and _by_index(theirs) and _data_sizes(ours) == _data_sizes(theirs)
    before, ranks = _of(ours, known=known), _of(theirs, known=known)
    expected, seen = sum(before, Counter()), sum(ranks, Counter())
    if expected == seen:
        return Samples.SAME
    loader = _loader_of(other, theirs)
    repeated = seen - Counter(dict.fromkeys(seen, 1)) - (expected - Counter(dict.fromkeys(expected, 1)))
    if len(ranks) > 1 and all(rank == ranks[0] for rank in ranks):
        return Samples.SAME_ON_ALL_RANKS
    if known and loader is not None and 0 < loader.data_size < loader.sampler_size * len(ranks):
        extra = loader.sampler_size * len(ranks) - loader.data_size
        if extra < len(ranks):
            return Samples.PADDED if repeated or seen.total() > expected.total() else Samples.OTHER
        return Samples.OVERLAP
    if repeated:
        return Samples.OVERLAP
    if known:
        return Samples.DROPPED if seen.total() < expected.total() and not seen - expected else Samples.OTHER
    if _by_index(theirs) and not seen - expected:
        return Samples.DROPPED
    return Samples.UNKNOWN


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
