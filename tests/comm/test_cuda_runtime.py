"""CUDA in the runtime, in numba's CUDA simulator: memory, transport, and training to the bits of the CPU's."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_processes import why_processes_cannot_share_gpus
from python_path import extended_path

from dpsim.algorithms import CUDA_VERSIONS
from dpsim.comm.cuda.available import open_device, simulating, why_no_gpu
from dpsim.comm.cuda.peer_access import default_mode
from dpsim.kernels.allreduce import registry
from dpsim.launch import jobs

Dpsim = Callable[..., tuple[int, str, str]]
DATA = "synthetic:3x3x1,classes=3,train=24,test=6"
MLP = {"model": "mlp:5", "dataset": DATA}


needs_numba_cuda = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda is not installed: pip install numba-cuda"
)


def case(name: str, transports: str, **plan: Any) -> dict[str, Any]:
    return MLP | {
        "name": name,
        "transports": transports.split(),
        "plan": {"global_batch": 9, "algorithm": "direct", "fusion_threshold_bytes": 100.0} | plan,
    }


CASES = {
    1: [case("direct", "cpu cuda")],
    2: [
        case("auto", "cpu cuda tree flags", algorithm="auto"),
        case("one-shot", "tree cuda", algorithm="one-shot"),
        case("direct", "cpu cuda tree flags"),
        case("ring", "tree cuda flags", algorithm="ring"),
        case("halving-doubling", "tree cuda", algorithm="halving-doubling"),
        case("inline", "tree cuda", overlap="inline"),
        case("poll", "tree cuda flags", overlap="poll"),
        case("thread", "tree cuda flags", overlap="thread", fusion_threshold_bytes=0.0),
        case("horovod", "tree cuda", fusion_rule="horovod", fusion_threshold_bytes=None),
        case("float16", "cpu cuda flags", wire_dtype="float16"),
        case("bfloat16", "cpu cuda", wire_dtype="bfloat16"),
    ],
    3: [case("direct", "cpu cuda tree flags")],
    4: [case("direct", "tree cuda flags"), case("halving-doubling", "tree cuda", algorithm="halving-doubling")],
}


def of_where(asked: dict[str, Any], where: str) -> dict[str, Any]:
    """On GPUs the transport itself finds out whether kernels can wait inside: ranks may share one."""
    kept = [name for name in asked["transports"] if name != "flags" or where == "simulator"]
    return asked | {"transports": kept}


WHERE = [
    pytest.param("simulator", marks=needs_numba_cuda, id="simulator"),
    pytest.param("gpu", marks=[pytest.mark.gpu, pytest.mark.ranks, pytest.mark.xdist_group("ranks on GPUs")], id="gpu"),
]


@functools.cache
def ran(ranks: int, where: str) -> dict[str, Any]:
    """What ``ranks`` ranks found, in one job, in the simulator or on the GPUs of this machine."""
    if where == "gpu" and (reason := why_no_gpu()):
        pytest.skip(f"no CUDA device: {reason}")
    if where == "gpu" and (reason := why_processes_cannot_share_gpus()):
        pytest.skip(reason)
    return jobs.on_ranks(  # type: ignore[no-any-return]
        "ranks_cuda:run",
        {"cases": [of_where(c, where) for c in CASES[ranks]], "steps": 3},
        devices=ranks,
        timeout_s=100,
        env={
            "PYTHONPATH": extended_path(Path(__file__).parents[1] / "support"),
            "NUMBA_ENABLE_CUDASIM": "1" if where == "simulator" else "0",
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_training_reduced_by_cuda_kernels_has_the_bits_of_the_tree_and_at_up_to_3_ranks_the_cpus(
    ranks: int, where: str
) -> None:
    for asked, transports in zip(CASES[ranks], ran(ranks, where)["trained"], strict=True):
        first, *others = transports.values()
        assert set(transports) == set(of_where(asked, where)["transports"])
        for other in others:
            for key in ("digests", "losses", "test"):
                assert other[key] == first[key], (asked["name"], key)
        assert len(set(first["digests"])) == 1
        if ranks > 1:  # the kernels did it, cut at their points of synchronisation or not
            assert where == "gpu" or min(transports["cuda"]["stages"]) > 1
            assert transports.get("flags", {"stages": [1]})["stages"] == [1]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("ranks", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_memory_that_ranks_share_is_tried_by_real_writes(ranks: int, where: str) -> None:
    actual = ran(ranks, where)["reached"]
    assert actual["way"] in (("simulated",) if where == "simulator" else ("ipc", "mapped"))
    assert actual["mode"] == "split" or where == "gpu"
    assert actual["seen"] == [[[rank + 1] for rank in range(ranks)]] * ranks
    assert actual["sizes"] == [1000] * ranks
    assert actual["arrive"] == [True] * ranks
    assert actual["arrive_if_lost"] == [ranks == 1] * ranks


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("ranks", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_the_transport_reduces_its_own_memory_with_kernels_and_all_else_with_messages(ranks: int, where: str) -> None:
    elsewhere = [ranks * (ranks - 1) / 2] * 7
    launches = 0 if ranks == 1 else 3
    assert ran(ranks, where)["moved"] == {"right": True, "elsewhere": elsewhere, "launches": launches, "aligned": 0}


@needs_numba_cuda
def test_train_takes_backend_cuda(dpsim: Dpsim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    flags = ["--model", "mlp:5", "--dataset", DATA, "--global-batch", "8", "--devices", "2", "--steps", "3", "--json"]
    code, out, err = dpsim("train", "--backend", "cuda", *flags)
    assert code == 0, err
    document = json.loads(out)
    (point,), summary = document["points"], document["summary"]
    assert (point["backend"], point["algorithm"]) == ("cuda", "auto")
    assert (summary["gpus"], summary["gpu_path"]) == (1, "peer memory")
    device = "numba's CUDA simulator"
    summary = f"gradients are computed on {device} and reduced on {device}, split over simulated memory"
    assert summary in err


def test_without_a_gpu_training_with_backend_cuda_is_refused_in_words(
    dpsim: Dpsim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, out, err = dpsim("train", "--backend", "cuda", "--devices", "1", "--steps", "1")
    assert (code, out) == (2, "")
    given, allowed, remedy = err.splitlines()[-3:]
    assert given.startswith("dpsim: backend 'cuda' finds no GPU here: ")
    assert allowed.startswith("  allowed: ") and "pip install -e '.[cuda13]'" in allowed
    assert remedy == "  to do:   use --backend cpu (the default)"


def test_every_algorithm_of_the_backend_is_a_registered_version() -> None:
    assert set(CUDA_VERSIONS.values()) <= {version.name for version in registry.versions("cuda")}


def test_kernels_wait_inside_only_between_gpus_that_reach_each_other() -> None:
    assert default_mode("ipc", ["a", "b"]) == "flags"
    assert default_mode("ipc", ["a", "b", "a"]) == "split"
    assert default_mode("mapped", ["a", "b"]) == "split"
    assert default_mode("simulated", ["simulator", "simulator"]) == "split"


@pytest.mark.parametrize("where", ["simulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_memory_copies_and_events_of_a_device(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1" if where == "simulator" else "0")
    assert simulating() == (where == "simulator")
    if where == "gpu" and (reason := why_no_gpu()):
        pytest.skip(f"no CUDA device: {reason}")
    device = open_device(3)
    device.use()
    stream, other = device.stream(), device.stream()
    memory, host = device.memory(100), device.host_memory(100)
    assert not memory.any() and not host.any() and host.ctypes.data % 64 == 0
    begin = stream.record()
    host[:] = range(100)
    device.upload(stream, host, memory)
    device.copy(stream, memory[:50], memory[50:])
    end = stream.record()
    other.follow(end)
    device.download(other, memory, host)
    other.record().wait()
    assert host.tolist() == [*range(50), *range(50)]
    assert end.done() and end.due_s() is None and end.seconds_since(begin) >= 0
    stream.wait()
    device.settle()
    assert device.free_bytes() > 0 and device.memory(0).size == 0
