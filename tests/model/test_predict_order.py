"""What the fixed order of addition makes an allreduce cost, against messages that are followed one by one."""

from __future__ import annotations

import msgspec
import pytest
from small_step import plan, workload

from dpsim.comm.message_steps import transmission
from dpsim.data.sharding import device_leaves
from dpsim.kernels.allreduce.tree import slots
from dpsim.machine import Link, Machine
from dpsim.model import predict
from dpsim.plan import Plan

SLOW, FAST = (Link(latency_s=0.001, bandwidth_bytes_per_s=rate) for rate in (1e6, 1e18))
FLAT = Machine(name="wires", emulated_network=True, link=SLOW)


def exposed(leaves: int, devices: int, algorithm: str, of: Machine = FLAT) -> float:
    given = plan(
        devices=devices,
        global_batch=24,
        leaves=leaves,
        algorithm=algorithm,
        overlap="off",
        fusion_rule="one",
        batch_norm=Plan.default_batch_norm(leaves),
    )
    return predict(workload(), of, given).exposed_communication_s


@pytest.mark.parametrize("algorithm", ["ring", "direct", "halving-doubling", "auto"])
@pytest.mark.parametrize(("devices", "leaves"), [(2, 2), (2, 3), (3, 3), (3, 8), (4, 4), (4, 6), (4, 8)])
def test_an_allreduce_along_the_tree_costs_what_its_messages_take(algorithm: str, devices: int, leaves: int) -> None:
    """What grows with the bytes is that of the plain allreduce times the time that the links are busy; alpha stays."""
    if algorithm == "halving-doubling" and devices == 3:
        pytest.skip("its formula, which folds ranks in, is not the time of its plain messages")
    order = slots(device_leaves(leaves, devices))
    plain = algorithm if algorithm in ("ring", "halving-doubling") else "direct"
    ratio = transmission(algorithm, order, devices) / transmission(plain, None, devices)
    alpha = exposed(0, devices, algorithm, msgspec.structs.replace(FLAT, link=FAST))
    bytes_s = exposed(0, devices, algorithm) - alpha
    assert exposed(leaves, devices, algorithm) == pytest.approx(alpha + ratio * bytes_s)


def test_a_ring_along_the_tree_is_the_direct_exchange() -> None:
    for devices, leaves in ((3, 3), (4, 4), (4, 6)):
        order = slots(device_leaves(leaves, devices))
        assert transmission("ring", order, devices) == transmission("direct", order, devices)
    assert transmission("ring", slots(range(5)), 4) == transmission("ring", None, 4) == 1.5


def test_in_shared_memory_each_partial_sum_is_read_once() -> None:
    """Five partial sums of four ranks: 5 slices read and 4 written in place of 4 and 4."""
    here = msgspec.structs.replace(FLAT, emulated_network=False, cores=8)
    alpha = exposed(0, 4, "two-shot", msgspec.structs.replace(here, link=FAST))
    plain, ordered = (exposed(leaves, 4, "two-shot", here) - alpha for leaves in (4, 6))
    assert ordered / plain == pytest.approx(9 / 8)
