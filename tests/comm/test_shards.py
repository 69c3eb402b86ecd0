"""Reduce-scatter and all-gather by messages: each rank its shard of the sum, then all shards on every rank."""

from __future__ import annotations

import itertools
import operator

import numpy as np
import pytest
from memory_transport import Mailbox, run_together

from dpsim.comm.allreduce import prepare
from dpsim.comm.transport import Array, SummationOrder
from dpsim.kernels.allreduce.shards import LINE, largest_shard, shard_bounds
from dpsim.kernels.allreduce.tree import PartialSums, fold, slots

ROUNDS = {"ring": lambda ranks: ranks - 1, "direct": lambda ranks: 1, "auto": lambda ranks: 1}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("elements", [0, 1, 15, 16, 17, 100, 1001])
def test_shards_cover_an_array_without_overlap_and_may_be_empty(ranks: int, elements: int) -> None:
    bounds = shard_bounds(elements, ranks)
    assert bounds[0] == 0 and bounds[-1] == elements and bounds == sorted(bounds) and len(bounds) == ranks + 1
    sizes = np.diff(bounds)
    assert all(bound % LINE == 0 for bound in bounds[:-1] if bound < elements)
    assert max(sizes) <= largest_shard(elements, ranks) < elements / ranks + 2 * LINE


def summed(ranks: int, elements: int, leaves: int) -> tuple[PartialSums, list[Array], Array, int]:
    """Return sums over leaves, or over ranks (0), with a value of each, their sum, and the most that a rank has."""
    sums = slots([rank * leaves // ranks for rank in range(ranks + 1)]) if leaves else slots(range(ranks + 1))
    draw = np.random.default_rng(elements)
    values = [draw.standard_normal(elements).astype(np.float32) for _ in sums.owners]
    return sums, values, fold(sums.tree, values.__getitem__, operator.add), max(map(sums.owners.count, range(ranks)))


@pytest.mark.parametrize("algorithm", ROUNDS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_reduce_scatter_and_an_all_gather_are_an_allreduce(ranks: int, algorithm: str) -> None:
    for elements, leaves, eager in ((0, 0, True), (1, 8, False), (17, 0, False), (100, 8, True), (1001, 8, False)):
        box = Mailbox(ranks, eager=eager)
        sums, values, expected, most = summed(ranks, elements, leaves)
        empty = np.zeros(elements, np.float32)
        held = [[values[slot].copy() for slot in sums.of(rank)] for rank in range(ranks)]
        held = [[*own, *(empty.copy() for _ in range(most - len(own)))] for own in held]
        orders = [SummationOrder(sums, tuple(own[1:])) if leaves else None for own in held]
        scatters = [
            prepare(end, own[0], algorithm, order=order, kind="reduce-scatter")
            for end, own, order in zip(box.ranks, held, orders, strict=True)
        ]
        counts = run_together(lambda rank, begin=scatters: begin[rank].start(), ranks, seed=1)  # type: ignore[misc]
        bounds = shard_bounds(elements, ranks)
        gathered = [np.full(elements, np.nan, np.float32) for _ in range(ranks)]
        for rank, (low, high) in enumerate(itertools.pairwise(bounds)):
            own = held[rank][0][low:high]
            if leaves or algorithm != "ring":
                assert np.array_equal(own, expected[low:high])
            np.testing.assert_allclose(own, expected[low:high], rtol=1e-4, atol=1e-5)
            gathered[rank][low:high] = own
        gathers = [prepare(box.ranks[rank], gathered[rank], algorithm, kind="all-gather") for rank in range(ranks)]
        counts += run_together(lambda rank, begin=gathers: begin[rank].start(), ranks, seed=2)  # type: ignore[misc]
        assert all(np.array_equal(gathered[0], other) for other in gathered) and np.isfinite(gathered[0]).all()
        assert max(counts) <= ROUNDS[algorithm](ranks)
        assert elements < 1001 or max(counts) == ROUNDS[algorithm](ranks)


@pytest.mark.parametrize("algorithm", ROUNDS)
@pytest.mark.parametrize(("ranks", "replicas"), [(4, 2), (6, 3), (6, 2), (8, 4)])
def test_replicas_share_a_sum_that_each_shards_among_its_ranks(ranks: int, replicas: int, algorithm: str) -> None:
    size = ranks // replicas
    for elements, leaves, eager in (
        (0, 0, True),
        (17, 4 * replicas, False),
        (100, 0, True),
        (1001, 4 * replicas, False),
    ):
        box = Mailbox(ranks, eager=eager)
        sums, values, expected, most = summed(ranks, elements, leaves)
        held = [[values[slot].copy() for slot in sums.of(rank)] for rank in range(ranks)]
        held = [[*own, *(np.zeros(elements, np.float32) for _ in range(most - len(own)))] for own in held]
        orders = [SummationOrder(sums, tuple(own[1:])) if leaves else None for own in held]
        for kind in ("reduce-scatter", "allreduce"):
            collectives = [
                prepare(end, own[0], algorithm, None, order, kind, replicas)  # type: ignore[arg-type]
                for end, own, order in zip(box.ranks, held, orders, strict=True)
            ]
            run_together(lambda rank, begin=collectives: begin[rank].start(), ranks, seed=1)  # type: ignore[misc]
        bounds = shard_bounds(elements, size)
        gathered = [np.full(elements, np.nan, np.float32) for _ in range(ranks)]
        for rank in range(ranks):
            part = slice(*bounds[rank % size : rank % size + 2])
            own = held[rank][0][part]
            assert not leaves or np.array_equal(own, expected[part])
            np.testing.assert_allclose(own, expected[part], rtol=1e-4, atol=1e-5)
            gathered[rank][part] = own
        sent = [end.sent_messages for end in box.ranks]
        gathers = [
            prepare(end, own, algorithm, kind="all-gather", replicas=replicas)
            for end, own in zip(box.ranks, gathered, strict=True)
        ]
        run_together(lambda rank, begin=gathers: begin[rank].start(), ranks, seed=2)  # type: ignore[misc]
        assert all(np.array_equal(gathered[0], other) for other in gathered) and np.isfinite(gathered[0]).all()
        assert (
            elements < 1001
            or [end.sent_messages - before for end, before in zip(box.ranks, sent, strict=True)] == [size - 1] * ranks
        ), "within a replica alone"
