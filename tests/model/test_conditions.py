"""What conditions of a shaped network make of a machine that was calibrated without them."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from dpsim.collective import Collective
from dpsim.machine import AllreduceCost, Machine
from dpsim.model.conditions import on_network, seconds_a_byte
from dpsim.model.cost import idle_curve
from dpsim.network import Network

RATE = 12.5e6
"""Bytes a second of 100 Mbit/s."""


def network(*conditions: str, hosts: int = 8) -> Network:
    return Network.parse("+".join([f"shaped:{hosts}x100mbit", *conditions]))


def times_the_wire(algorithm: str, devices: int, *conditions: str) -> float:
    """Seconds for each byte, in those that a link needs for a byte at its full rate."""
    return seconds_a_byte(network(*conditions), Collective(algorithm=algorithm, devices=devices)) * RATE


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("algorithm", ["ring", "direct", "halving-doubling"])
def test_each_host_sends_the_fewest_bytes_there_can_be(algorithm: str, devices: int) -> None:
    assert times_the_wire(algorithm, devices) == pytest.approx(2 * (devices - 1) / devices)


def test_recursive_doubling_sends_everything_in_each_round() -> None:
    assert [times_the_wire("recursive-doubling", devices) for devices in (2, 4, 8)] == pytest.approx([1, 2, 3])


@pytest.mark.parametrize("condition", ["slow-host=50%", "background=50%", "rate=50mbit"])
def test_half_a_rate_takes_twice_as_long(condition: str) -> None:
    for algorithm in ("ring", "direct", "halving-doubling", "recursive-doubling"):
        assert times_the_wire(algorithm, 4, condition) == pytest.approx(2 * times_the_wire(algorithm, 4))


def test_an_uplink_delays_what_crosses_it_alone() -> None:
    """Over a link of half a host's rate a ring sends one chunk in each direction; halving sends half of all data."""
    assert times_the_wire("ring", 4, "oversubscribed=8") == pytest.approx(times_the_wire("ring", 4))  # one half
    assert times_the_wire("ring", 8, "oversubscribed=8") == pytest.approx(2 * times_the_wire("ring", 8))
    assert times_the_wire("halving-doubling", 8, "oversubscribed=8") == pytest.approx(2 * 4 * 0.5 * 2 + 2 * 0.375)


@pytest.mark.parametrize("kind", ["reduce-scatter", "all-gather", "send", "broadcast", "ordered-sum", "copy"])
def test_every_kind_of_collective_has_a_price(kind: Any) -> None:
    collective = Collective(algorithm="ring", devices=2, kind=kind)
    plain, slow = (seconds_a_byte(network(*more), collective) for more in ((), ("slow-host=25%",)))
    assert slow == pytest.approx(4 * plain)


def machine(*tables: AllreduceCost) -> Machine:
    return Machine(name="made up", network="shaped:8x100mbit", emulated_network=True, allreduce=tables, cores=2)


def table(devices: int, **more: Any) -> AllreduceCost:
    wire = 2 * (devices - 1) / devices / RATE
    sizes = (4, 2**16, 2**20)
    return AllreduceCost(
        algorithm="ring",
        devices=devices,
        sizes_bytes=sizes,
        time_s=tuple(1e-4 * devices + wire * (size - 4) for size in sizes),
        relative_uncertainty=0.01,
        **more,
    )


def seconds(of: Machine, devices: int, size: int) -> float:
    points = idle_curve(of, Collective(algorithm="ring", devices=devices)).points
    return float(next(time for each, time in points.T if each == size))


def test_without_conditions_nothing_changes() -> None:
    for plain in (Network(), Network.parse("paced:50us,1gbit"), network()):
        assert on_network(machine(table(2)), plain) == machine(table(2))


def test_the_wire_is_slower_and_what_it_does_not_take_stays() -> None:
    changed = on_network(machine(table(2), table(8)), network("slow-host=50%"))
    assert changed.network == "shaped:8x100mbit+slow-host=50%"
    for devices in (2, 8):
        before = machine(table(2), table(8))
        wire_s = seconds_a_byte(network(), Collective(algorithm="ring", devices=devices))
        for size in (4, 2**20):
            longer_s = seconds(changed, devices, size) - seconds(before, devices, size)
            assert longer_s == pytest.approx(min(size * wire_s, seconds(before, devices, size)))


def test_the_uplink_counts_on_devices_that_no_table_covers() -> None:
    """Four of eight hosts are behind one switch, so that their table alone says nothing of the link between two."""
    before = machine(table(2), table(4))
    changed = on_network(before, network("oversubscribed=8"))
    assert seconds(changed, 4, 2**20) == pytest.approx(seconds(before, 4, 2**20))
    assert seconds(changed, 8, 2**20) == pytest.approx(2 * seconds(before, 8, 2**20), rel=0.05)


def test_a_delay_counts_for_each_round() -> None:
    changed = on_network(machine(table(4)), network("delay=1ms"))
    assert seconds(changed, 4, 4) == pytest.approx(4e-4 + 6e-3)


def test_conditions_are_in_doubt() -> None:
    (before, changed) = (on_network(machine(table(8)), network(*more)) for more in ((), ("slow-host=25%",)))
    doubts = [each.allreduce[0].relative_uncertainty or 0.0 for each in (before, changed)]
    assert doubts[1] > doubts[0]


@dataclasses.dataclass
class _Case:
    algorithm: str
    devices: int


@given(
    st.builds(
        _Case,
        algorithm=st.sampled_from(["ring", "direct", "halving-doubling", "recursive-doubling"]),
        devices=st.integers(2, 8),
    ),
    st.integers(1, 99),
)
def test_no_condition_makes_anything_faster(case: _Case, percent: int) -> None:
    collective = Collective(algorithm=case.algorithm, devices=case.devices)
    plain = seconds_a_byte(network(), collective)
    for condition in (f"slow-host={percent}%", f"background={percent}%", f"oversubscribed={1 + percent}"):
        assert seconds_a_byte(network(condition), collective) >= plain * (1 - 1e-12)


def test_the_machine_keeps_what_conditions_do_not_touch() -> None:
    before = msgspec.structs.replace(machine(table(8)), memory_bytes=5e9, wake_s=1e-4)
    changed = on_network(before, network("background=30%"))
    assert (changed.memory_bytes, changed.wake_s, changed.cores) == (5e9, 1e-4, 2)
