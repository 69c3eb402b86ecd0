"""The launcher: results come back, failures end the job with their reason, and nothing is left behind."""

from __future__ import annotations

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
from python_path import extended_path

from dpsim.cli import app
from dpsim.errors import CommunicationError, ConfigError, DpsimError, NotFiniteError
from dpsim.launch import failure_report, jobs, mpiexec, rank_info
from dpsim.launch.failure_report import JobState
from dpsim.launch.mpiexec import OutputFilter

HERE = Path(__file__).parents[1] / "support"
OnRanks = Callable[..., Any]


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_argument_and_result_survive_the_way_to_the_ranks_and_back(devices: int, on_ranks: OnRanks) -> None:
    argument = {"text": "é\n", "sizes": [0, 1.5, math.inf], "nested": {"nothing": None, "yes": True}}
    back = on_ranks("launch_tasks:echo", argument, devices=devices, pin=True)
    assert back["argument"] == argument
    assert [(about["rank"], about["cores"]) for about in back["ranks"]] == [(rank, 1) for rank in range(devices)]
    assert len({about["pid"] for about in back["ranks"]} | {os.getpid()}) == devices + 1


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
    words = (caught.value.given, caught.value.allowed, caught.value.remedy)
    assert words == ("loss is nan at step 3", "finite losses", "lower the learning rate")


@pytest.mark.parametrize(
    ("how", "rank", "watch", "message", "lost"),
    [
        ("SIGKILL", 1, False, "rank 1 of 3 was killed by SIGKILL", 1),
        ("SIGSEGV", 1, False, "rank 1 of 3 was killed by SIGSEGV", 0),
        ("SIGSEGV", 1, True, "rank 1 of 3 was killed by SIGSEGV", 0),
        ("exception", 1, True, "rank 1 of 3 failed: ZeroDivisionError", 0),
        ("exit", 0, False, "rank 0 of 3 failed: SystemExit: 7", 0),
    ],
)
def test_the_rank_that_ended_a_job_is_named(
    how: str, rank: int, watch: bool, message: str, lost: int, on_ranks: OnRanks
) -> None:
    with pytest.raises(jobs.JobFailed, match=message) as caught:
        on_ranks("launch_tasks:fail", {"rank": rank, "how": how}, devices=3, watch=watch)
    assert (caught.value.rank, caught.value.lost) == (rank, lost)


@pytest.mark.parametrize(
    ("ranks", "names"), [([1, 2], "ranks 1 and 2 of 4"), ([0, 1, 2, 3], "ranks 0, 1, 2 and 3 of 4")]
)
def test_all_ranks_of_a_watched_job_that_were_killed_are_counted(
    ranks: list[int], names: str, on_ranks: OnRanks
) -> None:
    """Though the launcher kills the rest of them in the same way, at once."""
    with pytest.raises(jobs.JobFailed) as caught:
        on_ranks("launch_tasks:kill", {"ranks": ranks}, devices=4, watch=True)
    assert (caught.value.given, caught.value.lost) == (f"{names} were killed by SIGKILL", len(ranks))


@pytest.mark.parametrize(
    ("state", "lost"),
    [
        (JobState(first_ended=1, reported_signal=9), 1),
        (JobState(reported_signal=9), 1),
        (JobState(reported_signal=11), 0),
    ],
)
def test_without_watching_a_killed_rank_is_one_lost_at_least(state: JobState, lost: int) -> None:
    error = failure_report.failure(9, state, 3)
    assert isinstance(error, jobs.JobFailed) and error.lost == lost


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        (255, 15, "rank 1 of 2 was killed by SIGTERM"),
        (255, 9, "rank 1 of 2 was killed by SIGKILL"),
        (255, 3, "rank 1 of 2 ended with exit code 255"),
        (9, 9, "rank 1 of 2 ended with exit code 9"),
    ],
)
def test_where_a_proxy_failed_too_the_status_that_mpiexec_reports_is_a_signal(
    code: int, status: int, words: str
) -> None:
    state = JobState(first_ended=1)
    OutputFilter(state).to_stderr(f"=   EXIT CODE: {status}".encode())
    assert getattr(failure_report.failure(code, state, 2), "given", "") == words


def test_ranks_that_get_a_hang_up_go_on_and_print_nothing(on_ranks: OnRanks, capfd: pytest.CaptureFixture[str]) -> None:
    assert on_ranks("launch_tasks:hung_up", devices=2, stdout=True) == 2
    assert capfd.readouterr() == ("", "")


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
    environment = os.environ | {"PYTHONPATH": extended_path(HERE.parents[1], HERE), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"running\n"
        process.send_signal(ending)
        assert process.wait(100) != 0
    _assert_ended(tmp_path)


def _assert_ended(folder: Path) -> None:
    pids = [path.read_text() for path in folder.glob("*.pid")]
    assert pids
    deadline = time.monotonic() + 100
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
    with pytest.raises(CommunicationError, match=r"pip install -e '\.\[mpich\]'"):
        jobs.on_ranks("launch_tasks:echo", {}, devices=2)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a shell script in the place of mpiexec."""

    def replace(script: str) -> None:
        path = tmp_path / "mpiexec"
        path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\n{script}\n')
        path.chmod(0o755)
        monkeypatch.setattr(jobs, "mpiexec_path", lambda: str(path))

    return replace


def test_an_mpiexec_of_another_mpi_is_found_out(stand_in: Callable[[str], None]) -> None:
    stand_in('shift 2; "$@"')  # starts one rank, not two
    with pytest.raises(CommunicationError, match="asked for 2 ranks, but MPI reports 1"):
        jobs.on_ranks("launch_tasks:echo", {}, devices=2)


@pytest.mark.parametrize(
    "ending",
    [
        "true & wait; exec sleep 600",
        "kill -PIPE $$",
        "echo '[mpiexec@host] control_cb (pm/pmiserv_cb.c:280): assert (!closed) failed' >&2; exit 255",
        "echo '[mpiexec@host] ui_cmd_cb (pm/pmiserv_pmci.c:51): Launch proxy failed.' >&2; exit 255",
    ],
)
def test_an_mpiexec_that_loses_its_proxy_ends_the_job_and_the_proxy_is_named(
    ending: str, stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is connected to its proxy, mpiexec would wait for ever; later it fails in other words, or dies."""
    stand_in(ending)
    monkeypatch.setattr(mpiexec, "_FAILED_S", 0.1)
    with pytest.raises(jobs.JobFailed, match="hydra_pmi_proxy, by which mpiexec starts the ranks, ended before them"):
        jobs.on_ranks("launch_tasks:echo", {}, devices=2)


def test_a_rank_that_cannot_print_for_its_proxy_has_ended_is_no_cause() -> None:
    state = JobState(errors=[failure_report.describe(BrokenPipeError(), 3)], proxy_lost=True)
    assert "hydra_pmi_proxy" in str(failure_report.failure(255, state, 4))


def test_a_rank_that_crashes_after_another_was_killed_is_no_cause() -> None:
    crash = "Fatal Python error: Segmentation fault"
    state = JobState(reported_signal=signal.SIGKILL, first_ended=0, faults={1: crash}, pids={0: ("a", 1), 1: ("a", 2)})
    assert "rank 0 of 2 was killed by SIGKILL" in str(failure_report.failure(137, state, 2))
    state.reported_signal = signal.SIGSEGV
    assert "rank 1 of 2 was killed by SIGSEGV" in str(failure_report.failure(139, state, 2))


def test_what_is_no_job_is_a_mistake(on_ranks: OnRanks) -> None:
    with pytest.raises(ConfigError, match="devices is 0"):
        jobs.on_ranks("launch_tasks:echo", {}, devices=0)
    with pytest.raises(ConfigError, match="no task 'launch_tasks:nonsense'"):
        on_ranks("launch_tasks:nonsense", devices=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(64, hard), hard))
    try:
        with pytest.raises(CommunicationError, match="cannot start 200 ranks"):
            jobs.on_ranks("launch_tasks:echo", {}, devices=200, timeout_s=30)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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


def inside(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments on ranks that mpiexec starts."""
    path = jobs.mpiexec_path()
    assert path is not None
    environment = os.environ | {"PYTHONPATH": extended_path(HERE.parents[1], HERE)}
    command = [path, "-n", str(ranks), sys.executable, *arguments]
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
    done = inside(ranks, "-c", program)
    assert (done.returncode, done.stdout) == (0, f"1\n{total}\n"), done.stderr


@pytest.mark.parametrize(
    ("task", "devices", "words"),
    [
        ("'launch_tasks:sum_ranks', {}", 3, "devices is 3, but this job was started with 2 ranks"),
        ("'launch_tasks:fail', {'rank': 1, 'how': 'exception'}", 2, "ZeroDivisionError: the reason"),
    ],
)
def test_inside_a_job_too_few_ranks_are_refused_and_a_failing_rank_ends_all(
    task: str, devices: int, words: str
) -> None:
    done = inside(2, "-c", f"from dpsim.launch import jobs\njobs.on_ranks({task}, devices={devices})\n")
    assert done.returncode != 0
    assert words in done.stderr


def test_inside_a_job_the_command_line_speaks_once() -> None:
    done = inside(2, "-m", "dpsim", "trian")
    assert done.returncode == 2
    assert done.stderr.count("unknown command 'trian'") == 1


MPICH_REPORT = """a rank's own words

===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 4711 RUNNING AT host
=   EXIT CODE: 9
===================================================================================
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
Abort(1) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 1) - process 1"""
OPENMPI_REPORT = f"""{"-" * 74}
prterun noticed that process rank 1 with PID 12 on node x exited on
signal 11.
{"-" * 74}"""


@pytest.mark.parametrize(
    ("report", "said", "reported"), [(MPICH_REPORT, "a rank's own words\n", (None, 9)), (OPENMPI_REPORT, "", (1, 11))]
)
def test_the_launchers_own_noise_is_kept_back(
    report: str, said: str, reported: tuple[int | None, int], capsys: pytest.CaptureFixture[str]
) -> None:
    state = JobState()
    lines = OutputFilter(state)
    for line in report.encode().splitlines():
        lines.to_stderr(line)
    assert (state.reported_rank, state.reported_signal) == reported
    assert capsys.readouterr().err == said


def test_an_mpiexec_that_was_terminated_as_it_connected_to_its_proxies_is_named() -> None:
    state, report = JobState(), "[mpiexec@host] HYD_pmcd_pmiserv_send_signal (a.c:218): unable to write data to proxy"
    OutputFilter(state).to_stderr(report.encode())
    assert getattr(failure_report.failure(255, state, 2), "given", "") == "mpiexec was killed by SIGTERM"


TRACE = "Traceback (most recent call last):\nZeroDivisionError: the reason\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            jobs.JobFailed("rank 1 of 2 failed: ZeroDivisionError: the reason", rank=1, traceback=TRACE),
            1,
            f"{TRACE}dpsim: rank 1 of 2 failed: ZeroDivisionError: the reason\n",
        ),
        (NotFiniteError("loss is nan", remedy="lower it"), 2, "dpsim: loss is nan\n  to do:   lower it\n"),
    ],
)
def test_the_command_line_ends_with_a_ranks_error(
    error: DpsimError, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        raise error

    monkeypatch.setattr("dpsim.harness.doctor.examine", broken)
    assert app.run(["doctor"]) == code
    assert capsys.readouterr().err.endswith(said)


def test_the_port_of_mpiexec_does_not_stay_open_in_its_ranks(on_ranks: OnRanks) -> None:
    one, other = on_ranks("launch_tasks:tcp_listeners", devices=2)
    assert not {*one} & {*other}, "each has what its own MPI opened alone"
