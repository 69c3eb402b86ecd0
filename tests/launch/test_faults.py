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


class Family:
    """A training command in a process group of its own, as a shell starts it, and its processes once it trains."""

    def __init__(self, folder: Path, *before: str, epochs: int = 10_000, devices: int = 2) -> None:
        command = [*before, sys.executable, "-m", "dpsim", "train", "--model", "mlp:6", "--epochs", str(epochs)]
        self.folder, self.process = (
            folder,
            subprocess.Popen(
                [*command, "--devices", str(devices)],
                env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            ),
        )

    def wait_until_it_trains(self) -> Family:
        assert self.process.stderr is not None
        while (line := self.process.stderr.readline()) and not line.startswith(b"epoch"):
            pass
        assert line, "it ended early"
        self.look()
        return self

    def look(self) -> None:
        """Find the processes that there are now."""
        self.members = psutil.Process(self.process.pid).children(recursive=True)
        commands = [(member, command_of(member)) for member in self.members]
        self.ranks = [member for member, words in commands if words[:1] == [sys.executable] and "-m" in words]

    def ended(self, within_s: float = WITHIN_S) -> tuple[int, str]:
        """Return the exit code and what it said, once it has ended; nothing of it is left."""
        _, said = self.process.communicate(timeout=within_s)
        _, left = psutil.wait_procs(self.members, timeout=WITHIN_S)
        assert not left and list(self.folder.iterdir()) == []
        assert b"Traceback" not in said
        return self.process.returncode, said.decode()


@pytest.fixture
def family(tmp_path: Path) -> Callable[..., Family]:
    return lambda *before, **options: Family(tmp_path, *before, **options).wait_until_it_trains()


Started = Callable[..., Family]


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
def test_however_a_job_ends_no_process_and_no_file_is_left(ending: str, expected: int, family: Started) -> None:
    job = family()
    assert [shared_files(rank.pid) for rank in job.ranks] == [set(), set()]  # nothing has a name: nothing can be left
    if ending.startswith("Ctrl-C"):
        for _ in range(3 if "three" in ending else 1):
            os.killpg(job.process.pid, signal.SIGINT)
            time.sleep(0.02)
    else:
        number = signal.Signals[ending.split()[0]]
        os.kill(job.process.pid if "parent" in ending else job.ranks[1].pid, number)
    code, said = job.ended()
    assert code == expected, said
    last = {130: "dpsim: interrupted", 1: "dpsim: rank 1 of 2 was killed by SIGKILL"}.get(expected, "")
    assert last in said


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
    name: str, number: signal.Signals, reason: str, family: Started
) -> None:
    job = family()
    culprit = job.ranks[1] if name == "rank" else named(job.members, name)[0]
    culprit.send_signal(number)
    code, said = job.ended()
    assert f"dpsim: {reason.format(culprit.pid)}" in said and code == 1


def test_sigint_as_ranks_start_is_named_without_a_traceback(tmp_path: Path) -> None:
    job = Family(tmp_path, devices=4)
    job.look()
    deadline = time.monotonic() + WITHIN_S
    while len(job.ranks) < 4:
        assert time.monotonic() < deadline
        with contextlib.suppress(psutil.Error):  # a process may end while it is looked at
            job.look()
    for rank in job.ranks:
        rank.send_signal(signal.SIGINT)  # they ignore it until all can be named
    named(job.members, "mpiexec")[0].send_signal(signal.SIGINT)
    code, said = job.ended()
    assert "dpsim: mpiexec was killed by SIGINT" in said.splitlines() and code == 1


@pytest.mark.parametrize("stopped", ["mpiexec", "hydra", "rank"])
def test_a_killed_launcher_takes_everything_along_also_what_is_stopped(stopped: str, family: Started) -> None:
    job = family()
    for process in job.ranks[1:] if stopped == "rank" else named(job.members, stopped):
        process.suspend()
    job.process.kill()
    assert job.ended()[0] == -signal.SIGKILL


@pytest.mark.slow
def test_a_job_whose_mpiexec_is_stopped_ends_with_its_result(family: Started) -> None:
    job = family(epochs=150)
    named(job.members, "mpiexec")[0].suspend()
    code, said = job.ended()
    assert code == 0, said


@pytest.mark.parametrize("ending", ["SIGKILL to a rank", "Ctrl-C"])
def test_under_a_launcher_all_ranks_end_with_one_message(ending: str, family: Started) -> None:
    mpiexec = jobs.mpiexec_path()
    assert mpiexec is not None
    job = family(mpiexec, "-n", "2")
    assert [shared_files(rank.pid) for rank in job.ranks] == [set(), set()]
    if ending == "Ctrl-C":
        os.killpg(job.process.pid, signal.SIGINT)
    else:
        job.ranks[1].kill()
    code, said = job.ended()
    assert (code != 0, said.count("dpsim: interrupted")) == (True, int(ending == "Ctrl-C"))
