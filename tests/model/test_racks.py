"""Three levels of network: devices in a node, nodes in a rack, racks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from small_step import workload

from dpsim.cli.readers import counts_or_layouts
from dpsim.collective import Collective, Layout
from dpsim.errors import ConfigError
from dpsim.machine import AllreduceCost, Link, Machine
from dpsim.model import predict_points
from dpsim.model.cost import idle_curve
from dpsim.model.uncertainty import _network
from dpsim.setting import Grid
from dpsim.uncertainty import ASSUMED_LINK

GIB = 2.0**30
NODE, RACK, RACKS = (
    Link(latency_s=us * 1e-6, bandwidth_bytes_per_s=rate) for us, rate in ((1.0, 1e11), (5.0, 4e10), (20.0, 1e10))
)
THREE = Machine(name="m", link_in_node=NODE, link=RACK, nodes_per_rack=4, link_between_racks=RACKS)
TWO = Machine(name="m", link_in_node=NODE, link=RACK)


def seconds(machine: Machine, nodes: int, algorithm: str = "ring", size: float = GIB) -> float:
    collective = Collective(algorithm=algorithm, devices=8 * nodes, layout=Layout(f"{nodes}x8"))
    sizes, times = idle_curve(machine, collective).points
    return float(times[0]) if size == 0 else float((times[-1] - times[-2]) / (sizes[-1] - sizes[-2]) * size)


@pytest.mark.parametrize("algorithm", ["ring", "nccl", "hierarchical"])
def test_beyond_a_rack_the_slowest_link_paces_a_collective(algorithm: str) -> None:
    assert seconds(THREE, 4, algorithm) == seconds(TWO, 4, algorithm)
    slow = msgspec.structs.replace(TWO, link=RACKS)
    assert seconds(THREE, 8, algorithm) == seconds(slow, 8, algorithm) > seconds(TWO, 8, algorithm)
    assert seconds(THREE, 8, algorithm, 0) == seconds(slow, 8, algorithm, 0) > seconds(TWO, 8, algorithm, 0)
    assert seconds(THREE, 1, algorithm) == seconds(TWO, 1, algorithm)


def test_a_ring_over_racks_is_that_of_its_formula() -> None:
    n = 64
    assert seconds(THREE, 8) == pytest.approx(2 * (n - 1) / n * GIB / 1e10)
    assert seconds(THREE, 8, size=0) == pytest.approx(2 * (n - 1) * 20e-6)


def test_a_rack_that_is_faster_than_a_link_changes_nothing() -> None:
    fast = msgspec.structs.replace(THREE, link_between_racks=NODE)
    assert seconds(fast, 8) == seconds(TWO, 8) and seconds(fast, 8, size=0) == seconds(TWO, 8, size=0)


def test_a_table_of_one_rack_is_slower_beyond_it_by_as_much_as_the_links() -> None:
    table = AllreduceCost(
        algorithm="ring",
        devices=32,
        layout="4x8",
        sizes_bytes=(1024, 2**30),
        time_s=(1e-3, 1.0),
        relative_uncertainty=0,
    )
    known = {"allreduce": (table,)}
    three, two = (msgspec.structs.replace(machine, **known) for machine in (THREE, TWO))
    assert seconds(three, 2) == seconds(two, 2)
    assert seconds(three, 8) == pytest.approx(4 * seconds(two, 8), rel=1e-3)  # 40 over 10 GB/s
    collective = Collective(algorithm="ring", devices=64, layout=Layout("8x8"))
    assert _network(three, collective) ** 2 == pytest.approx(_network(two, collective) ** 2 + ASSUMED_LINK**2)


@pytest.mark.parametrize("changes", [{"nodes_per_rack": None}, {"link_between_racks": None}, {"nodes_per_rack": 0}])
def test_racks_need_their_size_and_their_link(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="nodes_per_rack"):
        msgspec.structs.replace(THREE, **changes)
    table = AllreduceCost(algorithm="ring", devices=2, sizes_bytes=(64,), time_s=(1e-5,))
    with pytest.raises(
        ConfigError, match=r"and no \[link\]\n[\s\S]*leave nodes_per_rack and \[link_between_racks\] out"
    ):
        Machine(name="m", allreduce=(table,), nodes_per_rack=2, link_between_racks=RACKS)


def test_nodes_double_up_to_a_number() -> None:
    assert counts_or_layouts("1x8..6x8") == ("1x8", "2x8", "4x8", "6x8")
    for text in ("1x8..4x4", "8..4x8", "4x8..1x8"):
        with pytest.raises(ConfigError, match="--devices is"):
            counts_or_layouts(text)


def test_efficiency_falls_where_racks_begin() -> None:
    counts = counts_or_layouts("1x8..12500x8")
    for machine, falls in ((THREE, True), (TWO, False)):
        points, _ = predict_points(
            workload(), machine, Grid.of(devices=counts, fusion_threshold_bytes=0.0, local_batch=4, algorithm="ring")
        )
        cost_s = {point["layout"]: point["predicted_communication_cost_s"] for point in points}
        assert len(points) == len(counts) and points[-1]["devices"] == 100_000
        assert (cost_s["8x8"] > 3 * cost_s["4x8"]) == falls
