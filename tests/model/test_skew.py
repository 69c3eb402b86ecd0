"""What ranks hide of communication from each other where the links of a shaped network are not alike."""

from __future__ import annotations

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from dpsim.errors import ConfigError
from dpsim.explore.page import page_of_plan
from dpsim.machine import AllreduceCost, Machine
from dpsim.model import predict
from dpsim.model.conditions import seconds_a_byte
from dpsim.model.skew import hidden_s
from dpsim.model.step import price, scheduled
from dpsim.network import Network
from dpsim.plan import Plan
from dpsim.schedule import Schedule
from dpsim.workload import Layer, Tensor, Workload

RATE = 12.5e6
"""Bytes a second of 100 Mbit/s."""
BUCKET_BYTES = 4 * 25_000
CHUNK_S = BUCKET_BYTES / 4 / RATE
"""How long a fourth of the bucket takes on a link: 2 ms."""


def machine(token: str) -> Machine:
    table = AllreduceCost(
        algorithm="ring", devices=4, sizes_bytes=(4.0, BUCKET_BYTES), time_s=(1e-6, 12 * CHUNK_S), wire_dtype="float32"
    )
    return Machine(name="hosts", network=token, allreduce=(table,))


def workload(computation_s: float = 10e-3) -> Workload:
    tensor = Tensor(name="w", shape=(25_000,))
    layer = Layer(name="layer", forward_s=(computation_s / 2,), backward_s=(computation_s / 2,), tensors=(tensor,))
    return Workload(name="one layer", local_batches=(8,), layers=(layer,))


def schedule(token: str, **changed: object) -> Schedule:
    fields = {"devices": 4, "global_batch": 32, "algorithm": "ring", "fusion_threshold_bytes": float("inf")}
    return scheduled(workload(), machine(token), Plan(**fields | changed))


def hidden(token: str, computation_s: float, **changed: object) -> float:
    return hidden_s(Network.parse(token), schedule(token, **changed), computation_s)


def test_a_rank_computes_while_a_slow_link_still_carries_its_last_message() -> None:
    """Around the ring and back, two steps have 2 (6 - 2) + 1 + 1 + 2 * 6 chunks and two computations."""
    assert hidden("shaped:4x100mbit+slow-host=50%", 10e-3) == pytest.approx(CHUNK_S)
    assert hidden("shaped:4x100mbit+slow-host=50%", 0.0) == pytest.approx(0.0, abs=1e-12)


def test_a_queue_with_a_flow_beside_empties_while_ranks_compute() -> None:
    """Then the messages of a step pass before what comes meanwhile: the longer ranks compute, the more so."""
    shares = [hidden("shaped:4x100mbit+background=50%", computation_s) for computation_s in (0.0, 2e-3, 10e-3, 40e-3)]
    assert shares[0] < 0.05 * CHUNK_S < 0.9 * CHUNK_S < shares[1] < 4 * CHUNK_S < shares[2]
    assert shares[3] == pytest.approx(shares[2]) and shares[3] < 6 * CHUNK_S


@pytest.mark.parametrize("token", ["node", "shaped:4x100mbit", "shaped:4x100mbit+rate=50mbit"])
def test_nothing_is_hidden_where_all_links_are_alike(token: str) -> None:
    assert hidden(token, 10e-3) == 0.0


@pytest.mark.parametrize("changed", [{"overlap": "thread"}, {"strategy": "zero1"}, {"leaves": 8, "batch_norm": "leaf"}])
def test_nothing_is_hidden_of_other_steps(changed: dict[str, object]) -> None:
    assert hidden("shaped:4x100mbit+slow-host=50%", 10e-3, **changed) == 0.0


@given(
    condition=st.sampled_from(["slow-host=25%", "slow-host=90%", "background=30%", "oversubscribed=8"]),
    hosts=st.sampled_from([2, 4, 6]),
    algorithm=st.sampled_from(["ring", "direct", "mpi"]),
    computation_s=st.floats(0, 0.2),
    threshold=st.sampled_from([0.0, float("inf")]),
)
def test_a_step_hides_no_more_than_it_communicates(
    condition: str, hosts: int, algorithm: str, computation_s: float, threshold: float
) -> None:
    token = f"shaped:{hosts}x100mbit+{condition}"
    plan = {"devices": hosts, "global_batch": 8 * hosts, "algorithm": algorithm, "fusion_threshold_bytes": threshold}
    longest_s = seconds_a_byte(Network.parse(token), Plan(**plan).collective) * BUCKET_BYTES
    assert 0 <= hidden(token, computation_s, **plan) <= longest_s


def test_the_predicted_step_and_its_exposed_communication_are_shorter_by_it() -> None:
    plan = Plan(devices=4, global_batch=32, algorithm="ring", fusion_threshold_bytes=float("inf"))
    known = machine("shaped:4x100mbit+slow-host=50%")
    uneven, even = (
        predict(workload(), each, plan) for each in (known, msgspec.structs.replace(known, network="shaped:4x100mbit"))
    )
    assert even.step_s - uneven.step_s == pytest.approx(CHUNK_S)
    priced = price(scheduled(workload(), known, plan), known)
    assert priced.times[1].max() == pytest.approx(uneven.step_s)
    assert even.exposed_communication_s - uneven.exposed_communication_s == pytest.approx(CHUNK_S)


def test_a_page_which_cannot_compute_it_is_refused() -> None:
    plan = Plan(devices=4, global_batch=32, algorithm="ring")
    with pytest.raises(ConfigError, match=r"a page of the network shaped:4x100mbit\+slow-host=50%"):
        page_of_plan(workload(), machine("shaped:4x100mbit+slow-host=50%"), plan)
