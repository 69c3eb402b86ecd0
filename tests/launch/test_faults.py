"""Kills and Ctrl-C, from outside and at any time: the job ends, says why, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from process_tree import command_of, named

from dpsim.launch import jobs
from dpsim.launch.failure_report import JobState, describe, failure
from dpsim.launch.scratch_keeper import shared_files

ROOT = Path(__file__).parents[2]
OnRanks = Callable[..., Any]
WITHIN_S = 100.0
"""A limit against hanging: what is awaited usually takes some seconds."""


@pytest.mark.parametrize(
    ("module", "name", "said", "remedy"),
    [
        ("cupy_backends.cuda.api.runtime", "CUDARuntimeError", "cudaErrorIllegalAddress: an address", "dmesg"),
        ("numba.cuda.cudadrv.driver", "CudaAPIError", "[719] CUDA_ERROR_LAUNCH_FAILED", "CUDA_LAUNCH_BLOCKING=1"),
        ("torch", "AcceleratorError", "CUDA error: unspecified launch failure", "compute-sanitizer"),
        ("cupy.cuda.memory", "OutOfMemoryError", "Out of memory allocating 8 bytes", "smaller batch"),
    ],
)
def test_a_gpu_that_fails_is_an_error_with_a_remedy_and_no_traceback(
    module: str, name: str, said: str, remedy: str
) -> None:
    error = type(name, (RuntimeError,), {"__module__": module})(said)
    told = failure(1, JobState(errors=[describe(error, 1)]), 2)
    assert isinstance(told, jobs.JobFailed) and (told.rank, told.traceback) == (1, "")
    assert told.given == f"rank 1 of 2: the GPU fails: {said}" and remedy in told.remedy
    other = failure(1, JobState(errors=[describe(RuntimeError("of somebody else"), 0)]), 2)
    assert isinstance(other, jobs.JobFailed) and "of somebody else" in other.traceback


@pytest.mark.parametrize(
    ("devices", "phase", "overlap"),
    [
        (2, "start", "off"),
        (2, "training", "thread"),
        (3, "training", "off"),
        (4, "training", "poll"),
        (3, "evaluation", "off"),
    ],
)
def test_a_rank_killed_in_any_phase_is_named_at_once(devices: int, phase: str, overlap: str, on_ranks: OnRanks) -> None:
    with pytest.raises(jobs.JobFailed, match=f"rank {devices - 1} of {devices} was killed by SIGKILL") as caught:
        on_ranks("ranks_faults:killed", {"phase": phase, "overlap": overlap}, devices=devices)
    assert caught.value.rank == devices - 1


def begun(tmp_path: Path, *before: str, epochs: int = 10_000) -> tuple[subprocess.Popen[bytes], list[psutil.Process]]:
    """A training command in a process group of its own, as a shell starts it, once it trains; and its processes."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [*before, sys.executable, "-m", "dpsim", "train", "--model", "mlp:6", "--epochs", str(epochs)]
    process = subprocess.Popen(
        [*command, "--devices", "2"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stderr is not None
    while (line := process.stderr.readline()) and not line.startswith(b"epoch"):
        pass
    assert line, "it ended early"
    return process, psutil.Process(process.pid).children(recursive=True)


def ranks_of(family: list[psutil.Process]) -> list[psutil.Process]:
    commands = [(member, command_of(member)) for member in family]
    return [member for member, command in commands if command[:1] == [sys.executable] and "-m" in command]


def all_gone(family: list[psutil.Process]) -> bool:
    _, left = psutil.wait_procs(family, timeout=WITHIN_S)
    return not left


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        ("Ctrl-C", 130),
        ("Ctrl-C three times", 130),
        ("SIGTERM to the parent", 143),
        ("SIGHUP to the parent", 129),
        ("SIGKILL to the parent", -9),
        ("SIGKILL to a rank", 1),
    ],
)
def test_however_a_job_ends_no_process_and_no_file_is_left(ending: str, expected: int, tmp_path: Path) -> None:
    process, family = begun(tmp_path)
    ranks = ranks_of(family)
    assert [shared_files(rank.pid) for rank in ranks] == [set(), set()]  # nothing has a name: nothing can be left
    if ending.startswith("Ctrl-C"):
        for _ in range(3 if "three" in ending else 1):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.02)
    else:
        number = signal.Signals[ending.split()[0]]
        os.kill(process.pid if "parent" in ending else ranks[1].pid, number)
    _, said = process.communicate(timeout=WITHIN_S)
    assert (process.returncode, b"Traceback" in said) == (expected, False), said.decode()
    assert all_gone(family)
    assert list(tmp_path.iterdir()) == []
    last = {130: "dpsim: interrupted", 1: "dpsim: rank 1 of 2 was killed by SIGKILL"}.get(expected, "")
    assert last in said.decode()


@pytest.mark.parametrize(
    ("name", "number", "reason"),
    [
        pytest.param("mpiexec", signal.SIGKILL, "mpiexec was killed by SIGKILL", marks=pytest.mark.slow),
        ("mpiexec", signal.SIGINT, "mpiexec was killed by SIGINT"),
        pytest.param("hydra", signal.SIGKILL, "hydra_pmi_proxy (process {}", marks=pytest.mark.slow),
        ("rank", signal.SIGINT, "rank 1 of 2 was killed by SIGINT"),
    ],
)
def test_what_ended_a_job_is_named_also_where_it_is_no_rank(
    name: str, number: signal.Signals, reason: str, tmp_path: Path
) -> None:
    process, family = begun(tmp_path)
    culprit = ranks_of(family)[1] if name == "rank" else named(family, name)[0]
    culprit.send_signal(number)
    _, said = process.communicate(timeout=WITHIN_S)
    assert f"dpsim: {reason.format(culprit.pid)}" in said.decode()
    assert (process.returncode, b"Traceback" in said) == (1, False)
    assert all_gone(family)
    assert list(tmp_path.iterdir()) == []


def test_sigint_as_ranks_start_is_named_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dpsim", "train", "--model", "mlp:6", "--epochs", "10000", "--devices", "4"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline, ranks = time.monotonic() + WITHIN_S, list[psutil.Process]()
    while len(ranks) < 4:
        assert time.monotonic() < deadline
        with contextlib.suppress(psutil.Error):  # a process may end while it is looked at
            ranks = ranks_of(family := psutil.Process(process.pid).children(recursive=True))
    for rank in ranks:
        rank.send_signal(signal.SIGINT)  # they ignore it until all can be named
    named(family, "mpiexec")[0].send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=WITHIN_S)
    assert "dpsim: mpiexec was killed by SIGINT" in said.decode().splitlines() and b"Traceback" not in said
    assert process.returncode == 1
    assert all_gone(family)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stopped", ["mpiexec", "hydra", "rank"])
def test_a_killed_launcher_takes_everything_along_also_what_is_stopped(stopped: str, tmp_path: Path) -> None:
    process, family = begun(tmp_path)
    for one in ranks_of(family)[1:] if stopped == "rank" else named(family, stopped):
        one.suspend()
    process.kill()
    process.communicate(timeout=WITHIN_S)
    assert all_gone(family)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_job_whose_mpiexec_is_stopped_ends_with_its_result(tmp_path: Path) -> None:
    process, family = begun(tmp_path, epochs=150)
    named(family, "mpiexec")[0].suspend()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert all_gone(family)


def test_under_a_launcher_a_killed_rank_ends_the_others_and_can_be_told_by_its_process(tmp_path: Path) -> None:
    mpiexec = jobs.mpiexec_path()
    assert mpiexec is not None
    process, family = begun(tmp_path, mpiexec, "-n", "2")
    ranks = ranks_of(family)
    assert [shared_files(rank.pid) for rank in ranks] == [set(), set()]
    ranks[1].kill()
    process.communicate(timeout=WITHIN_S)
    assert process.returncode != 0
    assert all_gone(family)


def test_under_a_launcher_ctrl_c_is_one_line(tmp_path: Path) -> None:
    mpiexec = jobs.mpiexec_path()
    assert mpiexec is not None
    process, family = begun(tmp_path, mpiexec, "-n", "2")
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=WITHIN_S)
    assert said.decode().count("dpsim: interrupted") == 1
    assert "Traceback" not in said.decode()
    assert all_gone(family)
