"""What a message from one device to another costs: by a table, by an emulated link, or by the link of its level."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsim.collective import Collective, Layout
from dpsim.errors import ConfigError
from dpsim.machine import AllreduceCost, Link, Machine
from dpsim.model.cost import SEND_ALGORITHM, idle_curve, send_curve
from dpsim.model.curve import at
from dpsim.model.uncertainty import _network
from dpsim.uncertainty import ASSUMED_LINK

SIZES = st.sets(st.integers(1, 2**24), min_size=1, max_size=6).map(sorted)


def machine(**fields: Any) -> Machine:
    return Machine(name="m", **fields)


def sends(layout: str = "", **fields: Any) -> AllreduceCost:
    known = {"sizes_bytes": (8, 1024), "time_s": (1e-5, 2e-5)} | fields
    return AllreduceCost(algorithm=SEND_ALGORITHM, devices=2, layout=layout, kind="send", **known)


def send(layout: str = "") -> Collective:
    return Collective(algorithm=SEND_ALGORITHM, devices=2, layout=Layout(layout), kind="send")


@given(sizes=SIZES, first_s=st.floats(1e-6, 1e-3), rises=st.lists(st.floats(0, 1e-3), min_size=6, max_size=6))
def test_a_table_is_met_at_its_sizes_and_costs_never_fall(sizes: list[int], first_s: float, rises: list[float]) -> None:
    time_s = tuple(first_s + sum(rises[: number + 1]) for number in range(len(sizes)))
    curve = send_curve(machine(halves=(sends(sizes_bytes=tuple(sizes), time_s=time_s),)))
    met = [at(curve.points, 1, float(size)) for size in sizes]
    assert met == pytest.approx(time_s, rel=1e-12)
    assert (curve.first_bytes, curve.last_bytes) == (sizes[0], sizes[-1])
    asked = [at(curve.points, 1, size) for size in sorted([1.0, *map(float, sizes), 3.0e4, 5.0e7])]
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(asked))


def test_an_emulated_link_is_exact_between_nodes_and_is_not_that_of_a_node() -> None:
    link, in_node = Link(latency_s=9.0, bandwidth_bytes_per_s=1.0), Link(latency_s=2e-6, bandwidth_bytes_per_s=1e9)
    paced = machine(network="paced:1ms,8mbit", emulated_network=True, link=link, link_in_node=in_node)
    for layout in map(Layout, ("", "2x1")):
        curve = send_curve(paced, layout)
        assert at(curve.points, 1, 5e6) == pytest.approx(1e-3 + 5.0)
        assert curve.first_bytes <= 1 and curve.last_bytes >= 1e12
        assert _network(paced, send(layout)) == 0.0
    assert at(send_curve(paced, Layout("1x2")).points, 1, 1e9) == pytest.approx(2e-6 + 1.0)


def test_a_table_of_the_same_level_stands_for_a_layout_without_one() -> None:
    inside, across = sends("1x2", relative_uncertainty=0.03), sends("2x1", time_s=(1e-3, 2e-3))
    both = machine(halves=(inside, across), cores=4)
    assert at(send_curve(both).points, 1, 8.0) == at(send_curve(both, Layout("1x2")).points, 1, 8.0) == 1e-5
    assert at(send_curve(both, Layout("2x1")).points, 1, 8.0) == 1e-3
    assert _network(both, send()) == 0.03


def test_without_a_table_the_link_of_the_level_says_it_as_an_extrapolation() -> None:
    link = Link(latency_s=1e-5, bandwidth_bytes_per_s=1e8, message_overhead_s=1e-5)
    known = machine(link=link, link_in_node=Link(latency_s=1e-6, bandwidth_bytes_per_s=1e10))
    curve = send_curve(known, Layout("2x1"))
    assert at(curve.points, 1, 1e6) == pytest.approx(2e-5 + 1e-2)
    assert curve.first_bytes > curve.last_bytes
    assert at(idle_curve(known, send("1x2")).points, 1, 1e6) == pytest.approx(1e-6 + 1e-4)
    assert _network(known, send("2x1")) == ASSUMED_LINK


def test_a_machine_that_says_nothing_of_messages_is_refused() -> None:
    table = AllreduceCost(algorithm="ring", devices=2, sizes_bytes=(8,), time_s=(1e-5,))
    with pytest.raises(ConfigError, match="what a message between 2 devices costs"):
        send_curve(machine(allreduce=(table,)))
    of_a_node = machine(allreduce=(table,), cores=2, link=Link(latency_s=0, bandwidth_bytes_per_s=1, fitted_to="ring"))
    with pytest.raises(ConfigError, match="was calibrated on one"):
        send_curve(of_a_node, Layout("2x1"))
    with pytest.raises(ConfigError, match="allowed"):
        AllreduceCost(algorithm=SEND_ALGORITHM, devices=4, sizes_bytes=(8,), time_s=(1e-5,), kind="send")
