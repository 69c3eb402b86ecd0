"""Training in the memory of devices: in numba's CUDA simulator it has the bits of the same operations on the host.

On GPUs, whose libraries add otherwise, it comes close to them, and leaves have the same bits on any number of ranks.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_processes import why_processes_cannot_share_gpus
from python_path import extended_path

from dpsim import codec
from dpsim.comm.cuda.available import why_no_gpu
from dpsim.launch import jobs
from dpsim.schedule import COMPUTE_LANE
from dpsim.timeline import Timeline, TimelineRecord

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (pip install -e '.[dev]')")
DATA = "synthetic:5x5x1,classes=3,train=32,test=7"
FEW_PIXELS = "synthetic:2x3x1,classes=3,train=10,test=3"
"""For kernels of layers, which the simulator runs pixel by pixel; some leaves of the second batch have no samples."""
STEPS = 2


def case(
    name: str,
    where: str,
    model: str = "mlp:4",
    flags: bool = False,
    own_model: bool = False,
    kernels: bool = False,
    **plan: Any,
) -> dict[str, Any]:
    """A training; with ``kernels`` those of this project compute its layers, else the device's library."""
    common = {"global_batch": 16, "algorithm": "auto", "fusion_threshold_bytes": 60.0, "overlap": "poll"}
    return {
        "name": name,
        "where": where.split(),
        "flags": flags,
        "own_model": own_model,
        "model": model,
        "kernels": kernels,
        "dataset": FEW_PIXELS if kernels else DATA,
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
    case("leaves, global batch norm", "twin device", "cnn:2", leaves=8, batch_norm="global", overlap="thread"),
    case("global batch norm, waiting inside", "twin device", "cnn:2", flags=True, batch_norm="global"),
    case("lars", "cpu twin device", optimizer={"kind": "lars", "weight_decay": 0.01}),
    case("bfloat16", "cpu twin device", "mlp:4", compute_dtype="bfloat16"),
    case("leaves, in bfloat16", "twin device", "cnn:2", compute_dtype="bfloat16", overlap="thread", **LEAVES),
    case("own model", "cpu device", own_model=True),
    case("kernels, a batch norm a rank", "twin device", "cnn:2", kernels=True, global_batch=8),
    case("kernels, leaves", "twin device", "cnn:2", kernels=True, global_batch=8, overlap="thread", **LEAVES),
    case("kernels, global batch norm", "twin device", "cnn:2", kernels=True, global_batch=8, batch_norm="global"),
]
RANKS = [1, 2, 3]
RANKS_BY_SPEED = [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))]
LIMIT_S = {"simulator": 100, "gpu": 280}
"""Of one job; on a GPU it may compile each kernel that it uses for the first time."""
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
        if where == "simulator" or name == "own model":
            assert [other[key] for key in ("digests", "losses", "test")] == [
                first[key] for key in ("digests", "losses", "test")
            ]
        else:
            for mine, theirs in zip(other["losses"], first["losses"], strict=True):
                np.testing.assert_allclose([sum(of) for of, _ in mine], [sum(of) for of, _ in theirs], rtol=1e-3)
    assert len(set(places["device"]["digests"])) == (ranks if name.endswith("a batch norm a rank") else 1)
    assert places["device"]["on_device"] == (name != "own model")


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
    for name in (asked["name"] for asked in CASES if asked["name"] != "own model"):
        assert trained(ranks, where, name)["device"]["fetches"] == [1]


@pytest.mark.parametrize("name", ["leaves", "leaves, waiting inside", "global batch norm", "plain"])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("ranks", RANKS_BY_SPEED)
def test_a_timeline_of_a_device_has_its_work_in_order_and_when_the_host_asked_for_it(
    ranks: int, where: str, name: str
) -> None:
    line = Timeline.from_record(codec.decode(trained(ranks, where, name)["device"]["timeline"], TimelineRecord, "it"))
    assert line.clock == "device" and line.asked_s is not None
    anchor_error_s = 1e-4 if where == "gpu" else 1e-6
    names = np.array([line.operations[number] for number in line.operation])
    for step, rank in itertools.product(range(STEPS), range(ranks)):
        own = (line.step == step) & (line.rank == rank)
        assert (line.end_s >= line.start_s)[own].all()
        computing = own & (line.lane == COMPUTE_LANE)
        asked_in_time = line.asked_s <= line.end_s + anchor_error_s
        assert asked_in_time[own & ~computing].all()
        ends = np.append(names[computing][1:] != names[computing][:-1], True) & (names[computing] != "step overhead")
        assert asked_in_time[computing][ends].all()  # the events that an operation ends with
        assert (line.start_s[computing][1:] >= line.end_s[computing][:-1]).all()
        order = [kind for kind, _ in itertools.groupby(name.split()[0] for name in names[computing])]
        passes = ["forward", "loss", "backward"] * (2 if name == "plain" else 1)
        assert [kind for kind in order if kind != "step"] == [*passes, "update"]
        sent = own & np.char.startswith(names.astype(str), "allreduce")
        assert bool(sent.any()) == (ranks > 1)
        assert (line.start_s[sent][1:] >= line.end_s[sent][:-1]).all()  # one after another in one stream
        loss_s = line.end_s[own & (names == "loss")].max()
        assert (line.start_s[sent] >= loss_s).all()
        update_s = line.start_s[own & (names == "update")].max()
        assert (line.end_s[sent] <= update_s + anchor_error_s).all()
        assert line.select(step=step, rank=rank).exposed_communication_s() >= 0
        assert (own & (names == "synchronise")).any() == (ranks > 1 and name != "plain")


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("ranks", RANKS_BY_SPEED)
def test_gradients_are_produced_in_the_memory_that_kernels_reduce(ranks: int, where: str) -> None:
    for name in ("leaves", "plain"):
        assert trained(ranks, where, name)["device"]["copied_nothing"] == (ranks > 1)
    assert not trained(ranks, where, "own model")["device"]["copied_nothing"]  # the host's gradients are copied to it


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


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("ranks", RANKS_BY_SPEED)
def test_ranks_that_train_leaves_have_the_settings_of_libraries_which_are_recorded(ranks: int, where: str) -> None:
    for settings in ran(ranks, where)["settings"]:
        assert settings == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CUPY_ACCELERATORS": "", "CUPY_TF32": "0"}
    computed_on, libraries = trained(ranks, where, "leaves")["device"]["recorded"]
    assert computed_on.startswith("gradients are computed on ")
    assert (
        "numba-cuda " in libraries and "CUBLAS_WORKSPACE_CONFIG=:4096:8, CUPY_ACCELERATORS=, CUPY_TF32=0" in libraries
    )
    assert libraries.endswith("DPSIM_GPU_LAYERS=cupy")
    own_model, _ = trained(ranks, where, "own model")["device"]["recorded"]
    assert own_model.startswith("gradients are computed on the host and reduced on ")
    assert trained(ranks, where, "leaves")["twin"]["recorded"] == ["", ""]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("ranks", RANKS_BY_SPEED)
def test_all_ranks_refuse_leaves_where_one_has_other_settings_of_libraries(ranks: int, where: str) -> None:
    text = f"rank {ranks - 1}: CUBLAS_WORKSPACE_CONFIG=:16:8 in reproducible training on GPUs"
    assert all(said.startswith(text) for said in ran(ranks, where)["other_settings"])


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("ranks", RANKS_BY_SPEED)
def test_all_ranks_refuse_leaves_where_one_computes_layers_by_other_code(ranks: int, where: str) -> None:
    text = f"rank {ranks - 1}: DPSIM_GPU_LAYERS=, which rank 0 has otherwise" if ranks > 1 else "nothing"
    assert all(said.startswith(text) for said in ran(ranks, where)["other_layers"])


@pytest.mark.parametrize("ranks", RANKS_BY_SPEED)
def test_a_device_that_fails_ends_the_step_with_its_error(ranks: int) -> None:
    for said in ran(ranks, "simulator")["faults"]:
        assert said == ["cudaErrorIllegalAddress: 700"] * 3 * min(ranks, 2)
