"""Strategy zero3 with replicas in the model: shards in a node, their sums between nodes, and where that is advised."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from small_step import plan, workload

from dpsim.collective import Layout
from dpsim.machine import Link, Machine
from dpsim.model import memory, predict
from dpsim.model.cost import cost
from dpsim.optimizer import AdamW
from dpsim.plan import Plan
from dpsim.strategy import Zero3

INSIDE, BETWEEN = Link(latency_s=1e-2, bandwidth_bytes_per_s=1e4), Link(latency_s=1e-1, bandwidth_bytes_per_s=1e3)


def nodes(**changes: Any) -> Machine:
    """Nodes whose devices are ten times as close to each other as the nodes."""
    return Machine(name="m", link=BETWEEN, link_in_node=INSIDE, **changes)


def replicated(layout: str = "2x4", strategy: str = "zero3:prefetch=0,replicas=2", **changes: Any) -> Plan:
    of = Layout(layout)
    devices = of.nodes * of.of_a_node
    fields = {"devices": devices, "layout": of, "global_batch": 4 * devices, "algorithm": "ring"}
    return plan(strategy=strategy, **fields | changes)


def exposed_s(machine: Machine, of: Plan) -> float:
    """Two units of 400 bytes: three gathers, two reduce-scatters, two allreduces of shards, and the agreement."""
    halves = 2 * 3 * 1e-2 / 2 + 400 * 3 / 4 / 1e4  # of 4 devices in a node
    shared = 1 if machine.emulated_network else 4 / min(machine.network_adapters or 1, 4)
    between = 2 * 1e-1 + 100 * shared / 1e3
    return 5 * halves + 2 * between + cost(machine, of.of_all_data, 8)[0]


@pytest.mark.parametrize("changes", [{}, {"network_adapters": 4}, {"network_adapters": 2}, {"emulated_network": True}])
def test_shards_stay_in_a_node_and_their_sums_share_what_joins_the_nodes(changes: dict[str, Any]) -> None:
    machine, of = nodes(**changes), replicated()
    predicted = predict(workload(), machine, of)
    assert predicted.exposed_communication_s == pytest.approx(exposed_s(machine, of))
    assert predicted.step_s == pytest.approx(0.5 + 3 + 6 + 1 / 4 + exposed_s(machine, of))
    whole = predict(workload(), machine, replicated(strategy="zero3:prefetch=0"))
    assert whole.step_s > predicted.step_s


def test_beside_backward_the_sums_of_shards_are_hidden_too() -> None:
    plans = (replicated(strategy="zero3:replicas=2", overlap=overlap) for overlap in ("off", "thread"))
    serial, beside = (predict(workload(), nodes(), each) for each in plans)
    assert beside.step_s < serial.step_s and beside.exposed_communication_s < serial.exposed_communication_s


def test_a_device_keeps_a_shard_of_its_replica() -> None:
    texts = ("zero3:replicas=2", "zero3")
    plans = (msgspec.structs.replace(replicated(strategy=text), optimizer=AdamW()) for text in texts)
    parts = [memory(workload(), each, nodes()) for each in plans]
    assert [each.optimizer_state for each in parts] == [2 * 2 * 128, 2 * 2 * 64], "shards of whole cache lines"


def test_several_replicas_are_compared_where_there_are_several_nodes() -> None:
    assert {each.replicas for each in Zero3.candidates(8, 2, 4, 1)} == {1, 2}
    assert {each.replicas for each in Zero3.candidates(8, 1, 4, 1)} == {1}
    assert {each.replicas for each in Zero3.candidates(4, 4, 4, 1)} == {1}, "one device a node has no shards"
