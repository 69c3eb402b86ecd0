"""gpu_check: its record from raw samples, its refusals, and the whole of it in numba's CUDA simulator."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from python_path import extended_path

from dpsim.comm.cuda.driver import Driver, DriverGpu
from dpsim.errors import ConfigError, FileFormatError
from dpsim.experiments.gpu_check import __main__ as gpu_check
from dpsim.experiments.gpu_check import probes
from dpsim.experiments.gpu_check import record as r
from dpsim.kernels.allreduce import registry
from dpsim.launch import child_process, jobs
from dpsim.study.environment import environment

Python = Callable[..., subprocess.CompletedProcess[str]]
ROOT = Path(__file__).parents[2]
MIB = 1 << 20
SMALL_LAUNCHES = "NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS"


def samples(algorithm: str, size_bytes: int, time_s: float, **other: Any) -> r.Samples:
    given: dict[str, Any] = {
        "mode": "one-launch",
        "devices": 2,
        "processes": 1,
        "dtype": "float32",
        "wrong": 0,
        "clock": "events",
        "samples_s": (time_s, time_s / 2, time_s * 3),
        "copy_s": (1e-3, 0.9e-3, 5e-3),
        "empty_s": (4e-6, 4e-6, 9e-6),
    }
    return r.Samples(algorithm=algorithm, size_bytes=size_bytes, **given | other)


def record(
    *taken: r.Samples, simulated: bool = False, names: tuple[str, ...] = ("NVIDIA H100 80GB HBM3",)
) -> r.GpuCheck:
    gpus = r.Gpus(
        names=names,
        driver="580.95.05",
        cuda="driver 13.1",
        numba_cuda="0.30.4",
        cupy="14.2.0",
        simulated=simulated,
    )
    return r.derived(
        r.GpuCheck(
            taken_at="2026-11-21T08:00:00.000Z",
            environment=environment(),
            gpus=gpus,
            tests=r.Tests(passed=True, line="9 passed in 1.0s"),
            samples=taken,
            summary=r.Summary(seconds=100.0, left_out=("NCCL: none",), failed=("ranks: they hung",)),
        )
    )


def test_a_point_is_the_median_of_its_samples_against_the_copies_beside_them() -> None:
    one = r.point(samples("ring", 64 * MIB, 2e-3, devices=4))
    assert (one["time_s"], one["p50_s"]) == (2e-3, 2e-3)
    assert 5.9e-3 < one["p99_s"] <= 6e-3
    assert one["fraction_of_bound"] == pytest.approx(0.5)
    assert one["algbw_bytes_per_s"] == pytest.approx(64 * MIB / 2e-3)
    assert one["busbw_bytes_per_s"] == pytest.approx(64 * MIB / 2e-3 * 1.5)
    assert (one["in_place"], one["cached"], one["empty_launch_s"]) == (True, False, 4e-6)
    between = r.point(samples("ring", 4, 1e-5, copy_s=(), empty_s=(), processes=2, mode="flags", clock="host"))
    assert (between["fraction_of_bound"], between["empty_launch_s"]) == (None, None)


def test_claims_are_of_the_fastest_right_algorithm() -> None:
    actual = record(
        samples("ring", 64 * MIB, 2e-3),
        samples("two-shot", 64 * MIB, 1.1e-3),
        samples("one-shot", 64 * MIB, 0.5e-3, wrong=1),
        samples("two-shot", 256 * MIB, 1.3e-3),
        samples("one-shot", 4, 5e-6),
        samples("one-shot", 64 << 10, 7e-6),
        samples("one-shot", MIB, 7e-6),
        samples("two-shot", 64 * MIB, 1e-4, copy_s=(), empty_s=(), processes=2, mode="flags", clock="host"),
    )
    columns = itemgetter("size_bytes", "algorithm", "measured", "better", "target", "met")
    claims = [columns(claim | {"measured": round(claim["measured"], 3)}) for claim in actual.claims]
    assert claims == [
        (4, "one-shot", 1.25, "at most", 1.5, True),
        (64 << 10, "one-shot", 1.75, "at most", 1.5, False),
        (64 * MIB, "two-shot", 0.909, "at least", 0.85, True),
        (256 * MIB, "two-shot", 0.769, "at least", 0.85, False),
    ]
    assert (actual.summary.claims, actual.summary.claims_met, actual.summary.wrong) == (4, 2, 1)


def test_the_table_names_the_fastest_of_each_size_and_every_target() -> None:
    text = r.table(record(samples("ring", 64 * MIB, 2e-3), samples("two-shot", 64 * MIB, 1.3e-3, wrong=3)))
    assert [" ".join(line.split()) for line in text.splitlines()] == [
        "size devices mode algorithm time busbw of bound wrong",
        "64 MiB 2 one-launch two-shot 1300.00 us 51.6 GB/s 77% 3",
        "MISSED fraction of the bound, 2 devices of 64 MiB (ring): 0.50, at least 0.85",
        "left out: NCCL: none",
        "FAILED: ranks: they hung",
        "tests: 9 passed in 1.0s",
    ]


@pytest.mark.parametrize(
    ("names", "simulated", "name"),
    [
        (("NVIDIA H100 80GB HBM3",), False, "2026-11-21-nvidia-h100-80gb-hbm3.json"),
        (("NVIDIA A100-SXM4-40GB",) * 4, False, "2026-11-21-4x-nvidia-a100-sxm4-40gb.json"),
        (("numba's CUDA simulator",), True, "simulator-2026-11-21-numba-s-cuda-simulator.json"),
    ],
)
def test_a_record_is_named_by_day_and_gpu(names: tuple[str, ...], simulated: bool, name: str) -> None:
    assert r.file_name(record(samples("ring", 4, 1e-5), names=names, simulated=simulated)) == name


def test_a_record_comes_back_from_its_file_and_is_a_contribution(tmp_path: Path) -> None:
    written = record(samples("ring", 4, 1e-5), samples("ring", 64 * MIB, 2e-3))
    r.codec.write(tmp_path / "a.json", written)
    back = r.read(tmp_path / "a.json")
    assert back == written
    r.check_contribution(back)
    (tmp_path / "b.json").write_text((tmp_path / "a.json").read_text().replace(r.SCHEMA, "dpsim.results/1"))
    with pytest.raises(FileFormatError, match="not a gpu-check file"):
        r.read(tmp_path / "b.json")


def test_what_is_no_contribution_is_refused() -> None:
    real = record(samples("ring", 64 * MIB, 2e-3))
    better = tuple(claim | {"measured": 0.99, "met": True} for claim in real.claims)
    faster = tuple(point | {"time_s": 1e-6} for point in real.points)
    for refused, reason in (
        (record(samples("ring", 4, 1e-5), simulated=True), "simulator"),
        (record(), "no measurement"),
        (msgspec.structs.replace(real, summary=msgspec.structs.replace(real.summary, running="tests")), "ended during"),
        (msgspec.structs.replace(real, claims=better), "do not follow"),
        (msgspec.structs.replace(real, points=faster), "do not follow"),
    ):
        with pytest.raises(ConfigError, match=reason):
            r.check_contribution(refused)


def test_contributed_files_are_contributions_under_their_own_name() -> None:
    for path in (ROOT / "reports" / "contributed").glob("*.json"):
        actual = r.read(path)
        r.check_contribution(actual)
        assert path.name == r.file_name(actual)


def test_the_documentation_quotes_a_record() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    quoted = [line for line in page.splitlines() if line.startswith(("met ", "MISSED "))]
    (named,) = set(re.findall(r"reports/contributed/([\w-]+\.json)", page))
    lines = r.table(r.read(ROOT / "reports" / "contributed" / named)).splitlines()
    assert len(quoted) == 7 and set(quoted) <= set(lines)


def test_no_path_of_a_machine_is_kept() -> None:
    here = msgspec.structs.replace(environment(), variables={"NUMBA_CACHE_DIR": "/home/x", "OMP_NUM_THREADS": "1"})
    assert gpu_check.without_paths(here).variables == {"OMP_NUM_THREADS": "1"}


def test_without_a_gpu_it_says_so_in_one_line_and_exits_with_2(python: Python) -> None:
    done = python("-m", "dpsim.experiments.gpu_check", env={"CUDA_VISIBLE_DEVICES": "", "NUMBA_ENABLE_CUDASIM": "0"})
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("gpu-check: there is no GPU to check here: ")


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs gpu_check on a driver with a GPU, with probes of the test's own; the exit code."""

    def run(folder: Path, probe_all: Callable[..., None]) -> int:
        driver = Driver(cuda_version=13000, gpus=(DriverGpu(name="NVIDIA H100", capability=(9, 0)),))
        monkeypatch.setattr(gpu_check, "ask", lambda: driver)
        monkeypatch.setenv(SMALL_LAUNCHES, "")
        monkeypatch.delenv(SMALL_LAUNCHES)  # both are undone, also where main sets it
        monkeypatch.setattr(gpu_check, "probe_all", probe_all)
        monkeypatch.setattr(sys, "argv", ["gpu_check", "--output", str(folder)])
        return gpu_check.main()

    return run


def test_where_no_kernel_can_run_the_record_says_why(checked: Callable[..., int], tmp_path: Path) -> None:
    failing = r.Probe(name="NVVM", works=False, text="no libnvrtc.so.13", remedy="bring it")

    def probe_all(driver: Driver, known: Callable[[r.Probe], None], tell: Callable[[str], None]) -> None:
        known(failing)
        assert os.environ[SMALL_LAUNCHES] == "0"  # no warning of each launch of a few blocks

    assert checked(tmp_path / "new", probe_all) == 1
    (path,) = (tmp_path / "new").iterdir()
    actual = r.read(path)
    assert (actual.probes, actual.summary.running, actual.summary.claims) == ((failing,), "", 0)
    assert "training: not run, because NVVM fails" in actual.summary.failed


def test_a_run_that_is_killed_while_it_probes_leaves_a_record(checked: Callable[..., int], tmp_path: Path) -> None:
    def probe_all(*given: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checked(tmp_path, probe_all)
    (path,) = tmp_path.iterdir()
    assert r.read(path).summary.running == "probes"


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_probed(
    checked: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert checked(tmp_path / "file", lambda *given: pytest.fail("it probes")) == 2
    assert "--output" in capsys.readouterr().err


def test_the_drivers_version_is_read_from_the_kernels_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = tmp_path / "version"
    monkeypatch.setattr(probes, "_DRIVER", version)
    assert probes.kernel_driver() == "unknown"
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n")
    assert probes.kernel_driver() == "580.95.05"


needs_numba_cuda = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda is not installed"
)


def simulated(done: subprocess.CompletedProcess[str], folder: Path) -> r.GpuCheck:
    """The record of a run in the simulator, which is complete and no contribution."""
    assert done.returncode == 0, done.stderr
    (path,) = folder.iterdir()
    actual = r.read(path)
    assert path.name == r.file_name(actual) and path.name.startswith("simulator-")
    assert actual.gpus.simulated and "the times mean nothing" in done.stdout
    assert actual.summary.running == "" and actual.summary.wrong == 0
    assert actual.summary.failed == ()
    assert all("PyTorch is not compared with the simulator" in reason for reason in actual.summary.left_out)
    assert len(actual.summary.left_out) + len(actual.trainings) == len(r.TARGETS)
    ran = {(point["algorithm"], point["processes"]) for point in actual.points}
    assert ran == {(version.name, processes) for version in registry.versions("cuda") for processes in (1, 2)}
    with pytest.raises(ConfigError, match="simulator"):
        r.check_contribution(actual)
    return actual


@pytest.mark.slow
@pytest.mark.timeout(240)
@needs_numba_cuda
def test_the_simulator_runs_the_same_benchmark_and_its_record_is_no_contribution(
    python: Python, tmp_path: Path
) -> None:
    arguments = ("-m", "dpsim.experiments.gpu_check", "--output", str(tmp_path))
    simulated(python(*arguments, env={"NUMBA_ENABLE_CUDASIM": "1"}, timeout_s=220), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(240)
@needs_numba_cuda
def test_ranks_that_a_launcher_started_run_it_together(tmp_path: Path) -> None:
    mpiexec = jobs.mpiexec_path()
    assert mpiexec is not None
    command = [mpiexec, "-n", "2", sys.executable, "-m", "dpsim.experiments.gpu_check", "--output", str(tmp_path)]
    variables = os.environ | {"NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": extended_path(ROOT)}
    simulated(child_process.run(command, env=variables, timeout_s=220), tmp_path)
