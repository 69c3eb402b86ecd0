"""The hierarchical allreduce on many layouts: exact sums, the same bits everywhere, the bytes of each level."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_transport import Mailbox, random_whole, run_together

from dpsim.collective import Collective, Layout, parse_devices
from dpsim.comm.allreduce import prepare
from dpsim.errors import ConfigError
from dpsim.machine import Link, Machine
from dpsim.model import collective_cost, predict_points
from dpsim.model.formulas import rounds
from dpsim.plan import Plan
from dpsim.setting import Grid
from dpsim.workload import Layer, Tensor, Workload

LAYOUTS = [*map(Layout, ("1x1", "1x2", "2x1", "1x3", "3x1", "2x2", "1x4", "3x2", "2x3", "4x2", "2x4", "8x1"))]


def mailbox(layout: Layout, *, eager: bool) -> tuple[int, Mailbox]:
    devices, _ = parse_devices(layout)
    return devices, Mailbox(devices, eager=eager, devices_a_node=layout.of_a_node)


@settings(max_examples=200)
@given(
    layout=st.sampled_from(LAYOUTS),
    elements=st.one_of(st.integers(0, 9), st.integers(0, 60)),
    dtype=st.sampled_from(["float32", "float64"]),
    eager=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_sums_are_exact_in_any_layout_whatever_the_order_of_messages(
    layout: str, elements: int, dtype: str, eager: bool, seed: int
) -> None:
    size, box = mailbox(layout, eager=eager)
    data = random_whole(size, elements, dtype, seed)
    expected = np.sum(data, axis=0, dtype=dtype)
    run_together(lambda rank: prepare(box.ranks[rank], data[rank], "hierarchical").start(), size, seed)
    for mine in data:
        np.testing.assert_array_equal(mine, expected)
    assert all(len(box.sent[pair]) == number for pair, number in box.asked.items()), "a message was never received"


@settings(max_examples=100)
@given(layout=st.sampled_from(LAYOUTS), elements=st.integers(1, 50), seed=st.integers(0, 2**32))
def test_every_rank_holds_the_same_bits(layout: str, elements: int, seed: int) -> None:
    size, box = mailbox(layout, eager=False)
    random = np.random.default_rng(seed)
    data = [random.standard_normal(elements).astype("float32") for _ in range(size)]
    expected = np.sum(data, axis=0, dtype="float64")
    run_together(lambda rank: prepare(box.ranks[rank], data[rank], "hierarchical").start(), size, seed)
    assert len({mine.tobytes() for mine in data}) == 1
    np.testing.assert_allclose(data[0], expected, rtol=0, atol=size * 4 * np.finfo("float32").eps)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_messages_and_rounds_of_each_level_are_those_of_the_models_formula(layout: Layout) -> None:
    size, box = mailbox(layout, eager=True)
    nodes, of_a_node = layout.counts(size)
    data = random_whole(size, 12 * size, "float32", 0)
    size_bytes = data[0].nbytes
    counts = run_together(lambda rank: prepare(box.ranks[rank], data[rank], "hierarchical").start(), size, 0)
    if size == 1:
        return
    assert counts == [rounds(Collective(algorithm="hierarchical", devices=size, layout=layout))] * size
    bytes_s, message_s = (
        {"latency_s": 0.0, "bandwidth_bytes_per_s": 1.0},
        {
            "latency_s": 1.0,
            "bandwidth_bytes_per_s": math.inf,
        },
    )
    free = Link(latency_s=0.0, bandwidth_bytes_per_s=math.inf)

    def priced(across: Link, inside: Link) -> float:
        machine = Machine(name="m", link=across, link_in_node=inside)
        return collective_cost(machine, "hierarchical", size, size_bytes, layout=layout)[0]

    for t in box.ranks:
        assert t.across_bytes == 2 * (nodes - 1) * (size_bytes // size)
        assert t.sent_bytes - t.across_bytes == 2 * (of_a_node - 1) * (size_bytes // of_a_node)
        assert priced(Link(**bytes_s), free) == pytest.approx(of_a_node * t.across_bytes)  # a node's devices share it
        assert priced(free, Link(**bytes_s)) == pytest.approx(t.sent_bytes - t.across_bytes)
        assert priced(Link(**message_s), free) == t.across_messages
        assert priced(free, Link(**message_s)) == t.sent_messages - t.across_messages


def test_without_a_link_in_the_node_the_one_link_is_everywhere_and_sums_cost_their_gamma() -> None:
    link = Link(latency_s=1.0, bandwidth_bytes_per_s=10.0, reduce_s_per_byte=0.01)
    machine = Machine(name="m", link=link)
    cost, _ = collective_cost(machine, "hierarchical", 8, 800, layout=Layout("2x4"))
    inside = 6 * 1.0 + 2 * 600 / 10 + 600 * 0.01
    across = 2 * 1.0 + 4 * 2 * 100 / 10 + 100 * 0.01
    assert cost == pytest.approx(inside + across)
    own_links = Machine(name="m", link=link, emulated_network=True)
    assert collective_cost(own_links, "hierarchical", 8, 800, layout=Layout("2x4"))[0] == pytest.approx(cost - 3 * 20)
    assert collective_cost(machine, "hierarchical", 8, 800, layout=Layout("8x1")) == collective_cost(
        machine, "direct", 8, 800
    )
    fast = Machine(name="m", link=link, link_in_node=Link(latency_s=0.0, bandwidth_bytes_per_s=1e3))
    assert collective_cost(fast, "ring", 4, 800, layout=Layout("1x4"))[0] == pytest.approx(2 * 0.75 * 0.8)
    assert collective_cost(fast, "ring", 4, 800, layout=Layout("2x2")) == collective_cost(fast, "ring", 4, 800)


def test_a_slow_link_between_nodes_makes_the_hierarchy_the_faster_one() -> None:
    layers = (Layer(name="a", forward_s=(1e-3,), backward_s=(1e-3,), tensors=(Tensor(name="w", shape=(2**20,)),)),)
    workload = Workload(name="w", local_batches=(4,), layers=layers)
    slow, fast = (Link(latency_s=1e-6, bandwidth_bytes_per_s=rate) for rate in (1e8, 1e10))
    machine = Machine(name="m", link=slow, link_in_node=fast)
    steps = {}
    for algorithm in ("ring", "hierarchical"):
        (point,), summary = predict_points(
            workload, machine, Grid.of(devices="2x4", algorithm=algorithm, global_batch=32)
        )
        assert (point["devices"], point["layout"], summary["best"][0]["layout"]) == (8, "2x4", "2x4")
        steps[algorithm] = point["predicted_step_s"]
    assert steps["hierarchical"] < 0.6 * steps["ring"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"devices": 8, "layout": "2x3"}, "layout 2x3 is 6 devices, and devices is 8"),
        ({"devices": 8, "layout": "8"}, "layout is '8'"),
        ({"devices": 8, "layout": "2x4x1"}, "layout is '2x4x1'"),
        ({"devices": 8, "algorithm": "hierarchical"}, "on the flat layout 8"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match="layout") as caught:
        Plan(global_batch=8, **fields)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_devices_are_read_as_a_number_or_a_layout() -> None:
    assert [parse_devices(token) for token in (8, "8", "2x4", "1x1")] == [(8, ""), (8, ""), (8, "2x4"), (1, "1x1")]
    for token in (0, -1, "two", "2x", "0x2", "2X4", "", "02x4"):
        with pytest.raises(ConfigError, match="devices is"):
            parse_devices(token)
    assert Plan(devices=1, global_batch=1, algorithm="hierarchical").devices_a_node == 1
    assert Plan(devices=8, global_batch=8, layout="2x4").devices_a_node == 4
