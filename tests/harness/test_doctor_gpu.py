"""What ``doctor`` says of GPUs: on none, in numba's simulator, and where a library fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from dpsim.comm.cuda import driver as cuda_driver
from dpsim.comm.cuda.driver import Driver, DriverGpu
from dpsim.errors import DpsimError
from dpsim.harness import doctor_gpu
from dpsim.harness.doctor_gpu import Finding
from dpsim.launch import jobs

TWO = Driver(cuda_version=13010, gpus=(DriverGpu(name="H100", capability=(9, 0)),) * 2)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that says that it has two GPUs and NCCL; what ranks do there is up to the test."""
    monkeypatch.setattr(cuda_driver, "ask", lambda: TWO)
    monkeypatch.setattr(doctor_gpu, "gpu_count", lambda: 2)
    monkeypatch.setattr(doctor_gpu, "nccl_missing", lambda: "")


def test_in_the_simulator_ranks_write_into_each_others_memory() -> None:
    pytest.importorskip("numba_cuda")
    done = subprocess.run(
        [sys.executable, "-m", "dpsim", "doctor", "--json"],
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    findings = {each["name"]: each for each in json.loads(done.stdout)["points"]}
    assert findings["GPU"]["found"] == "numba's CUDA simulator; copies come back unchanged"
    assert findings["GPU peers"]["state"] == "ok"
    assert findings["GPU peers"]["found"].startswith("2 ranks on 1 GPU wrote into each other's simulated memory")
    assert findings["NCCL"]["found"] == findings["GPU-aware MPI"]["found"] == "not tried in the simulator"


def test_without_a_driver_nothing_more_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "ask", lambda: Driver(problem="no NVIDIA driver (libcuda.so.1)"))
    monkeypatch.setattr(doctor_gpu, "cupy_version", lambda: "14.0")
    text = "none to use: no NVIDIA driver (libcuda.so.1); everything runs on the CPU"
    assert doctor_gpu.device() == Finding("ok", text)
    assert not doctor_gpu.usable()


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("path", "gpus", "state", "said"),
    [
        ("peer memory", 2, "ok", "wrote into each other's ipc memory; kernels wait inside for each other"),
        ("peer memory", 1, "ok", "wrote into each other's ipc memory; kernels stop where ranks wait"),
        ("nccl", 2, "warn", "2 ranks on 2 GPUs: no peers; in training NCCL moves gradients, and kernels add them"),
        ("host", 1, "warn", "2 ranks on 1 GPU: no peers; in training gradients go through host memory by MPI"),
    ],
)
def test_gpus_that_do_not_reach_each_others_memory_are_a_warning_that_says_how_gradients_move(
    path: str, gpus: int, state: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = {"path": path, "reason": "no peers", "gpus": gpus, "way": "ipc", "mode": "flags" if gpus > 1 else "split"}
    monkeypatch.setattr(jobs, "on_ranks", lambda task, argument, **options: answer)
    tried = dict(doctor_gpu.PROBES)["GPU peers"]()
    assert tried.state == state and said in tried.found
    assert bool(tried.remedy) == (state == "warn")


@pytest.mark.usefixtures("two_gpus")
def test_a_rank_that_dies_is_an_answer_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(task: str, argument: dict[str, object], **options: object) -> None:
        raise DpsimError("rank 1 of 2 was killed by SIGSEGV")

    monkeypatch.setattr(jobs, "on_ranks", dies)
    peers, nccl, mpi = (probe() for _, probe in doctor_gpu.PROBES)
    assert peers.state == nccl.state == "warn" and peers.remedy and nccl.remedy
    assert mpi == Finding("ok", "no (rank 1 of 2 was killed by SIGSEGV); messages go through host memory")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("all-reduce", ("warn", "2.29.3: wrong data from all-reduce")),
        ("", ("ok", "2.29.3: sums, gathers and messages between 2 GPU(s) are right")),
    ],
)
def test_wrong_data_from_nccl_is_a_warning(wrong: str, said: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def answers(task: str, argument: dict[str, object], *, devices: int, timeout_s: float) -> dict[str, str]:
        asked.append((task.rpartition(":")[2], devices))
        return {"wrong": wrong, "version": "2.29.3"}

    monkeypatch.setattr(jobs, "on_ranks", answers)
    nccl = dict(doctor_gpu.PROBES)["NCCL"]()
    assert (nccl.state, nccl.found) == said and asked == [("nccl_calls", 2)]
