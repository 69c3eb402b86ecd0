"""The launcher: results come back, failures end the job with their reason, and nothing is left behind."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpsim.cli import app
from dpsim.errors import CommunicationError, ConfigError, NotFiniteError
from dpsim.launch import control_channel, failure_report, jobs, mpiexec, rank_info
from dpsim.launch.failure_report import JobState
from dpsim.launch.mpiexec import OutputFilter

HERE = Path(__file__).parents[1] / "support"
OnRanks = Callable[..., Any]


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_argument_and_result_survive_the_way_to_the_ranks_and_back(devices: int, on_ranks: OnRanks) -> None:
    argument = {"text": "é\n", "sizes": [0, 1.5, math.inf], "nested": {"nothing": None, "yes": True}}
    back = on_ranks("launch_tasks:echo", argument, devices=devices)
    assert back["argument"] == argument
    assert [about["rank"] for about in back["ranks"]] == list(range(devices))
    assert len({about["pid"] for about in back["ranks"]}) == devices
    assert os.getpid() not in {about["pid"] for about in back["ranks"]}


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_progress_is_rank_0s_and_output_goes_to_stderr_in_whole_lines(
    unbuffered: str, on_ranks: OnRanks, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    messages: list[str] = []
    on_ranks("launch_tasks:echo", devices=2, progress=messages.append)
    assert messages == ["hello from 0\nand its second line"]
    said = capfd.readouterr()
    assert said.out == ""
    assert sorted(said.err.splitlines()) == ["printed by rank 0", "printed by rank 1"]


def test_each_rank_computes_with_one_thread_unless_the_user_says_otherwise(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    assert on_ranks("launch_tasks:echo", devices=1)["ranks"][0]["threads"] == "1"
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    assert on_ranks("launch_tasks:echo", devices=1)["ranks"][0]["threads"] == "2"


def test_ranks_of_a_local_job_listen_on_the_loopback_alone_and_share_memory_in_a_folder_of_their_job(
    on_ranks: OnRanks,
) -> None:
    ranks = on_ranks("launch_tasks:echo", devices=2)["ranks"]
    assert {address for about in ranks for address in about["listening"]} <= {"127.0.0.1"}
    (shared,) = {about["shared"] for about in ranks}
    assert shared.startswith("/dev/shm/dpsim-job-")
    assert not Path(shared).exists()


def test_pinned_ranks_have_one_core_each(on_ranks: OnRanks) -> None:
    cores = [about["cores"] for about in on_ranks("launch_tasks:echo", devices=2, pin=True)["ranks"]]
    assert cores == [1, 1]


def test_an_exception_on_one_rank_ends_the_job_at_once_and_is_shown(on_ranks: OnRanks) -> None:
    with pytest.raises(jobs.JobFailed) as caught:
        on_ranks("launch_tasks:fail", {"rank": 1, "how": "exception"}, devices=2)
    assert caught.value.rank == 1
    assert str(caught.value) == "rank 1 of 2 failed: ZeroDivisionError: the reason"
    assert caught.value.traceback.endswith("ZeroDivisionError: the reason\n")
    assert "launch_tasks.py" in caught.value.traceback


def test_a_mistake_found_on_a_rank_is_raised_again_as_it_was(on_ranks: OnRanks) -> None:
    with pytest.raises(NotFiniteError) as caught:
        on_ranks("launch_tasks:fail", {"rank": 1, "how": "mistake"}, devices=2)
    error = caught.value
    assert (error.given, error.allowed, error.remedy) == (
        "loss is nan at step 3",
        "finite losses",
        "lower the learning rate",
    )


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV"])
def test_a_killed_rank_is_named(how: str, on_ranks: OnRanks) -> None:
    with pytest.raises(jobs.JobFailed, match=rf"rank 1 of 3 was killed by {how}") as caught:
        on_ranks("launch_tasks:fail", {"rank": 1, "how": how}, devices=3)
    assert isinstance(caught.value, CommunicationError)


@pytest.mark.parametrize("ranks", [[1, 2], [0, 1, 2, 3]])
def test_all_ranks_of_a_watched_job_that_were_killed_are_counted(ranks: list[int], on_ranks: OnRanks) -> None:
    """Though the launcher kills the rest of them in the same way, at once."""
    with pytest.raises(jobs.JobFailed) as caught:
        on_ranks("launch_tasks:kill", {"ranks": ranks}, devices=4, watch=True)
    who = {2: "ranks 1 and 2 of 4", 4: "ranks 0, 1, 2 and 3 of 4"}[len(ranks)]
    assert (caught.value.given, caught.value.lost) == (f"{who} were killed by SIGKILL", len(ranks))


@pytest.mark.parametrize(
    ("how", "message"), [("SIGSEGV", "rank 1 of 3 was killed by SIGSEGV"), ("exception", "ZeroDivisionError")]
)
def test_a_watched_job_that_fails_by_itself_has_lost_nobody(how: str, message: str, on_ranks: OnRanks) -> None:
    with pytest.raises(jobs.JobFailed, match=message) as caught:
        on_ranks("launch_tasks:fail", {"rank": 1, "how": how}, devices=3, watch=True)
    assert (caught.value.lost, caught.value.rank) == (0, 1)


def test_without_watching_a_killed_rank_is_one_lost_at_least() -> None:
    assert failure_report.failure(9, JobState(first_ended=1, reported_signal=9), 3).lost == 1
    assert failure_report.failure(9, JobState(reported_signal=9), 3).lost == 1
    assert failure_report.failure(11, JobState(reported_signal=11), 3).lost == 0


def test_what_a_rank_said_as_it_was_killed_may_be_cut_off_and_what_others_say_then_is_no_cause() -> None:
    seen = JobState()
    listener = control_channel.Listener(2, {}, seen, lambda _: None, all_interfaces=False)
    error = {"rank": 0, "time": 0.0, "consequence": False, "kind": "NotFiniteError", "given": "nan"}
    for line in ('{"result": {"losses": [0.1, 0.', '{"killed": 9}', json.dumps({"error": error})):
        listener.receive(1, line)
    listener.close()
    assert (seen.result, seen.killed, seen.errors) == ([], {1: 9}, [])


def test_ranks_that_get_a_hang_up_go_on_and_print_nothing(on_ranks: OnRanks, capfd: pytest.CaptureFixture[str]) -> None:
    assert on_ranks("launch_tasks:hung_up", devices=2, stdout=True) == 2
    assert capfd.readouterr() == ("", "")


def test_a_rank_that_exits_ends_the_job(on_ranks: OnRanks) -> None:
    with pytest.raises(jobs.JobFailed, match="rank 0 of 2 failed: SystemExit: 7"):
        on_ranks("launch_tasks:fail", {"rank": 0, "how": "exit"}, devices=2)


def test_a_job_ends_when_its_time_is_over(tmp_path: Path) -> None:
    env = {"PYTHONPATH": str(HERE)}
    with pytest.raises(jobs.JobFailed, match="did not finish within the time limit"):
        jobs.on_ranks("launch_tasks:hang", {"folder": str(tmp_path)}, devices=2, env=env, timeout_s=2)
    _assert_ended(tmp_path)


@pytest.mark.parametrize(
    ("ending", "watch"),
    [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGKILL, False), (signal.SIGKILL, True)],
)
def test_no_rank_outlives_the_process_that_started_it(ending: signal.Signals, watch: bool, tmp_path: Path) -> None:
    program = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from dpsim.launch import jobs\n"
        f"argument = {{'folder': {str(tmp_path)!r}}}\n"
        "progress = lambda text: print(text, flush=True)\n"
        f"jobs.on_ranks('launch_tasks:hang', argument, devices=2, progress=progress, watch={watch})\n"
    )
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)]),
        "TMPDIR": str(tmp_path),
    }
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"running\n"
        process.send_signal(ending)
        assert process.wait(10) != 0
    _assert_ended(tmp_path)


def _assert_ended(folder: Path) -> None:
    pids = [path.read_text() for path in folder.glob("*.pid")]
    assert pids
    deadline = time.monotonic() + 10
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank is still there"
        time.sleep(0.05)


def _runs(pid: str) -> bool:
    try:
        return b"launch_tasks" in Path("/proc", pid, "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_without_mpiexec_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "mpiexec_path", lambda: None)
    with pytest.raises(CommunicationError, match=r"pip install 'dpsim\[mpich\]'"):
        jobs.on_ranks("launch_tasks:echo", {}, devices=2)


def test_an_mpiexec_of_another_mpi_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = tmp_path / "mpiexec"
    stranger.write_text('#!/bin/sh\n[ "$1" = --version ] && exit\nshift 2\n"$@"\n')  # starts one rank, not two
    stranger.chmod(0o755)
    monkeypatch.setattr(jobs, "mpiexec_path", lambda: str(stranger))
    with pytest.raises(CommunicationError, match="asked for 2 ranks, but MPI reports 1"):
        jobs.on_ranks("launch_tasks:echo", {}, devices=2)


@pytest.mark.parametrize(
    "ending",
    [
        "true & wait; exec sleep 600",
        "kill -PIPE $$",
        "echo '[mpiexec@host] control_cb (pm/pmiserv_cb.c:280): assert (!closed) failed' >&2; exit 255",
    ],
)
def test_an_mpiexec_that_loses_its_proxy_ends_the_job_and_the_proxy_is_named(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is connected to its proxy, mpiexec would wait for ever; later it fails in other words, or dies."""
    stub = tmp_path / "mpiexec"
    stub.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\n{ending}\n')
    stub.chmod(0o755)
    monkeypatch.setattr(jobs, "mpiexec_path", lambda: str(stub))
    monkeypatch.setattr(mpiexec, "_FAILED_S", 0.1)
    with pytest.raises(jobs.JobFailed, match="hydra_pmi_proxy, by which mpiexec starts the ranks, ended before them"):
        jobs.on_ranks("launch_tasks:echo", {}, devices=2)


def test_a_rank_that_cannot_print_for_its_proxy_has_ended_is_no_cause() -> None:
    state = JobState(errors=[failure_report.describe(BrokenPipeError(), 3)], proxy_lost=True)
    assert "hydra_pmi_proxy" in str(failure_report.failure(255, state, 4))


def test_no_devices_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="devices is 0"):
        jobs.on_ranks("launch_tasks:echo", {}, devices=0)


def test_more_ranks_than_files_may_be_open_is_a_mistake() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(64, hard), hard))
    try:
        with pytest.raises(CommunicationError, match="cannot start 200 ranks"):
            jobs.on_ranks("launch_tasks:echo", {}, devices=200, timeout_s=30)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_unknown_task_is_a_mistake(on_ranks: OnRanks) -> None:
    with pytest.raises(ConfigError, match="no task 'launch_tasks:nonsense'"):
        on_ranks("launch_tasks:nonsense", devices=1)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "0"}, (0, 4)),
        ({"SLURM_PROCID": "3", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, (3, 4)),
        ({"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}, None),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"PMIX_RANK": "2"}, (2, None)),
    ],
)
def test_a_job_is_known_by_its_launchers_variables(
    variables: dict[str, str], expected: tuple[int, int | None] | None
) -> None:
    actual = rank_info.job(variables)
    assert (actual and (actual.rank, actual.size)) == expected


def _inside(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    mpiexec = jobs.mpiexec_path()
    assert mpiexec is not None
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)])}
    command = [mpiexec, "-n", str(ranks), sys.executable, *arguments]
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(("ranks", "devices", "total"), [(2, 2, 3), (3, 2, 3)])
def test_inside_a_job_its_ranks_are_used_and_rank_0_goes_on(ranks: int, devices: int, total: int) -> None:
    program = (
        "from dpsim.launch import jobs\n"
        f"for devices in (1, {devices}):\n"
        "    print(jobs.on_ranks('launch_tasks:sum_ranks', {}, devices=devices))\n"
    )
    done = _inside(ranks, "-c", program)
    assert (done.returncode, done.stdout) == (0, f"1\n{total}\n"), done.stderr


def test_inside_a_job_too_few_ranks_are_refused() -> None:
    program = "from dpsim.launch import jobs\njobs.on_ranks('launch_tasks:sum_ranks', {}, devices=3)\n"
    done = _inside(2, "-c", program)
    assert done.returncode != 0
    assert "devices is 3, but this job was started with 2 ranks" in done.stderr


def test_inside_a_job_a_failing_rank_ends_all() -> None:
    program = (
        "from dpsim.launch import jobs\n"
        "jobs.on_ranks('launch_tasks:fail', {'rank': 1, 'how': 'exception'}, devices=2)\n"
    )
    done = _inside(2, "-c", program)
    assert done.returncode == 1
    assert "ZeroDivisionError: the reason" in done.stderr


def test_inside_a_job_the_command_line_speaks_once() -> None:
    done = _inside(2, "-m", "dpsim", "trian")
    assert done.returncode == 2
    assert done.stderr.count("unknown command 'trian'") == 1


def test_the_launchers_own_noise_is_kept_back(capsys: pytest.CaptureFixture[str]) -> None:
    seen = JobState()
    lines = OutputFilter(seen)
    for line in (
        "a rank's own words",
        "",
        "=" * 83,
        "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES",
        "=   PID 4711 RUNNING AT host",
        "=   EXIT CODE: 9",
        "=" * 83,
        "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)",
        "Abort(1) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 1) - process 1",
    ):
        lines.to_stderr(line)
    assert seen.reported_signal == 9
    for line in (
        "-" * 74,
        "prterun noticed that process rank 1 with PID 12 on node x exited on",
        "signal 11.",
        "-" * 74,
    ):
        lines.to_stderr(line)
    assert (seen.reported_rank, seen.reported_signal) == (1, 11)
    assert capsys.readouterr().err == "a rank's own words\n"


def _command_that(raises: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise raises

    monkeypatch.setattr("dpsim.harness.doctor.examine", broken)


def test_the_command_line_exits_with_1_and_the_ranks_error_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = "Traceback (most recent call last):\nZeroDivisionError: the reason\n"
    failed = jobs.JobFailed("rank 1 of 2 failed: ZeroDivisionError: the reason", rank=1, traceback=trace)
    _command_that(failed, monkeypatch)
    assert app.run(["doctor"]) == 1
    err = capsys.readouterr().err
    assert trace in err
    assert err.endswith("dpsim: rank 1 of 2 failed: ZeroDivisionError: the reason\n")


def test_the_command_line_exits_with_2_on_a_ranks_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _command_that(NotFiniteError("loss is nan", remedy="lower it"), monkeypatch)
    assert app.run(["doctor"]) == 2
    assert capsys.readouterr().err.endswith("dpsim: loss is nan\n  to do:   lower it\n")
