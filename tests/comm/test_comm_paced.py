"""The emulated link: never early, its own and the receiver's bandwidth shared by what comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dpsim.errors import ConfigError
from dpsim.records.train import TrainConfig

NETWORK, LATENCY_S, BANDWIDTH = "paced:200us,200mbit", 200e-6, 25e6
SMALL, LONG = 8, 125_000  # bytes; the long one is 5 ms on the link
LONG_S = LONG / BANDWIDTH
OnRanks = Callable[..., Any]


@pytest.fixture(scope="module")
def one_way() -> dict[str, Any]:
    """Messages over one link, when they came: started once."""
    return {}


@pytest.fixture
def actual(one_way: dict[str, Any], on_ranks: OnRanks) -> dict[str, Any]:
    if not one_way:
        argument = {"network": NETWORK, "sizes_bytes": [SMALL, LONG], "repeats": 15}
        one_way.update(on_ranks("ranks_paced:one_way", argument, devices=2))
    return one_way


@pytest.mark.parametrize(("row", "size"), [(0, SMALL), (1, LONG)])
def test_no_message_takes_less_than_latency_and_size_over_bandwidth(
    row: int, size: int, actual: dict[str, Any]
) -> None:
    assert min(actual["took_s"][row]) >= LATENCY_S + size / BANDWIDTH


def test_two_messages_at_once_take_two_transmissions(actual: dict[str, Any]) -> None:
    first, second = np.min(actual["back_to_back_s"], axis=0)
    assert first >= LATENCY_S + LONG_S and second >= LATENCY_S + 2 * LONG_S


def test_mpis_own_allreduce_is_refused_by_the_link(actual: dict[str, Any]) -> None:
    assert actual["refused"]


def test_messages_share_a_link_and_a_late_look_at_one_does_not_delay_the_next(on_ranks: OnRanks) -> None:
    """Exactly, on a clock that the test sets: a message is due when the sender's and the receiver's links are free."""
    actual = on_ranks("ranks_paced:on_a_set_clock", {"network": NETWORK, "size_bytes": LONG}, devices=3)
    one_after_the_other_s = pytest.approx([LATENCY_S + LONG_S, LATENCY_S + 2 * LONG_S])
    assert actual == dict.fromkeys(("in time", "late", "two senders"), one_after_the_other_s)


def test_in_a_layout_only_messages_between_nodes_are_held_to_the_link(on_ranks: OnRanks) -> None:
    argument = {"network": NETWORK, "size_bytes": LONG, "repeats": 5}
    actual = on_ranks("ranks_paced:nodes", argument, devices=4)
    assert actual["wrong"] == []
    assert min(actual["across_s"]) >= LATENCY_S + LONG_S, "a message between nodes came early"
    assert actual["due"] == [False, True], "inside a node, across nodes"


def test_every_point_to_point_algorithm_gives_the_sum(together: OnRanks) -> None:
    assert together(*(("ranks_paced:sums", {"network": NETWORK}, devices) for devices in (2, 3, 4))) == [[]] * 3


def test_the_link_is_kept_beside_a_backward(on_ranks: OnRanks) -> None:
    argument = {"network": NETWORK, "sizes_bytes": [SMALL, LONG], "repeats": 10}
    took_s = on_ranks("ranks_paced:beside_a_backward", argument, devices=2)
    assert len(took_s) == 2 * len((SMALL, LONG))
    for case, fastest_s in took_s.items():
        due_s = LATENCY_S + int(case.split()[0]) / BANDWIDTH
        assert fastest_s >= due_s, f"a message of {case} came early"


def test_training_with_mpis_own_allreduce_is_refused_on_an_emulated_network(dpsim: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="hides its messages"):
        TrainConfig.of(devices=2, network=NETWORK, algorithm="mpi")
    code, _, said = dpsim("train", "--devices", 2, "--network", NETWORK, "--algorithm", "mpi", "--model", "mlp:8")
    assert code == 2
    assert "hides its messages" in said and "ring" in said
