"""Sums between GPUs that do not reach each other's memory: a transfer brings pieces, the tree decides the bits.

In numba's simulator, at 1 to 4 ranks. MPI stands in for NCCL: all but NCCL's own calls is tried.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from python_path import extended_path

from dpsim.comm.cuda.reproducible import REQUIRED
from dpsim.errors import CommunicationError, ConfigError
from dpsim.launch import jobs
from dpsim.processor import LAYERS_VARIABLE
from dpsim.records.train import TrainConfig

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (pip install -e '.[dev]')")
RANKS = [2, 3, 4]
RANKS_BY_SPEED = [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))]
BOTH = ("host", "nccl")


def sums(name: str, **changed: Any) -> dict[str, Any]:
    common = {"low": 0, "high": 200, "dtype": "float32", "leaves": False, "compression": None}
    return common | {"name": name, "one_round_bytes": 0, "on_device": True} | changed


SUMS = [
    sums("two rounds"),
    sums("one round", one_round_bytes=1 << 20),
    sums("a tail behind the shards", high=213),
    sums("fewer elements than ranks", high=2),
    sums("unaligned", low=3, high=190),
    sums("float64", dtype="float64", high=101),
    sums("leaves", leaves=True),
    sums("leaves, one round", leaves=True, one_round_bytes=1 << 20, high=30),
    sums("float16", compression=("float16", 2.0**-6), high=203),
    sums("bfloat16", compression=("bfloat16", 1.0), high=203),
    sums("leaves in float16", leaves=True, compression=("float16", 2.0**-6), high=75),
    sums("leaves in bfloat16", leaves=True, compression=("bfloat16", 1.0), high=75),
    sums("gradients of the host", on_device=False, high=50),
]


def training(path: str, overlap: str, model: str = "mlp:4", batch_norm: str = "leaf") -> dict[str, Any]:
    plan = {"global_batch": 16, "leaves": 8, "batch_norm": batch_norm, "fusion_threshold_bytes": 60.0}
    return {
        "name": f"{path}, {overlap}, batch norm {batch_norm}",
        "path": path,
        "model": model,
        "dataset": "synthetic:5x5x1,classes=3,train=32,test=7",
        "plan": plan | {"overlap": overlap},
    }


TRAININGS = [
    training("host", "thread"),
    training("nccl", "poll"),
    training("host", "inline", "cnn:2", "global"),
    training("nccl", "thread", "cnn:2", "global"),
]


@functools.cache
def ran(ranks: int) -> dict[str, Any]:
    """What ``ranks`` ranks came to, in one job in numba's simulator."""
    support = extended_path(Path(__file__).parents[1] / "support")
    env = {"PYTHONPATH": support, "NUMBA_ENABLE_CUDASIM": "1", LAYERS_VARIABLE: "cupy"}
    env |= REQUIRED  # sums open the device before training does
    argument = {"sums": SUMS, "trainings": TRAININGS}
    return jobs.on_ranks("ranks_cuda_staged:run", argument, devices=ranks, timeout_s=100, env=env)  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", range(len(SUMS)), ids=[case["name"] for case in SUMS])
@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("ranks", RANKS_BY_SPEED)
def test_sums_over_a_transfer_have_the_bits_of_the_reference_on_every_rank(ranks: int, path: str, case: int) -> None:
    assert ran(ranks)["sums"][path][case]["right"] == [[True, True]] * ranks


@pytest.mark.parametrize("ranks", RANKS_BY_SPEED)
def test_kernels_are_bound_once_and_not_in_every_allreduce(ranks: int) -> None:
    by_name = dict(zip((case["name"] for case in SUMS), ran(ranks)["sums"]["host"], strict=True))
    assert by_name["one round"]["made"] == 1
    assert by_name["a tail behind the shards"]["made"] == 2


@pytest.mark.parametrize("name", [case["name"] for case in TRAININGS])
@pytest.mark.parametrize("ranks", RANKS_BY_SPEED)
def test_training_over_a_transfer_has_the_bits_of_the_host(ranks: int, name: str) -> None:
    trained = ran(ranks)["trained"][name]
    path = name.partition(",")[0]
    twin, device = trained["twin"], trained[path]
    assert (device["digests"], device["losses"]) == (twin["digests"], twin["losses"])
    assert len(set(device["digests"])) == 1
    assert device["path"] == path


@pytest.mark.slow
def test_leaves_over_a_transfer_have_the_same_bits_on_any_number_of_ranks() -> None:
    digests: dict[str, set[str]] = {}
    for ranks in (1, *RANKS):
        for case in TRAININGS:
            places = ran(ranks)["trained"][case["name"]].values()
            digests.setdefault(case["model"], set()).update(place["digests"][0] for place in places)
    assert {model: len(different) for model, different in digests.items()} == {"mlp:4": 1, "cnn:2": 1}


@pytest.mark.parametrize("ranks", RANKS_BY_SPEED)
def test_nccl_as_an_algorithm_adds_by_itself_in_the_stream_and_has_no_kernel_beside_it(ranks: int) -> None:
    actual = ran(ranks)["plain"]
    assert actual["right"] == [True] * ranks
    assert actual["calls"] == ["all-reduce", "destroy"]
    assert (actual["path"], actual["queued"], actual["launches"]) == ("nccl", True, True)
    assert actual["description"].endswith("reduced on numba's CUDA simulator, added by NCCL")


@pytest.mark.parametrize("ranks", RANKS_BY_SPEED)
def test_a_transfer_is_taken_where_memory_cannot_be_reached_and_the_reason_is_said(ranks: int) -> None:
    missing = "no NCCL, because rank 0: numba's simulator has no NCCL"
    assert ran(ranks)["paths"] == {
        "peers": ["peer memory", ""],
        "no peers": ["host", f"the GPUs do not reach each other's memory; {missing}"],
        "no peers, NCCL": ["nccl", "the GPUs do not reach each other's memory"],
        "machines": ["host", f"the ranks are on several machines; {missing}"],
    }


@pytest.mark.parametrize("ranks", RANKS_BY_SPEED)
def test_what_one_rank_lacks_is_refused_by_all(ranks: int) -> None:
    refused = ran(ranks)["refused"]
    text = f"rank {ranks - 1}: no such kernel here\n  allowed: others\n  to do:   choose another"
    assert refused["kernel"] == [text] * ranks
    begin = f"algorithm nccl between these {ranks} ranks: rank 0: numba's simulator has no NCCL"
    assert len(refused["nccl"]) == ranks and all(said.startswith(begin) for said in refused["nccl"])


def test_nccl_is_an_algorithm_of_gpus() -> None:
    assert TrainConfig.of(algorithm="nccl", backend="cuda").plan.algorithm == "nccl"
    with pytest.raises(ConfigError, match="'nccl' runs only with --backend cuda"):
        TrainConfig.of(algorithm="nccl")


def test_a_group_of_messages_is_ended_where_one_of_them_is_refused() -> None:
    from dpsim.comm.cuda.nccl import Nccl
    from dpsim.comm.cuda.simulator import SimulatedDevice

    library, alone = mock.Mock(), mock.Mock(rank=0, size=1)
    nccl = Nccl(alone, SimulatedDevice(), library)
    with pytest.raises(CommunicationError, match="NCCL fails: refused"), nccl.group():
        raise RuntimeError("refused")
    assert [name for name, *_ in library.method_calls][-2:] == ["groupStart", "groupEnd"]


@pytest.mark.parametrize("ranks", RANKS_BY_SPEED)
def test_calls_of_nccl_are_tried_between_ranks(ranks: int) -> None:
    assert ran(ranks)["wrong"] == [""] * ranks
