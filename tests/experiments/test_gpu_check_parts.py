"""The parts of gpu_check with programs of the test's own: what is measured is written at once, and nothing hangs."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dpsim.comm.cuda.driver import Driver, DriverGpu
from dpsim.comm.cuda.reproducible import REQUIRED
from dpsim.errors import CommunicationError
from dpsim.experiments.gpu_check import logical, parts
from dpsim.experiments.gpu_check import record as r
from dpsim.experiments.gpu_check.journal import Journal, keep, kept_in
from dpsim.experiments.gpu_check.libraries import CUPY_STEPS, NUMBA_STEPS
from dpsim.launch.rank_info import MpiJob
from dpsim.study.environment import environment

GPU = DriverGpu(name="NVIDIA H100", capability=(9, 0))
ONE_SAMPLE = r.Samples(
    algorithm="ring",
    mode="one-launch",
    devices=2,
    processes=1,
    size_bytes=4,
    dtype="float32",
    wrong=0,
    clock="events",
    samples_s=(1e-5,),
)
ON_RANKS = "dpsim.experiments.gpu_check.between:"


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    for name in ("record", "parts"):
        (tmp_path / name).mkdir()
    gpus = r.Gpus(names=("GPU",), driver="580", cuda="13.0", numba_cuda="0.30", cupy="14", simulated=False)
    return Journal(
        folder=tmp_path / "record",
        parts=tmp_path / "parts",
        taken_at="2026-11-21T08:00:00.000Z",
        begin_s=time.monotonic(),
        environment=environment(),
        gpus=gpus,
    )


def on_disk(journal: Journal) -> r.GpuCheck:
    (path,) = journal.folder.iterdir()
    return r.read(path)


def of_program(journal: Journal, program: str, **options: Any) -> list[str]:
    """``run_logical`` with a program that finds FILE, SECONDS and the versions to leave out in ``sys.argv``."""
    path = journal.parts.parent / "program.py"
    begin = (
        "import sys, time\nfrom pathlib import Path\n"
        "path, without = Path(sys.argv[1]), sys.argv[3:]\n"
        "def note(name): path.with_suffix('.running').write_text(name)\n"
        f"line = {r.codec.to_json(ONE_SAMPLE, indent=None)!r} + chr(10)\n"
        "def one():\n    with path.open('a') as file: file.write(line)\n"
    )
    path.write_text(begin + program)
    parts.run_logical(journal, 20.0, (sys.executable, str(path)), **options)
    return journal.wrong_versions


def test_samples_are_in_the_record_while_the_part_still_runs(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[r.GpuCheck] = []
    write = Journal.write

    def watched(self: Journal) -> r.GpuCheck:
        record = write(self)
        seen.append(on_disk(self))
        if seen[-1].samples:
            (self.parts / "seen").touch()
        return record

    monkeypatch.setattr(Journal, "write", watched)
    monkeypatch.setattr(parts, "_POLL_S", 0.05)
    of_program(journal, "one()\nwhile not path.with_name('seen').exists():\n    time.sleep(0.05)\n")
    assert any(len(each.samples) == 1 and each.summary.running == "logical devices" for each in seen)
    assert (len(seen[-1].samples), seen[-1].summary.running, seen[-1].summary.failed) == (1, "", ())


def test_a_version_that_crashes_is_left_out_and_the_others_go_on(journal: Journal) -> None:
    program = "if 'ring' not in without:\n    note('ring')\n    sys.exit(5)\none()\nprint('8 devices: no memory')\n"
    assert of_program(journal, program) == ["ring"]
    actual = on_disk(journal)
    assert actual.summary.failed == ("logical devices: ring: ended with exit code 5",)
    assert actual.summary.left_out == ("8 devices: no memory",) and len(actual.samples) == 1


def test_a_version_that_hangs_is_killed_and_left_out(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_POLL_S", 0.05)
    program = "if 'ring' not in without:\n    one()\n    note('ring')\n    time.sleep(600)\none()\n"
    assert of_program(journal, program, stall_s=3.0) == ["ring"]
    actual = on_disk(journal)
    assert actual.summary.failed == ("logical devices: ring: nothing happened for 3 s",)
    assert len(actual.samples) == 2


def test_what_fails_before_the_first_version_is_not_tried_again(journal: Journal) -> None:
    assert of_program(journal, "sys.exit(2)") == []
    expected = ("logical devices: before the first version: ended with exit code 2",)
    assert on_disk(journal).summary.failed == expected


def test_a_line_that_was_cut_off_is_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert kept_in(path, r.Samples) == ()
    keep(path, [ONE_SAMPLE, ONE_SAMPLE])
    with path.open("a") as file:
        file.write('{"algorithm": "ri')
    assert kept_in(path, r.Samples) == (ONE_SAMPLE, ONE_SAMPLE)


def test_a_record_that_was_cut_off_says_so_and_is_no_contribution(journal: Journal) -> None:
    keep(journal.parts / "1.jsonl", [ONE_SAMPLE])
    with pytest.raises(KeyboardInterrupt), journal.part("tests"):
        raise KeyboardInterrupt
    actual = on_disk(journal)
    assert (actual.summary.running, len(actual.samples)) == ("tests", 1)
    with pytest.raises(r.ConfigError, match="it ended during: tests"):
        r.check_contribution(actual)


def test_probes_are_in_the_record_as_they_are_known(journal: Journal, capsys: pytest.CaptureFixture[str]) -> None:
    journal.write()
    assert on_disk(journal).probes == ()
    works = r.Probe(name="CuPy", works=True, text="14.2.0, runtime 13.0")
    fails = r.Probe(name="NCCL", works=False, text="no libnccl.so.2", remedy="install it")
    for count, probe in enumerate((works, fails), 1):
        journal.probed(probe)
        assert on_disk(journal).probes == (works, fails)[:count]
    assert "NCCL        FAILS  no libnccl.so.2; to do: install it" in capsys.readouterr().err


def test_sizes_of_the_targets_are_measured_first() -> None:
    sizes = logical.order(logical.Effort().sizes_bytes)
    assert sizes[:2] == [64 << 20, 256 << 20] and sizes[2] == 4 and max(sizes[2:10]) == 64 << 10
    assert sorted(sizes) == sorted(logical.Effort().sizes_bytes)


@pytest.mark.parametrize(
    ("gpus", "job", "counts"),
    [
        (1, None, [2]),
        (2, None, [2]),
        (3, None, [3, 2]),
        (4, None, [4, 2]),
        (6, None, [6, 4, 2]),
        (8, None, [8, 4, 2]),
        (16, None, [8, 4, 2]),
        (1, 4, [4]),
        (4, 1, []),
    ],
)
def test_one_to_eight_gpus_are_used(gpus: int, job: int | None, counts: list[int]) -> None:
    given = None if job is None else MpiJob(launcher="srun", rank=0, size=job)
    assert parts.device_counts(gpus, given) == counts


Ran = list[tuple[str, int]]


@pytest.fixture
def between(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Runs ``run_between`` with tasks that are not run: which were asked for, on how many processes."""

    def run(driver: Driver, *, nccl_missing: str = "", fails: str = "") -> Ran:
        ran: Ran = []

        def on_ranks(task: str, argument: dict[str, Any], *, devices: int, timeout_s: float, **_: Any) -> Any:
            name = task.removeprefix(ON_RANKS)
            ran.append((name, devices))
            assert timeout_s < parts.BETWEEN_END_S
            keep(Path(argument["results"]), [ONE_SAMPLE])
            if name == fails:
                raise CommunicationError("the ranks did not finish within the time limit")
            return {"gpus": min(devices, len(driver.gpus)), "left_out": []}

        monkeypatch.setattr(parts.jobs, "on_ranks", on_ranks)
        if nccl_missing:
            journal.probes.append(r.Probe(name="NCCL", works=False, text=nccl_missing))
        parts.run_between(journal, driver)
        return ran

    return run


def test_nccl_stands_beside_the_kernels_where_every_process_has_a_gpu(between: Callable[..., Ran]) -> None:
    assert between(Driver(gpus=(GPU,) * 4)) == [("kernels", 4), ("nccl", 4), ("kernels", 2), ("nccl", 2)]
    assert between(Driver(gpus=(GPU,))) == [("kernels", 2)]


def test_without_nccl_the_kernels_are_measured_alone(between: Callable[..., Ran], journal: Journal) -> None:
    assert between(Driver(gpus=(GPU,) * 2), nccl_missing="CuPy finds no NCCL") == [("kernels", 2)]
    assert journal.left_out == ["NCCL between 2 processes: CuPy finds no NCCL"]


def test_a_job_that_fails_costs_no_more_than_itself(between: Callable[..., Ran], journal: Journal) -> None:
    assert between(Driver(gpus=(GPU,) * 4), fails="nccl") == [("kernels", 4), ("nccl", 4), ("kernels", 2), ("nccl", 2)]
    limit = "the ranks did not finish within the time limit"
    assert journal.failed == [f"4 processes, nccl: {limit}", f"2 processes, nccl: {limit}"]
    assert len(on_disk(journal).samples) == 4


def test_a_gpu_for_one_process_is_not_given_to_two(between: Callable[..., Ran], journal: Journal) -> None:
    exclusive = DriverGpu(name="GPU", capability=(9, 0), exclusive=True)
    assert between(Driver(gpus=(exclusive,))) == []
    assert journal.left_out == ["2 processes on one GPU: it is in the compute mode EXCLUSIVE_PROCESS"]
    assert between(Driver(gpus=(exclusive,) * 2)) == [("kernels", 2), ("nccl", 2)]


@pytest.mark.parametrize(
    ("failing", "ran"),
    [
        ((), ["logical devices", "training", "between processes", "tests"]),
        (("NCCL",), ["logical devices", "training", "between processes", "tests"]),
        (("MPI",), ["logical devices", "training", "tests"]),
        (("CuPy", "cuBLAS", "NCCL"), ["tests"]),
        (("cuBLAS", "NCCL"), ["logical devices", "between processes", "tests"]),
        (("pytest",), ["logical devices", "training", "between processes"]),
        (("NVVM", "launch", "cudadevrt"), []),
    ],
)
def test_a_library_that_fails_stops_only_what_needs_it(
    failing: tuple[str, ...], ran: list[str], journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = (*NUMBA_STEPS, *CUPY_STEPS, "MPI", "pytest")
    journal.probes.extend(r.Probe(name=name, works=name not in failing, text="") for name in names)
    actual: list[str] = []
    recorded = [part._replace(run=lambda *_, name=part.name: actual.append(name)) for part in parts.PARTS]
    monkeypatch.setattr(parts, "PARTS", recorded)
    parts.run_all(journal, Driver(gpus=(GPU,)))
    assert actual == ran
    assert bool(journal.failed) == bool(set(failing) - {"NCCL"})


@pytest.mark.parametrize(("launcher", "failing"), [("srun", ""), ("", "MPI"), ("", "")])
def test_tests_that_start_ranks_run_where_mpiexec_may_start_them(
    launcher: str, failing: str, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    job = MpiJob(launcher=launcher, rank=0, size=4) if launcher else None
    journal.probes.append(r.Probe(name="MPI", works=failing != "MPI", text=""))
    monkeypatch.setattr(parts.rank_info, "job", lambda: job)
    monkeypatch.setattr(parts, "tested", lambda journal, command, seconds: commands.append(command))
    parts.run_tests(journal, Driver(gpus=(GPU,)))
    assert ("gpu and not slow" in commands[0]) == (not launcher and not failing)
    assert ("gpu and not slow and not ranks" in commands[0]) == bool(launcher or failing)


def test_a_rank_of_a_job_that_never_answers_ends_the_job_with_what_was_measured(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted: list[BaseException] = []
    monkeypatch.setattr(parts.rank_info, "job", lambda: MpiJob(launcher="srun", rank=0, size=4))
    monkeypatch.setattr(parts.rank_process, "abort", aborted.append)
    keep(journal.parts / "1.jsonl", [ONE_SAMPLE])
    with parts._bounded(journal, "4 processes, kernels", 0.05):
        deadline_s = time.monotonic() + 10
        while not aborted and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert len(aborted) == 1
    actual = on_disk(journal)
    assert len(actual.samples) == 1 and "not done after 0 s; the job was ended" in actual.summary.failed[0]


FIGURE = r.Training(name=r.MLP_SPEED, setting="mlp:8", unit="s", own=(2.0, 1.0, 3.0), other=(1.9,))


def of_figures(journal: Journal, program: str, seconds: float = 60.0, **options: Any) -> r.GpuCheck:
    """``run_training`` with a program that finds the file and the name of its figure in ``path`` and ``name``."""
    path = journal.parts.parent / "program.py"
    begin = (
        "import os, sys, time\nfrom pathlib import Path\n"
        "path, name = Path(sys.argv[1]), sys.argv[2]\n"
        f"mlp, reproducible, activations = {r.MLP_SPEED!r}, {r.REPRODUCIBLE!r}, {r.ACTIVATION_BYTES!r}\n"
        f"line = {r.codec.to_json(FIGURE, indent=None)!r} + chr(10)\n"
    )
    path.write_text(begin + program)
    parts.run_training(journal, seconds, (sys.executable, str(path)), **options)
    return on_disk(journal)


def test_a_figure_that_crashes_or_hangs_costs_no_more_than_itself(journal: Journal) -> None:
    actual = of_figures(
        journal,
        "if name == mlp:\n    path.write_text(line)\n    raise TypeError('no such argument of /home/someone/cupy.py')\n"
        "if name == activations:\n    print('no PyTorch')\n"
        "if name == reproducible:\n    time.sleep(600)\n",
        figure_s=5.0,
    )
    assert actual.trainings == (FIGURE,)
    assert [(claim["name"], claim["measured"], claim["met"]) for claim in actual.claims] == [(r.MLP_SPEED, 0.95, True)]
    assert actual.summary.left_out == (f"{r.ACTIVATION_BYTES}: no PyTorch",)
    assert actual.summary.failed == (
        f"{r.MLP_SPEED}: TypeError: no such argument of cupy.py",
        f"{r.REPRODUCIBLE}: not done after 5 s",
    )


def test_each_figure_is_in_the_record_before_the_next_one_begins(journal: Journal) -> None:
    seen = "record = next((path.parents[1] / 'record').iterdir()).read_text()\nprint(record.count('mlp:8'))\n"
    first, second, *_ = of_figures(journal, f"{seen}path.write_text(line)\n").summary.left_out
    assert first.endswith(": 0") and not second.endswith(": 0")


def test_what_training_in_leaves_requires_is_set_before_its_process_starts(journal: Journal) -> None:
    program = f"print([name for name in {list(REQUIRED)!r} if name in os.environ])\n"
    printed = dict(line.rsplit(": ", 1) for line in of_figures(journal, program).summary.left_out)
    assert printed.pop(r.REPRODUCIBLE) == str(list(REQUIRED))
    assert set(printed.values()) == {"[]"}


def test_figures_for_which_there_is_no_time_are_said(journal: Journal) -> None:
    actual = of_figures(journal, "path.write_text(line)\n", seconds=0.0)
    assert actual.summary.left_out == tuple(f"{name}: no time left" for name in r.TARGETS) and not actual.trainings


def outcome_of(journal: Journal, tmp_path: Path, text: str, *options: str) -> r.Tests:
    path = tmp_path / "test_of_the_test.py"
    path.write_text(text)
    command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", "-c", "/dev/null", str(path), *options]
    return parts.tested(journal, command, 60)


def test_tests_that_pass_and_tests_that_fail_are_told_apart(journal: Journal, tmp_path: Path) -> None:
    good = outcome_of(journal, tmp_path, "def test_a():\n    pass\n")
    assert good.passed and good.line.startswith("1 passed")
    bad = outcome_of(journal, tmp_path, "def test_a():\n    assert False\n")
    assert not bad.passed and bad.line.startswith("1 failed")
    assert good.failed == () and len(bad.failed) == 1 and bad.failed[0].endswith("test_of_the_test.py::test_a")


@pytest.mark.parametrize("options", [(), ("-n", "1")])
def test_tests_that_failed_are_named_once_each(options: tuple[str, ...], journal: Journal, tmp_path: Path) -> None:
    text = (
        "import pytest\n@pytest.mark.parametrize('word', ['a b', 'FAILS', 'x'])\n"
        "def test_a(word):\n    assert word == 'x'\n"
        "@pytest.fixture\ndef broken():\n    raise OSError\ndef test_b(broken):\n    pass\n"
    )
    actual = outcome_of(journal, tmp_path, text, *options)
    assert [name.partition("::")[2] for name in actual.failed] == ["test_a[a b]", "test_a[FAILS]", "test_b"]


def test_tests_that_hang_are_killed_and_those_that_ended_are_counted(journal: Journal) -> None:
    lines = (
        "a.py::test_a PASSED [ 1%]",
        "[gw0] [ 2%] FAILED a.py::test_b",
        "a.py::test_c PASSED [ 3%]",
        "a.py::test_d ",
    )
    program = f"import time\nprint(*{lines!r}, sep=chr(10), flush=True)\ntime.sleep(600)"
    actual = parts.tested(journal, [sys.executable, "-c", program], 3)
    assert (actual.passed, actual.line) == (False, "stopped after 3 s: 2 passed, 1 failed")
    assert actual.failed == ("a.py::test_b",)


def test_the_whole_run_stays_below_nine_minutes_whatever_hangs() -> None:
    longest_job_s = parts._LEAST_JOB_S + parts._START_S
    assert parts.LOGICAL_S + parts._STALL_S + parts.TRAINING_S + parts._START_S < parts.BETWEEN_END_S
    assert parts._FIGURE_S < parts.TRAINING_S
    assert parts.BETWEEN_END_S + longest_job_s + parts._LEAST_JOB_S <= parts.TOTAL_S <= 9 * 60 - 20


@pytest.mark.parametrize("simulated", [True, False])
def test_figures_beside_a_pytorch_that_is_not_there_start_no_process(
    simulated: bool, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []

    def run_alone(journal: Journal, command: list[str], *given: object, **options: object) -> parts.Ended:
        taken.append(command[-1])
        return parts.Ended(0, "", "")

    monkeypatch.setattr(parts, "run_alone", run_alone)
    monkeypatch.setattr(parts.importlib.util, "find_spec", lambda name: None)
    run = dataclasses.replace(journal, gpus=msgspec.structs.replace(journal.gpus, simulated=simulated))
    parts.run_training(run, 60.0)
    assert taken == [name for name in r.TARGETS if name not in r.BESIDE_PYTORCH]
    reason = "PyTorch is not compared with the simulator" if simulated else "PyTorch is not installed"
    assert run.left_out == [f"{name}: {reason}" for name in r.TARGETS if name in r.BESIDE_PYTORCH]
