"""Allreduce and broadcast: every algorithm gives NumPy's sum, the same bits on every rank, for what it should cost."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_transport import Mailbox, random_whole, run_together

from dpsim.algorithms import ALGORITHMS, RUNNABLE, Algorithm, algorithms_in
from dpsim.comm.allreduce import CollectiveSteps, SummationOrder, prepare
from dpsim.comm.broadcast import broadcast
from dpsim.comm.message_steps import MessageAllreduce, chunk_bounds
from dpsim.comm.transport import Array, Transport
from dpsim.errors import AllreduceError, ConfigError
from dpsim.kernels.allreduce import reference
from dpsim.kernels.allreduce.tree import slots

POINT_TO_POINT = ["ring", "recursive-doubling", "halving-doubling", "direct", "hierarchical"]
RANKS = [1, 2, 3, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 8))]


@settings(max_examples=200)
@given(
    algorithm=st.sampled_from(POINT_TO_POINT),
    size=st.integers(1, 9),
    elements=st.integers(0, 50),
    dtype=st.sampled_from(["float32", "float64"]),
    eager=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_whole_numbers_are_summed_exactly_whatever_the_order_of_messages(
    algorithm: str, size: int, elements: int, dtype: str, eager: bool, seed: int
) -> None:
    data = random_whole(size, elements, dtype, seed)
    expected = np.sum(data, axis=0, dtype=dtype)
    box = Mailbox(size, eager=eager)
    run_together(lambda rank: prepare(box.ranks[rank], data[rank], algorithm).start(), size, seed)
    for mine in data:
        assert mine.dtype == dtype
        np.testing.assert_array_equal(mine, expected)
    assert all(len(box.sent[pair]) == number for pair, number in box.asked.items()), "a message was never received"


@settings(max_examples=100)
@given(
    algorithm=st.sampled_from(POINT_TO_POINT),
    size=st.integers(2, 9),
    elements=st.integers(1, 50),
    dtype=st.sampled_from(["float32", "float64"]),
    seed=st.integers(0, 2**32),
)
def test_every_rank_holds_the_same_bits_and_they_are_near_the_sum(
    algorithm: str, size: int, elements: int, dtype: str, seed: int
) -> None:
    random = np.random.default_rng(seed)
    data = [random.standard_normal(elements).astype(dtype) for _ in range(size)]
    expected = np.sum(data, axis=0, dtype="float64")
    box = Mailbox(size, eager=False)
    run_together(lambda rank: prepare(box.ranks[rank], data[rank], algorithm).start(), size, seed)
    assert len({mine.tobytes() for mine in data}) == 1
    np.testing.assert_allclose(data[0], expected, rtol=0, atol=size * 4 * np.finfo(dtype).eps)


@settings(max_examples=150)
@given(
    algorithm=st.sampled_from(algorithms_in(*RUNNABLE)),
    size=st.integers(1, 8),
    extra=st.integers(0, 8),
    elements=st.integers(1, 120),
    eager=st.booleans(),
    seed=st.integers(0, 2**32),
    of_a_node=st.sampled_from([1, 2, 3]),
)
def test_the_fixed_order_has_the_bits_of_the_reference_by_every_algorithm(
    algorithm: str, size: int, extra: int, elements: int, eager: bool, seed: int, of_a_node: int
) -> None:
    if algorithm != "hierarchical" or size % of_a_node:
        of_a_node = 1
    order = slots([rank * (size + extra) // size for rank in range(size + 1)])
    random = np.random.default_rng(seed)
    rows = [random.standard_normal(elements) for _ in order.owners]
    expected = reference.allreduce(rows, order)
    box = Mailbox(size, eager=eager, devices_a_node=of_a_node)
    most = max(map(order.owners.count, order.owners))

    def begin(rank: int) -> CollectiveSteps:
        own = [rows[slot] for slot in order.of(rank)]
        unused = [np.full(elements, np.nan) for _ in range(most - len(own))]
        return prepare(box.ranks[rank], own[0], algorithm, None, SummationOrder(order, (*own[1:], *unused))).start()

    run_together(begin, size, seed)
    if size > 1:
        for rank in range(size):
            np.testing.assert_array_equal(rows[order.of(rank)[0]], expected)
    assert all(len(box.sent[pair]) == number for pair, number in box.asked.items()), "a message was never received"


@pytest.mark.parametrize("algorithm", ["direct", "ring", "halving-doubling"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_fixed_order_sends_no_byte_more_where_ranks_hold_whole_subtrees(algorithm: str, size: int) -> None:
    """A power of two of ranks, 8 leaves; a ring even fewer: it leaves what no sum is complete with yet."""
    box = Mailbox(size, eager=True)
    order = slots([rank * 8 // size for rank in range(size + 1)])
    data = random_whole(size, 16 * size, "float32", 0)
    run_together(
        lambda rank: prepare(box.ranks[rank], data[rank], algorithm, None, SummationOrder(order)).start(), size, 0
    )
    _, plain, _ = cost(algorithm, size, 16 * size)
    sent = [t.sent_bytes for t in box.ranks]
    assert sum(sent) <= sum(plain)
    if algorithm != "ring":
        assert sent == plain


def cost(algorithm: str, size: int, elements: int) -> tuple[list[int], list[int], list[int]]:
    """Rounds, bytes sent and messages sent, by rank, of one float32 allreduce."""
    data = random_whole(size, elements, "float32", 0)
    box = Mailbox(size, eager=True)
    rounds = run_together(lambda rank: prepare(box.ranks[rank], data[rank], algorithm).start(), size, 0)
    return rounds, [t.sent_bytes for t in box.ranks], [t.sent_messages for t in box.ranks]


@pytest.mark.parametrize("size", range(2, 10))
def test_ring_takes_2n_minus_2_rounds_and_sends_2n_minus_2_over_n_of_the_data(size: int) -> None:
    rounds, sent, messages = cost("ring", size, 12 * size)
    assert rounds == messages == [2 * (size - 1)] * size
    assert sent == [2 * (size - 1) * 12 * 4] * size


@pytest.mark.parametrize("size", range(2, 10))
def test_direct_takes_two_rounds_and_sends_as_much_as_ring(size: int) -> None:
    rounds, sent, messages = cost("direct", size, 12 * size)
    assert rounds == [2] * size
    assert messages == [2 * (size - 1)] * size
    assert sent == [2 * (size - 1) * 12 * 4] * size


@pytest.mark.parametrize("size", [2, 4, 8])
def test_recursive_doubling_sends_everything_in_each_of_log2_n_rounds(size: int) -> None:
    levels = size.bit_length() - 1
    rounds, sent, _ = cost("recursive-doubling", size, 40)
    assert rounds == [levels] * size
    assert sent == [levels * 40 * 4] * size


@pytest.mark.parametrize("size", [2, 4, 8])
def test_halving_doubling_takes_2_log2_n_rounds_and_sends_as_much_as_ring(size: int) -> None:
    rounds, sent, _ = cost("halving-doubling", size, 16 * size)
    assert rounds == [2 * (size.bit_length() - 1)] * size
    assert sent == [2 * (size - 1) * 16 * 4] * size


@pytest.mark.parametrize("algorithm", ["recursive-doubling", "halving-doubling"])
@pytest.mark.parametrize("size", [3, 5, 6, 7, 9])
def test_a_size_that_is_no_power_of_two_costs_two_more_rounds(algorithm: str, size: int) -> None:
    core = 1 << (size.bit_length() - 1)
    rounds, _, _ = cost(algorithm, size, 64)
    smaller, _, _ = cost(algorithm, core, 64)
    assert max(rounds) == max(smaller) + 2


@settings(max_examples=100)
@given(elements=st.integers(0, 10_000), chunks=st.integers(1, 64))
def test_chunks_cover_everything_and_differ_by_one_at_most(elements: int, chunks: int) -> None:
    bounds = chunk_bounds(elements, chunks)
    sizes = np.diff(bounds)
    assert (bounds[0], bounds[-1], len(sizes)) == (0, elements, chunks)
    assert sizes.min() >= 0 and sizes.max() - sizes.min() <= 1
    assert sizes.max() == sizes[0]  # the ring's scratch has this size


def test_an_unknown_algorithm_names_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'ring'"):
        prepare(Mailbox(2, eager=True).ranks[0], np.zeros(3), "rings")


@pytest.mark.parametrize("order", [None, SummationOrder(slots([0, 3, 8]), (np.zeros(3),))])
def test_an_algorithm_without_a_list_of_steps_is_refused(
    order: SummationOrder | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlisted = dataclasses.replace(ALGORITHMS["ring"], name="star")
    monkeypatch.setitem(cast(dict[str, Algorithm], ALGORITHMS._items), "star", unlisted)
    with pytest.raises(ConfigError, match="unknown list of steps for the algorithm 'star'"):
        prepare(Mailbox(2, eager=True).ranks[0], np.zeros(3), "star", order=order)


@pytest.mark.parametrize("size", range(1, 10))
def test_broadcast_sends_rank_0s_data_along_a_binomial_tree(size: int) -> None:
    data = random_whole(size, 7, "float32", size)
    expected = data[0].copy()
    box = Mailbox(size, eager=True)
    for rank in range(size):  # every rank's source has a lower number, so its message is there already
        broadcast(box.ranks[rank], data[rank])
    for mine in data:
        np.testing.assert_array_equal(mine, expected)
    assert sum(t.sent_messages for t in box.ranks) == size - 1
    assert box.ranks[0].sent_messages == (size - 1).bit_length()


@pytest.fixture(scope="module")
def once(together: Callable[..., list[Any]]) -> Callable[[int], dict[str, Any]]:
    """The real runs, started once for all tests of this module: those on few ranks in one job."""

    @functools.cache
    def run(numbers: tuple[int, ...]) -> dict[int, Any]:
        tasks = [("ranks_comm:collectives", {}, devices) for devices in numbers]
        return dict(zip(numbers, together(*tasks), strict=True))

    return lambda devices: run((1, 2, 3, 4) if devices < 5 else (devices,))[devices]


@pytest.mark.parametrize("algorithm", algorithms_in(*RUNNABLE))
@pytest.mark.parametrize("devices", RANKS)
def test_processes_get_numpys_sum(devices: int, algorithm: str, once: Callable[[int], dict[str, Any]]) -> None:
    actual = once(devices)
    assert actual["wrong"][algorithm] == []
    assert actual["cases"][algorithm] >= 10


@pytest.mark.parametrize("devices", RANKS)
def test_broadcast_between_processes_makes_all_ranks_equal(devices: int, once: Callable[[int], dict[str, Any]]) -> None:
    assert once(devices)["broadcast_wrong"] == []


@pytest.mark.parametrize("algorithm", ["auto", "direct"])
def test_without_shared_memory_each_rank_has_its_own_and_is_told(
    algorithm: str, on_ranks: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    assert on_ranks("ranks_comm:unshared", {"algorithm": algorithm}, devices=3) == {"own": True, "right": True}
    said = capfd.readouterr().err
    assert said.count("3 ranks of this machine cannot share 120 KiB of memory; messages are used instead") == 1


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_first_sum_of_a_users_algorithm_is_checked(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []

    def forgets_an_element(t: Transport, data: Array) -> CollectiveSteps:
        last = data[-1]
        yield from MessageAllreduce(t, [data], "recursive-doubling").start()
        runs.append(t.rank)
        if t.rank == 1 and broken:
            data[-1] = last

    algorithm = dataclasses.replace(ALGORITHMS["recursive-doubling"], name="own", steps=forgets_an_element)
    monkeypatch.setitem(cast(dict[str, Algorithm], ALGORITHMS._items), "own", algorithm)
    random = np.random.default_rng(0)
    data = [random.standard_normal(50).astype(dtype) for _ in range(3)]
    expected = data[1][-1], sum(float(mine[-1]) for mine in data)
    broken = False
    again = [mine.copy() for mine in data]
    box = Mailbox(3, eager=False)
    prepared = [prepare(box.ranks[rank], again[rank], "own") for rank in range(3)]
    run_together(lambda rank: prepared[rank].start(), 3, 0)
    sent = [rank.sent_messages for rank in box.ranks]
    run_together(lambda rank: prepared[rank].start(), 3, 0)
    assert [rank.sent_messages - before for rank, before in zip(box.ranks, sent, strict=True)] < sent, "checked twice"
    assert sorted(runs) == [0, 0, 1, 1, 2, 2]

    broken = True
    box = Mailbox(3, eager=False)
    with pytest.raises(AllreduceError) as raised:
        run_together(lambda rank: prepare(box.ranks[rank], data[rank], "own").start(), 3, 0)
    assert raised.value.given == (
        f"the allreduce 'own' gives a wrong sum on rank 1 of 3: element 49 is {expected[0]:.9g} instead of"
        f" {expected[1]:.9g} (1 of 50 elements are wrong)"
    )
