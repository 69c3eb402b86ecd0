"""What gpu_check probes, with libraries of the test's own: each a line, with what to do, and never a hang."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dpsim.comm.cuda.driver import Driver, DriverGpu
from dpsim.errors import CommunicationError
from dpsim.experiments.gpu_check import probes
from dpsim.experiments.gpu_check.libraries import CUPY_STEPS, NUMBA_STEPS
from dpsim.experiments.gpu_check.record import Probe

GPU = DriverGpu(name="NVIDIA H100", capability=(9, 0))
DRIVER = Driver(cuda_version=12040, gpus=(GPU, GPU))
ALL = {"numba-cuda": "0.30.4", "NVVM": "compiles", "launch": "a kernel runs", "cudadevrt": "a cooperative kernel runs"}


def of_program(program: str, group: str = "numba", timeout_s: float = 60) -> dict[str, Probe]:
    command = (sys.executable, "-c", program)
    return {probe.name: probe for probe in probes.probe_libraries(group, DRIVER, command, timeout_s)}


def test_every_library_that_works_is_a_line() -> None:
    lines = [f"print({name!r}, {text!r}, sep='\\t')" for name, text in ALL.items()]
    actual = of_program("; ".join(lines))
    assert {name: probe.text for name, probe in actual.items()} == ALL
    assert all(probe.works for probe in actual.values())
    assert actual["NVVM"].line == "NVVM        ok     compiles"


def test_the_first_that_fails_says_why_and_what_to_do_and_the_others_are_not_tried() -> None:
    program = "print('numba-cuda', '0.30.4', sep='\\t', flush=True)\nraise OSError('no /home/someone/lib/libnvvm.so')"
    actual = of_program(program)
    assert actual["numba-cuda"].works and not actual["NVVM"].works
    assert actual["NVVM"].text == "OSError: no libnvvm.so"  # a folder may name a user
    assert "CUDA_HOME" in actual["NVVM"].remedy and "'.[cuda12]'" in actual["NVVM"].remedy
    assert actual["launch"].text == "not tried, because NVVM fails"
    assert actual["NVVM"].line.startswith("NVVM        FAILS  OSError: no libnvvm.so; to do: set CUDA_HOME")


def test_the_reason_is_the_error_also_where_more_lines_follow_it() -> None:
    program = "raise LookupError('no libnvrtc.so.13\\n  listdir:\\n    libpcsamplingutil.so')"
    assert of_program(program)["numba-cuda"].text == "LookupError: no libnvrtc.so.13"


def test_a_numpy_that_is_too_new_for_numba_cuda_is_the_remedy() -> None:
    program = "import numpy\nprint('numba-cuda', '0.30.4', sep='\\t', flush=True)\nnumpy.a_function_that_was_removed"
    assert of_program(program)["NVVM"].remedy == (
        f"numba-cuda does not work with NumPy {np.__version__}: pip install 'numpy<2.5', or add its wheel to WHEELS"
    )


@pytest.mark.parametrize(
    ("program", "timeout_s", "reason"),
    [
        ("import os; os.kill(os.getpid(), 11)", 60, "killed by signal 11"),
        ("import time; time.sleep(600)", 0.3, "no answer after 0 s"),
        ("import sys; sys.exit(4)", 60, "exit code 4"),
    ],
)
def test_a_library_that_crashes_or_hangs_is_no_more_than_a_line(program: str, timeout_s: float, reason: str) -> None:
    assert of_program(program, timeout_s=timeout_s)["numba-cuda"].text == reason


def test_a_hang_after_a_step_keeps_the_step() -> None:
    program = "import time\nprint('CuPy', '14.2.0, runtime 12.9', sep='\\t', flush=True)\ntime.sleep(600)"
    actual = of_program(program, "cupy", timeout_s=3)
    assert actual["CuPy"].works and not actual["cuBLAS"].works
    assert "cupy-cuda12x[ctk]" in actual["cuBLAS"].remedy
    assert actual["NCCL"].text == "not tried, because cuBLAS fails"


def test_every_library_has_a_remedy_for_the_drivers_cuda() -> None:
    for name in (*NUMBA_STEPS, *CUPY_STEPS, "MPI"):
        assert probes.remedy(name, DRIVER)
        assert "cu13" not in probes.remedy(name, DRIVER) and "cuda13" not in probes.remedy(name, DRIVER)


def toolkit(folder: Path, version: str, *, nvvm: bool = True, libraries: str = "lib64") -> Path:
    (folder / "nvvm" / libraries).mkdir(parents=True)
    if nvvm:
        (folder / "nvvm" / libraries / "libnvvm.so.4").touch()
    (folder / "version.json").write_text(json.dumps({"cuda": {"version": version}}))
    return folder


def test_toolkits_that_are_newer_than_the_driver_or_have_no_nvvm_are_not_used(tmp_path: Path) -> None:
    old, own = toolkit(tmp_path / "a", "11.8.0"), toolkit(tmp_path / "b", "12.4.1")
    folders = [old, toolkit(tmp_path / "c", "13.0.2"), own, toolkit(tmp_path / "d", "12.2", nvvm=False), tmp_path / "e"]
    assert probes.toolkits(DRIVER, folders) == [own, old]


def test_a_toolkit_that_was_made_of_wheels_is_one(tmp_path: Path) -> None:
    folder = toolkit(tmp_path / "a", "12.4.1", libraries="lib")
    assert probes.toolkits(DRIVER, [folder]) == [folder]


def numba_that_needs(home: Path | None, variables: dict[str, str]) -> Callable[[str], tuple[Probe, ...]]:
    """numba-cuda whose NVVM is found with one CUDA_HOME alone."""

    def run(group: str) -> tuple[Probe, ...]:
        works = home is not None and variables.get("CUDA_HOME") == str(home)
        return tuple(Probe(name=name, works=works or name == "numba-cuda", text="") for name in NUMBA_STEPS)

    return run


def test_a_toolkit_that_has_what_is_missing_is_used_for_the_run(tmp_path: Path) -> None:
    useless, useful = toolkit(tmp_path / "a", "12.4"), toolkit(tmp_path / "b", "12.2")
    variables: dict[str, str] = {}
    told: list[str] = []
    run = numba_that_needs(useful, variables)
    actual = probes.probe_numba(DRIVER, run, variables, told.append, [useless, useful])
    assert all(probe.works for probe in actual)
    assert variables == {"CUDA_HOME": str(useful)} and str(useful) in told[0]


def test_where_no_toolkit_helps_nothing_is_changed(tmp_path: Path) -> None:
    variables: dict[str, str] = {}
    run = numba_that_needs(None, variables)
    actual = probes.probe_numba(DRIVER, run, variables, lambda text: None, [toolkit(tmp_path / "a", "12.4")])
    assert [probe.works for probe in actual] == [True, False, False, False] and variables == {}


def test_the_users_own_cuda_home_stays(tmp_path: Path) -> None:
    variables = {"CUDA_HOME": "/elsewhere"}
    useful = toolkit(tmp_path / "a", "12.4")
    actual = probes.probe_numba(DRIVER, numba_that_needs(useful, variables), variables, lambda text: None, [useful])
    assert not all(probe.works for probe in actual) and variables == {"CUDA_HOME": "/elsewhere"}


@pytest.mark.parametrize(
    ("driver", "works", "text"),
    [
        (DRIVER, True, "CUDA 12.4; 2 x NVIDIA H100 (sm_90)"),
        (
            Driver(
                cuda_version=13000, gpus=(DriverGpu(name="A", capability=(8, 0), exclusive=True),), peer_access=False
            ),
            True,
            "CUDA 13.0; 1 x A (sm_80); compute mode EXCLUSIVE_PROCESS; no peer access between the GPUs",
        ),
        (Driver(problem="no NVIDIA driver (libcuda.so.1)"), False, "no NVIDIA driver (libcuda.so.1)"),
    ],
)
def test_the_drivers_line(driver: Driver, works: bool, text: str) -> None:
    assert (probes.probe_driver(driver).works, probes.probe_driver(driver).text) == (works, text)


def test_without_a_driver_nothing_else_is_tried() -> None:
    known: list[Probe] = []
    probes.probe_all(Driver(problem="no NVIDIA driver (libcuda.so.1)"), known.append, lambda text: None)
    (probe,) = known
    assert not probe.works


def test_ranks_that_start_are_a_working_mpi() -> None:
    actual = probes.probe_mpi()
    assert actual.works and actual.text.endswith("2 ranks started with mpiexec"), actual


def test_an_mpi_that_does_not_start_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_ranks(*given: object, **options: object) -> None:
        raise CommunicationError("there is no mpiexec next to this Python or on PATH", remedy="install one")

    monkeypatch.setattr(probes.jobs, "on_ranks", on_ranks)
    actual = probes.probe_mpi()
    assert (actual.works, actual.remedy) == (False, "install one")


def test_ranks_on_several_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes.jobs, "on_ranks", lambda *given, **options: {"library": "MPICH", "nodes": 2})
    assert (probes.probe_mpi().works, probes.probe_mpi().remedy) == (False, "give ranks of one machine: srun -N 1")


def test_a_process_that_is_no_rank_has_none_of_the_launchers_variables() -> None:
    variables = {
        "SLURM_PROCID": "1",
        "PMI_RANK": "1",
        "OMPI_COMM_WORLD_RANK": "1",
        "PATH": "/bin",
        "CUDA_HOME": "/cuda",
    }
    assert probes.alone(variables) == {"PATH": "/bin", "CUDA_HOME": "/cuda"}
