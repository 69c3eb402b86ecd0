"""16 bits on the wire: rounded exactly as documented, the same bits everywhere, half the bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_transport import Mailbox, run_together
from wire_reference import direct_sum, hierarchical_sum, node_sum, rounded

from dpsim.collective import Collective, parse_devices
from dpsim.comm.allreduce import CollectiveSteps, SummationOrder, prepare
from dpsim.comm.compression import Compression, compression
from dpsim.comm.transport import Array
from dpsim.dtypes import SIXTEEN_BITS
from dpsim.errors import ConfigError
from dpsim.harness.train.train import train
from dpsim.kernels.allreduce.tree import slots
from dpsim.machine import AllreduceCost, Link, Machine, OverlapCost
from dpsim.model import alpha_beta, collective_cost
from dpsim.model.cost import overlapped_curve
from dpsim.model.points import default_algorithm
from dpsim.plan import Plan
from dpsim.records.train import TrainConfig

UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Largest relative error of one rounding of a normal number."""
DTYPES = st.sampled_from(SIXTEEN_BITS)
ALGORITHMS = ("two-shot", "one-shot", "mpi", "ring", "recursive-doubling", "halving-doubling", "direct", "hierarchical")
OnRanks = Callable[..., Any]


def awkward(random: np.random.Generator, elements: int) -> Array:
    """Float32 numbers of all sizes, among them ties, zeros of both signs and subnormal ones."""
    values = random.standard_normal(elements) * 2.0 ** random.integers(-30, 12, elements)
    ties = (random.integers(0, 2**12, elements) + 0.5) * 2.0 ** random.integers(-24, 3, elements)
    kind = random.integers(0, 4, elements)
    return np.select([kind == 0, kind == 1], [ties, np.copysign(0.0, values)], values).astype(np.float32)


def both_ways(values: Array, wire_dtype: str, scale: float = 1.0) -> Array:
    coded, back = np.empty(len(values), np.uint16), np.empty(len(values), np.float32)
    codes = Compression(wire_dtype, scale)
    codes.encode(values, coded)
    codes.decode(coded, back)
    return back


@pytest.mark.parametrize("wire_dtype", SIXTEEN_BITS)
def test_every_code_comes_back_and_every_number_goes_to_the_nearest_one(wire_dtype: str) -> None:
    codes = np.arange(2**16, dtype=np.uint16)
    kind = np.float16 if wire_dtype == "float16" else None
    exact = codes.view(kind).astype(np.float32) if kind else (codes.astype(np.uint32) << 16).view(np.float32)
    decoded, again = np.empty(2**16, np.float32), np.empty(2**16, np.uint16)
    Compression(wire_dtype).decode(codes, decoded)
    np.testing.assert_array_equal(decoded, exact)
    Compression(wire_dtype).encode(decoded, again)
    np.testing.assert_array_equal(again[~np.isnan(exact)], codes[~np.isnan(exact)])

    bits = np.random.default_rng(0).integers(0, 2**32, 300_000, dtype=np.uint32).view(np.float32)
    finite = exact[np.isfinite(exact)]
    middles = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    for values in (bits, middles, np.nextafter(middles, np.float32(np.inf)), np.nextafter(middles, np.float32(0))):
        expected = rounded(values, wire_dtype)
        actual = both_ways(values, wire_dtype)
        assert np.array_equal(
            actual.view(np.uint32)[~np.isnan(expected)], expected.view(np.uint32)[~np.isnan(expected)]
        )
        assert np.isnan(actual[np.isnan(values)]).all()


@settings(max_examples=150)
@given(
    size=st.integers(2, 9),
    elements=st.one_of(st.integers(0, 9), st.integers(0, 60)),
    wire_dtype=DTYPES,
    global_batch=st.sampled_from([1, 2, 3, 64, 65, 1000]),
    eager=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_direct_rounds_as_documented_to_the_bit_on_every_rank(
    size: int, elements: int, wire_dtype: str, global_batch: int, eager: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    data = [awkward(random, elements) for _ in range(size)]
    codes = compression(wire_dtype, np.dtype(np.float32), global_batch)
    assert codes is not None
    assert codes.scale == (2.0 ** -math.ceil(math.log2(global_batch)) if wire_dtype == "float16" else 1.0)
    expected = direct_sum(data, wire_dtype, codes.scale)
    box = Mailbox(size, eager=eager)
    run_together(lambda rank: prepare(box.ranks[rank], data[rank], "direct", codes).start(), size, seed)
    for mine in data:
        assert mine.tobytes() == expected.tobytes()


@settings(max_examples=150)
@given(
    layout=st.sampled_from(["1x2", "2x1", "3x1", "2x2", "1x4", "3x2", "2x3", "4x2"]),
    elements=st.integers(0, 60),
    wire_dtype=DTYPES,
    eager=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_hierarchical_rounds_only_what_goes_from_node_to_node(
    layout: str, elements: int, wire_dtype: str, eager: bool, seed: int
) -> None:
    size, nodes = parse_devices(layout)
    of_a_node = nodes.of_a_node
    random = np.random.default_rng(seed)
    data = [awkward(random, elements) for _ in range(size)]
    expected = hierarchical_sum(data, of_a_node, wire_dtype, 2.0**-5)
    box = Mailbox(size, eager=eager, devices_a_node=of_a_node)
    codes = Compression(wire_dtype, 2.0**-5)
    run_together(lambda rank: prepare(box.ranks[rank], data[rank], "hierarchical", codes).start(), size, seed)
    for mine in data:
        assert mine.tobytes() == expected.tobytes()


@settings(max_examples=150)
@given(
    algorithm=st.sampled_from(ALGORITHMS),
    size=st.integers(2, 8),
    extra=st.integers(0, 8),
    elements=st.integers(1, 120),
    wire_dtype=DTYPES,
    eager=st.booleans(),
    seed=st.integers(0, 2**32),
    of_a_node=st.sampled_from([1, 2, 3]),
)
def test_with_leaves_every_node_is_rounded_and_every_message_is_codes_by_every_algorithm(
    algorithm: str, size: int, extra: int, elements: int, wire_dtype: str, eager: bool, seed: int, of_a_node: int
) -> None:
    if algorithm != "hierarchical" or size % of_a_node:
        of_a_node = 1
    order = slots([rank * (size + extra) // size for rank in range(size + 1)])
    random = np.random.default_rng(seed)
    codes = Compression(wire_dtype, 2.0**-5 if wire_dtype == "float16" else 1.0)
    leaves = [rounded(awkward(random, elements), wire_dtype, codes.scale) for _ in order.owners]
    sent = []
    for sent_as in (None, codes):
        rows = [leaf.copy() for leaf in leaves]
        box = Mailbox(size, eager=eager, devices_a_node=of_a_node)

        def begin(rank: int) -> CollectiveSteps:
            own, *more = [rows[slot] for slot in order.of(rank)]  # noqa: B023
            unused = [np.full(elements, np.nan, np.float32)] * len(order.owners)
            return prepare(box.ranks[rank], own, algorithm, sent_as, SummationOrder(order, (*more, *unused))).start()  # noqa: B023

        run_together(begin, size, seed)
        sent.append([(t.sent_bytes, t.sent_messages) for t in box.ranks])
    expected = node_sum(order.tree, leaves, wire_dtype, codes.scale)
    for rank in range(size):
        assert rows[order.of(rank)[0]].tobytes() == expected.tobytes()
    assert sent[1] == [(size_bytes / 2, messages) for size_bytes, messages in sent[0]]


@settings(max_examples=100)
@given(size=st.integers(2, 9), elements=st.integers(1, 60), wire_dtype=DTYPES, seed=st.integers(0, 2**32))
def test_numbers_of_one_sign_are_off_by_two_roundings_at_most(
    size: int, elements: int, wire_dtype: str, seed: int
) -> None:
    random = np.random.default_rng(seed)
    data = [random.uniform(1e-3, 100.0, elements).astype(np.float32) for _ in range(size)]
    exact = np.sum(data, axis=0, dtype=np.float64)
    box = Mailbox(size, eager=False)
    run_together(
        lambda rank: prepare(box.ranks[rank], data[rank], "direct", Compression(wire_dtype)).start(), size, seed
    )
    bound = (1 + UNIT[wire_dtype]) ** 2 * (1 + 2.0**-24) ** (size - 1) - 1
    assert np.max(np.abs(data[0] - exact) / exact) <= bound


@pytest.mark.parametrize("wire_dtype", SIXTEEN_BITS)
@pytest.mark.parametrize(("algorithm", "layout"), [("direct", "4x1"), ("hierarchical", "4x1"), ("hierarchical", "2x3")])
def test_half_the_bytes_go_from_node_to_node(algorithm: str, layout: str, wire_dtype: str) -> None:
    size, nodes = parse_devices(layout)
    of_a_node = nodes.of_a_node
    sent = []
    for codes in (None, Compression(wire_dtype)):
        data = [np.ones(12 * size, np.float32) for _ in range(size)]
        box = Mailbox(size, eager=True, devices_a_node=of_a_node)
        run_together(lambda rank: prepare(box.ranks[rank], data[rank], algorithm, codes).start(), size, 0)  # noqa: B023
        assert len({t.across_bytes for t in box.ranks}) == 1
        sent.append((box.ranks[0].across_bytes, box.ranks[0].sent_bytes - box.ranks[0].across_bytes))
    (across, inside), (coded_across, coded_inside) = sent
    assert (coded_across, coded_inside) == (across / 2, inside)
    free, bytes_s = (Link(latency_s=0.0, bandwidth_bytes_per_s=rate) for rate in (math.inf, 1.0))
    asked = (algorithm, size, 48.0 * size, wire_dtype, nodes)
    own_links = Machine(name="m", link=bytes_s, link_in_node=free, emulated_network=True)
    assert collective_cost(own_links, *asked)[0] == pytest.approx(coded_across)
    if algorithm == "hierarchical":
        priced = collective_cost(Machine(name="m", link=free, link_in_node=bytes_s), *asked)[0]
        assert priced == pytest.approx(inside)


@pytest.mark.parametrize("wire_dtype", SIXTEEN_BITS)
def test_what_float16_cannot_hold_is_infinite_and_nan_stays_nan_on_every_rank(wire_dtype: str) -> None:
    data = [np.array([6e4, 3.4028235e38, np.nan, -np.inf, 1.0], np.float32) for _ in range(3)]
    box = Mailbox(3, eager=True)
    run_together(lambda rank: prepare(box.ranks[rank], data[rank], "direct", Compression(wire_dtype)).start(), 3, 0)
    for mine in data:
        assert mine[1] == np.inf and np.isnan(mine[2]) and mine[3] == -np.inf and mine[4] == 3
        assert (mine[0] == np.inf) == (wire_dtype == "float16")


def test_float16_carries_sums_over_a_batch_whose_mean_it_holds() -> None:
    """1000 samples with gradients of 500 each: their sum is far above 65504, their mean is not."""
    sums = np.full(4, 500.0 * 1000, np.float32)
    codes = compression("float16", sums.dtype, 1000)
    assert codes is not None and codes.scale == 2.0**-10
    np.testing.assert_array_equal(both_ways(sums, "float16", codes.scale), rounded(sums, "float16", codes.scale))
    np.testing.assert_allclose(both_ways(sums, "float16", codes.scale), sums, rtol=UNIT["float16"])
    assert np.isinf(both_ways(sums, "float16")).all()


@pytest.mark.parametrize("algorithm", ["mpi", "ring", "recursive-doubling", "halving-doubling"])
def test_an_algorithm_that_would_round_every_round_is_refused_without_leaves(algorithm: str) -> None:
    Plan(devices=2, global_batch=2, algorithm=algorithm, wire_dtype="float16", leaves=2, batch_norm="leaf")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"cannot send float16[\s\S]*direct, hierarchical"):
        Plan(devices=2, global_batch=2, algorithm=algorithm, wire_dtype="float16")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cannot send bfloat16"):
        prepare(Mailbox(2, eager=True).ranks[0], np.zeros(3, np.float32), algorithm, Compression("bfloat16"))


def test_only_float32_travels_as_something_else() -> None:
    assert compression(None, np.dtype(np.float64), 8) is None
    assert compression("float64", np.dtype(np.float64), 8) is None
    for name, dtype in (("float64", np.float32), ("float32", np.float64), ("float16", np.float64)):
        with pytest.raises(ConfigError, match=f"wire dtype {name} for gradients in {np.dtype(dtype).name}"):
            compression(name, np.dtype(dtype), 8)


def test_a_table_of_the_wire_dtype_is_taken_and_else_direct_costs_what_half_the_bytes_do() -> None:
    table = {"algorithm": "direct", "devices": 2, "sizes_bytes": (100, 200, 400), "time_s": (2.0, 3.0, 5.0)}
    own = AllreduceCost(wire_dtype="float16", **(table | {"time_s": (1.0, 1.5, 2.5)}))  # type: ignore[arg-type]
    beside = OverlapCost(overlap="thread", compute_loss_s=(0.0, 0.0, 0.0), **table)  # type: ignore[arg-type]
    machine = Machine(name="m", allreduce=(AllreduceCost(**table), own), overlap=(beside,))  # type: ignore[arg-type]
    assert collective_cost(machine, "direct", 2, 400) == (5.0, False)
    assert collective_cost(machine, "direct", 2, 400, "float16") == (2.5, False)
    assert collective_cost(machine, "direct", 2, 400, "bfloat16") == (3.0, True)
    assert alpha_beta(machine, "direct", 2) == pytest.approx((1.0, 0.01))
    assert alpha_beta(machine, "direct", 2, "float16") == pytest.approx((0.5, 0.005))
    assert alpha_beta(Machine(name="m", allreduce=(AllreduceCost(**table),)), "direct", 2, "float16") == pytest.approx(
        (1.0, 0.005)  # type: ignore[arg-type]
    )
    for name in ("ring", "auto"):  # with leaves a ring sends half the bytes; shared memory has no messages
        other = Machine(name="m", allreduce=(AllreduceCost(**table | {"algorithm": name}),))  # type: ignore[arg-type]
        assert collective_cost(other, name, 2, 400, "float16")[0] == (3.0 if name == "ring" else 5.0)
    curve, _ = overlapped_curve(machine, Collective(algorithm="direct", devices=2, wire_dtype="float16"), "thread")
    assert (curve.points[0, 1], curve.last_bytes) == (200.0, -1.0)
    assert [default_algorithm(machine, name) for name in (None, "float16")] == ["direct", "direct"]


def test_16_bits_between_processes_round_as_documented_under_every_mechanism(together: Callable[..., Any]) -> None:
    several = together(*(("ranks_comm:sixteen_bits", {}, devices) for devices in (1, 2, 3, 4)))
    for actual, ways in zip(several, (1, 2, 2, 3), strict=True):
        assert actual["wrong"] == []
        assert actual["cases"] == 4 * 2 * (1 + ways)


@pytest.mark.slow
def test_training_with_16_bits_on_the_wire_reaches_the_same_accuracy() -> None:
    results = {
        wire_dtype: train(
            TrainConfig.of(model="cnn", devices=2, epochs=4, algorithm="direct", wire_dtype=wire_dtype), lambda _: None
        )
        for wire_dtype in (None, *SIXTEEN_BITS)
    }
    assert len({result.digest for result in results.values()}) == 3
    exact = results[None].test_accuracy
    assert exact > 0.9
    for wire_dtype in SIXTEEN_BITS:
        assert abs(results[wire_dtype].test_accuracy - exact) <= 0.01
