"""zero1:gather=broadcast in the model: allreduces overlap, the update is the largest share's, broadcasts follow it."""

from __future__ import annotations

import pytest
from small_step import machine, plan, workload

from dpsim.collective import Collective, Layout
from dpsim.errors import ConfigError
from dpsim.lowering import lower
from dpsim.lowering.zero1 import owners
from dpsim.machine import AllreduceCost, Link, Machine
from dpsim.model import memory, predict
from dpsim.model.cost import idle_curve
from dpsim.model.curve import at
from dpsim.schedule import ALLREDUCE_EVENT, BROADCAST_EVENT, UPDATE_EVENT
from dpsim.strategy import parse_strategy

STRATEGY = "zero1:gather=broadcast"


def test_a_table_of_broadcasts_prices_each_tensor_behind_half_of_the_update() -> None:
    table = AllreduceCost(algorithm="mpi", devices=2, sizes_bytes=(100, 400), time_s=(0.25, 0.75), kind="broadcast")
    step = predict(workload(), machine(halves=(table,)), plan(strategy=STRATEGY, algorithm="mpi"))
    assert step.step_s == pytest.approx(0.5 + 3 + 6 + 2 * 5 + 1 / 2 + 2 * 0.75)
    assert not step.extrapolated


def test_without_a_table_a_broadcast_costs_half_of_the_allreduce() -> None:
    step = predict(workload(), machine(), plan(strategy=STRATEGY, algorithm="mpi"))
    assert step.step_s == pytest.approx(0.5 + 3 + 6 + 2 * 5 + 1 / 2 + 2 * 5 / 2)


@pytest.mark.parametrize(("devices", "rounds"), [(2, 1), (3, 2), (4, 2), (8, 3)])
def test_by_a_link_a_broadcast_is_messages_along_a_tree(devices: int, rounds: int) -> None:
    by_link = Machine(name="m", link=Link(latency_s=1e-3, bandwidth_bytes_per_s=1e6))
    curve = idle_curve(by_link, Collective(algorithm="ring", devices=devices, kind="broadcast"))
    seconds = at(curve.points, 1, 2e6)
    assert seconds == pytest.approx(rounds * (1e-3 + 2.0))


def test_an_emulated_link_prices_broadcasts_between_nodes() -> None:
    emulated = Machine(name="m", link=Link(latency_s=1e-3, bandwidth_bytes_per_s=1e6), network="paced:1ms,8mbit")
    layout = Layout("4x1")
    curve = idle_curve(emulated, Collective(algorithm="ring", devices=4, layout=layout, kind="broadcast"))
    assert curve.points[1, 0] == pytest.approx(2e-3)


def test_the_largest_tensor_goes_first_to_the_rank_with_the_least() -> None:
    assert owners([480, 16, 144, 9, 27, 3], 2) == (0, 1, 1, 1, 1, 1)
    assert owners([5, 5, 5, 1], 2) == (0, 1, 0, 1)
    assert owners([1, 2], 4) == (1, 0)


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_broadcasts_follow_the_update_rank_by_rank_and_memory_is_that_of_the_largest_share(devices: int) -> None:
    of_step = plan(strategy=STRATEGY, devices=devices, global_batch=4 * devices, algorithm="mpi")
    schedule = lower(workload(), of_step)
    kinds = schedule.kind.tolist()
    if devices == 1:
        assert BROADCAST_EVENT not in kinds
        return
    update = kinds.index(UPDATE_EVENT)
    assert kinds[update + 1 :] == [BROADCAST_EVENT] * 2 and kinds.count(ALLREDUCE_EVENT) == 2
    assert [schedule.dependencies(each).tolist() for each in range(update + 1, len(kinds))] == [[update]] * 2
    assert schedule.owners == (0, 1) and schedule.broadcast_tensors == [0, 1]
    table = AllreduceCost(algorithm="mpi", devices=devices, sizes_bytes=(100, 400), time_s=(1.0, 1.0))
    assert memory(workload(), of_step, Machine(name="m", allreduce=(table,))).optimizer_state == 400


def test_another_gather_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="gather=bcast") as error:
        parse_strategy("zero1:gather=bcast")
    assert "gather=all-gather or broadcast" in str(error.value)
