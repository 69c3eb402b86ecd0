"""Training in the memory of devices: in numba's CUDA simulator it has the bits of the same operations on the host.

On GPUs, whose libraries add otherwise, it comes close to them, and leaves have the same bits on any number of ranks.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_processes import why_processes_cannot_share_gpus
from python_path import extended_path

from dpsim.comm.cuda.available import why_no_gpu
from dpsim.launch import jobs

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (pip install -e '.[dev]')")
DATA = "synthetic:5x5x1,classes=3,train=32,test=7"
STEPS = 3


def case(name: str, where: str, model: str = "mlp:4", flags: bool = False, **plan: Any) -> dict[str, Any]:
    common = {"global_batch": 16, "algorithm": "auto", "fusion_threshold_bytes": 60.0, "overlap": "poll"}
    return {
        "name": name,
        "where": where.split(),
        "flags": flags,
        "model": model,
        "dataset": DATA,
        "plan": common | plan,
    }


LEAVES = {"leaves": 8, "batch_norm": "leaf"}
CASES = [
    case("leaves", "twin device", "cnn:2", overlap="thread", **LEAVES),
    case("leaves, waiting inside", "device", "cnn:2", flags=True, **LEAVES),
    case("leaves, accumulated", "twin device", "mlp:4,norm=layer", accumulate=2, overlap="off", **LEAVES),
    case("leaves in float16", "twin device", "cnn:2", accumulate=2, wire_dtype="float16", **LEAVES),
    case("leaves in bfloat16, waiting inside", "twin device", flags=True, wire_dtype="bfloat16", **LEAVES),
    case("plain", "cpu twin device", optimizer={"kind": "adamw"}, accumulate=2),
    case("global batch norm", "twin device", "cnn:2", batch_norm="global", overlap="inline"),
    case("lars", "cpu device", optimizer={"kind": "lars"}),
]
RANKS = [1, 2, 3]
RANKS_BY_SPEED = [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))]
LIMIT_S = {"simulator": 100, "gpu": 280}
"""Of one job; on a GPU it may compile each of CuPy's kernels that it uses for the first time."""
on_gpus = [
    pytest.mark.gpu,
    pytest.mark.ranks,
    pytest.mark.xdist_group("ranks on GPUs"),
    pytest.mark.timeout(LIMIT_S["gpu"] + 20),
]
WHERE = ["simulator", pytest.param("gpu", marks=on_gpus)]


@functools.cache
def ran(ranks: int, where: str) -> dict[str, Any]:
    """What ``ranks`` ranks came to, in one job in numba's simulator or on the GPUs of this machine."""
    if where == "gpu" and (reason := why_no_gpu() or why_processes_cannot_share_gpus()):
        pytest.skip(reason)
    return jobs.on_ranks(  # type: ignore[no-any-return]
        "ranks_cuda_training:run",
        {"cases": CASES, "steps": STEPS},
        devices=ranks,
        timeout_s=LIMIT_S[where],
        env={
            "PYTHONPATH": extended_path(Path(__file__).parents[1] / "support"),
            "NUMBA_ENABLE_CUDASIM": "1" if where == "simulator" else "0",
        },
    )


def trained(ranks: int, where: str, name: str) -> dict[str, Any]:
    return ran(ranks, where)["trained"][name]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", [asked["name"] for asked in CASES])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("ranks", RANKS_BY_SPEED)
def test_training_on_devices_has_the_bits_of_the_same_operations_on_the_host(ranks: int, where: str, name: str) -> None:
    places = trained(ranks, where, name)
    first, *others = places.values()
    for other in others:
        if where == "simulator" or name == "lars":
            assert [other[key] for key in ("digests", "losses", "test")] == [
                first[key] for key in ("digests", "losses", "test")
            ]
        else:
            for mine, theirs in zip(other["losses"], first["losses"], strict=True):
                np.testing.assert_allclose([sum(of) for of, _ in mine], [sum(of) for of, _ in theirs], rtol=1e-3)
    assert len(set(places["device"]["digests"])) == 1
    assert places["device"]["on_device"] == (name != "lars")


@pytest.mark.slow
@pytest.mark.parametrize("name", [asked["name"] for asked in CASES if "leaves" in asked["name"]])
@pytest.mark.parametrize("where", WHERE)
def test_leaves_on_devices_have_the_same_bits_on_any_number_of_ranks(where: str, name: str) -> None:
    assert len({trained(ranks, where, name)["device"]["digests"][0] for ranks in RANKS}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("where", WHERE)
def test_leaves_have_the_same_bits_where_kernels_wait_for_each_other_inside(where: str) -> None:
    for ranks in RANKS:
        inside, outside = trained(ranks, where, "leaves, waiting inside"), trained(ranks, where, "leaves")
        assert inside["device"]["digests"] == outside["device"]["digests"]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("ranks", RANKS_BY_SPEED)
def test_a_step_on_a_device_waits_for_values_once(ranks: int, where: str) -> None:
    for name in ("leaves", "leaves, accumulated", "plain"):
        assert trained(ranks, where, name)["device"]["fetches"] == [1]
    between_layers = 2  # global batch norm sums over the ranks in forward and in backward
    assert trained(ranks, where, "global batch norm")["device"]["fetches"] == [1 + between_layers]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("ranks", RANKS_BY_SPEED)
def test_gradients_are_produced_in_the_memory_that_kernels_reduce(ranks: int, where: str) -> None:
    for name in ("leaves", "plain"):
        assert trained(ranks, where, name)["device"]["copied_nothing"] == (ranks > 1)
    assert not trained(ranks, where, "lars")["device"]["copied_nothing"]  # the host's gradients are copied to it


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("ranks", RANKS_BY_SPEED)
def test_a_checkpoint_of_a_device_is_continued_with_the_same_bits(ranks: int, where: str) -> None:
    resumed = ran(ranks, where)["resumed"]
    assert resumed["device"] == resumed["without a stop"]
    assert where == "gpu" or resumed["device"] == resumed["twin"]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("ranks", RANKS_BY_SPEED)
def test_a_loss_that_is_not_finite_is_noticed_before_any_parameter_changes(ranks: int, where: str) -> None:
    *others, spoilt = ran(ranks, where)["not_finite"]
    assert spoilt.startswith("the loss is nan in step 1; the first value that is not finite: the input batch")
    for said in others:
        assert said.startswith("the loss of this rank is finite, the sum of all ranks' gradients is not in step 1")


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("ranks", RANKS_BY_SPEED)
def test_leaves_are_refused_by_all_ranks_where_they_have_other_bits_alone(ranks: int, where: str) -> None:
    text = f"the forward pass has other bits for a leaf alone than amid others, on the device of rank {ranks - 1}"
    assert all(said.startswith(text) for said in ran(ranks, where)["refused"])
