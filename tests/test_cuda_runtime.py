"""CUDA in the runtime, in numba's CUDA simulator: memory, transport, and training to the bits of the CPU's."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from dpsim.backend import CUDA_VERSIONS, check_backend
from dpsim.comm.cuda.access import usual_mode
from dpsim.comm.cuda.device import open_device, simulating
from dpsim.errors import ConfigError
from dpsim.kernels.allreduce import registry
from dpsim.machine import Network

OnRanks = Callable[..., Any]
Python = Callable[..., subprocess.CompletedProcess[str]]
DATA = "synthetic:3x3x1,classes=3,train=24,test=6"
MLP = {"model": "mlp:5", "dataset": DATA}
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "NUMBA_ENABLE_CUDASIM": "0"}
SIMULATOR = {"NUMBA_ENABLE_CUDASIM": "1"}


@pytest.fixture
def simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are started run in the simulator."""
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")


def case(name: str, transports: str, **plan: Any) -> dict[str, Any]:
    return MLP | {
        "name": name, "transports": transports.split(),
        "plan": {"global_batch": 9, "algorithm": "direct", "fusion_threshold_bytes": 100.0} | plan,
    }  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_training_reduced_by_cuda_kernels_has_the_bits_of_the_tree_and_at_up_to_3_ranks_the_cpus(
    ranks: int, on_ranks: OnRanks, simulator: None
) -> None:
    cases = [case("off", "cpu cuda tree" if ranks < 4 else "tree cuda")]
    if ranks == 2:
        cases += [
            case("ring", "tree cuda", algorithm="ring"),
            case("halving-doubling", "tree cuda", algorithm="halving-doubling"),
            case("inline", "tree cuda", overlap="inline"),
            case("poll", "tree cuda", overlap="poll"),
            case("thread", "tree cuda", overlap="thread", fusion_threshold_bytes=0.0),
            case("horovod", "tree cuda", fusion_rule="horovod", fusion_threshold_bytes=None),
            case("float16", "cpu cuda", wire_dtype="float16"),
            case("bfloat16", "cpu cuda", wire_dtype="bfloat16"),
        ]
    for asked, ran in zip(
        cases, on_ranks("ranks_cuda:trained", {"cases": cases, "steps": 3}, devices=ranks), strict=True
    ):
        first, *others = ran.values()
        for other in others:
            for key in ("digests", "losses", "test"):
                assert other[key] == first[key], (asked["name"], key)
        assert len(set(first["digests"])) == 1
        assert bool(ran["cuda"]["launches"]) == (ranks > 1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_memory_that_ranks_share_is_tried_by_real_writes(ranks: int, on_ranks: OnRanks, simulator: None) -> None:
    found = on_ranks("ranks_cuda:reached", devices=ranks)
    assert (found["way"], found["mode"]) == ("simulated", "split")
    assert found["seen"] == [[[rank + 1] for rank in range(ranks)]] * ranks
    assert found["sizes"] == [1000] * ranks
    assert found["arrive"] == [True] * ranks
    assert found["arrive_if_lost"] == [ranks == 1] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_transport_reduces_its_own_memory_with_kernels_and_all_else_with_messages(
    ranks: int, on_ranks: OnRanks, simulator: None
) -> None:
    found = on_ranks("ranks_cuda:moved", devices=ranks)
    assert found == {"right": True, "elsewhere": [ranks * (ranks - 1) / 2] * 7, "launches": 3, "aligned": 0}


def test_train_with_backend_cuda_in_the_simulator_gives_the_digest_of_the_cpu(python: Python) -> None:
    def digest(*flags: str, env: Mapping[str, str]) -> str:
        arguments = ["train", "--model", "mlp:5", "--dataset", DATA, "--global-batch", "8", "--devices", "2"]
        done = python("-m", "dpsim", *arguments, "--steps", "3", "--json", *flags, env=env)
        assert done.returncode == 0, done.stderr
        return str(json.loads(done.stdout)["summary"]["digest"])

    assert digest("--backend", "cuda", env=SIMULATOR) == digest("--algorithm", "direct", env=NO_GPU)


def test_without_a_gpu_training_with_backend_cuda_is_refused_in_words(python: Python) -> None:
    done = python("-m", "dpsim", "train", "--backend", "cuda", "--devices", "2", "--steps", "1", env=NO_GPU)
    assert (done.returncode, done.stdout) == (2, "")
    given, allowed, remedy = done.stderr.splitlines()[-3:]
    assert given.startswith("dpsim: backend 'cuda' finds no GPU here: ")
    assert allowed.startswith("  allowed: ") and "pip install 'dpsim[cuda]'" in allowed
    assert remedy == "  to do:   use --backend cpu (the default)"


@pytest.mark.parametrize(
    ("backend", "algorithm", "network", "said"),
    [
        ("gpu", "direct", "node", "unknown backend 'gpu'"),
        ("cuda", "mpi", "node", "algorithm 'mpi' has no CUDA kernel"),
        ("cuda", "direct", "paced:1us,1gbit", "not an emulated network"),
    ],
)
def test_what_a_backend_cannot_do_is_refused(backend: str, algorithm: str, network: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_backend(backend, algorithm, Network.parse(network))
    check_backend("cpu", algorithm, Network.parse(network))
    check_backend("cuda", "direct", Network())


def test_every_algorithm_of_the_backend_is_a_registered_version() -> None:
    assert set(CUDA_VERSIONS.values()) <= {version.name for version in registry.versions("cuda")}


def test_kernels_wait_inside_only_between_gpus_that_reach_each_other() -> None:
    assert usual_mode("ipc", ["a", "b"]) == "flags"
    assert usual_mode("ipc", ["a", "b", "a"]) == "split"
    assert usual_mode("mapped", ["a", "b"]) == "split"
    assert usual_mode("simulated", ["simulator", "simulator"]) == "split"


def test_the_simulators_memory_copies_and_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    assert simulating()
    device = open_device(3)
    stream, memory, host = device.stream(), device.memory(100), device.host_memory(100)
    assert not memory.any() and not host.any()
    begin = stream.record()
    host[:] = range(100)
    device.upload(stream, host, memory)
    device.copy(stream, memory[:50], memory[50:])
    device.download(stream, memory, host)
    end = stream.record()
    stream.follow(end)
    for waiting in (stream, begin, end, device):
        getattr(waiting, "settle" if waiting is device else "wait")()
    assert host.tolist() == [*range(50), *range(50)]
    assert end.done() and end.due_s() is None and end.seconds_since(begin) >= 0
    assert device.free_bytes() > 0 and device.memory(0).size == 0
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "0")
    assert not simulating()
