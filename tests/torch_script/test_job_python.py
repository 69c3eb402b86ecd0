"""Which Python a job's script runs with, what is said of one that cannot run it, and on which the probe loads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import dpsim
from dpsim.errors import ConfigError
from dpsim.launch import watched_job
from dpsim.launch.job_python import job_python

Dpsim = Callable[..., tuple[int, str, str]]
PROBE = Path(dpsim.__file__).parent / "torch" / "script" / "probe"
STUB = Path(__file__).parents[1] / "support" / "stub_torch.py"
PYTHONS = (*(f"python3.{minor}" for minor in range(9, 16)), "pypy3")


@pytest.mark.parametrize("name", PYTHONS)
def test_the_probe_loads_on_every_python_at_hand(name: str) -> None:
    of_pyenv = (Path.home() / ".pyenv" / "versions").glob(f"{name.removeprefix('python')}.*/bin/python")
    path = shutil.which(name) or next(of_pyenv, None)
    if path is None:
        pytest.skip(f"not tried: there is no {name} here")
    done = subprocess.run([path, STUB, PROBE], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, f"{len(list(PROBE.rglob('*.py')))}\n"), done.stderr


def python(folder: Path, torch: str | None, name: str = "python", *others: str) -> Path:
    """A program that answers as a Python of a version which nobody has, with this PyTorch; None: with an error."""
    folder.mkdir(parents=True, exist_ok=True)
    answer = f"dpsim asked: {json.dumps(['3.99.0', torch])}"
    (folder / name).write_text(f"#!/bin/sh\necho '{answer}'\n" if torch is not None else "#!/bin/sh\nexit 3\n")
    for each in (name, *others):
        (folder / each).touch()
        (folder / each).chmod(0o755)
    return folder / name


@pytest.fixture(autouse=True)
def nothing_active(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


def test_the_python_is_that_of_the_active_environment_or_beside_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = python(tmp_path / "beside", "2.7.1", "python3", "torchrun")
    python(tmp_path / "without" / "bin", "")
    conda = python(tmp_path / "conda" / "bin", "2.8.0")
    active = python(tmp_path / "active" / "bin", "2.9.0")
    monkeypatch.setenv("PATH", os.pathsep.join(["/usr/bin", str(beside.parent)]))
    assert job_python().path == str(beside)
    monkeypatch.setenv("CONDA_PREFIX", str(conda.parents[1]))
    assert job_python().path == str(conda)
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "without"))
    assert job_python().path == str(conda)
    monkeypatch.setenv("VIRTUAL_ENV", str(active.parents[1]))
    assert (job_python().path, job_python().version, job_python().torch) == (str(active), "3.99.0", "2.9.0")
    assert job_python(str(beside)).torch == "2.7.1"


def test_its_processes_get_nothing_of_dpsims_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, own = python(tmp_path / "bin", "2.9.0"), os.path.dirname(sys.executable)
    monkeypatch.setenv("PATH", os.pathsep.join([own, str(job.parent), "/bin"]))
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    monkeypatch.setenv("PYTHONPATH", "/of/the/job")
    variables = job_python(str(job)).environment()
    assert variables["PATH"] == os.pathsep.join([str(job.parent), "/bin"])
    assert "VIRTUAL_ENV" not in variables and variables["PYTHONPATH"] == "/of/the/job"


def test_a_job_that_is_started_as_it_is_finds_the_programs_of_the_active_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, own = python(tmp_path / "env" / "bin", "2.9.0"), os.path.dirname(sys.executable)
    monkeypatch.setenv("PATH", os.pathsep.join([own, str(job.parent), "/bin"]))
    for active in (None, sys.prefix):
        if active:
            monkeypatch.setenv("VIRTUAL_ENV", active)
        assert watched_job.environment(None, 30)["PATH"].split(os.pathsep)[0] == own
    monkeypatch.setenv("VIRTUAL_ENV", str(job.parents[1]))
    assert watched_job.environment(None, 30)["PATH"] == os.pathsep.join([str(job.parent), "/bin"])
    of_dpsim = next(path.name for path in Path(own).iterdir() if not shutil.which(path.name, path=f"{job.parent}:/bin"))
    assert watched_job.environment(None, 30, of_dpsim)["PATH"].split(os.pathsep)[0] == own


@pytest.mark.parametrize(
    ("torch", "message"),
    [
        ("", r"is Python 3\.99\.0 without PyTorch[\s\S]*to do: +name that one, or install PyTorch there"),
        ("2.1.2", r"has PyTorch 2\.1\.2\n +allowed: PyTorch 2\.4 or newer"),
        (None, r"does not run as Python does: exit code 3\n +allowed: a Python for this machine's processor"),
    ],
)
def test_a_python_that_cannot_run_a_script_is_refused(tmp_path: Path, torch: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        job_python(str(python(tmp_path / "bin", torch)))


def test_a_program_for_another_processor_and_one_that_is_not_there_are_refused(tmp_path: Path) -> None:
    (tmp_path / "python").write_bytes(b"\x7fELF" + bytes(60))
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(ConfigError, match=r"does not run as Python does: Exec format error"):
        job_python(str(tmp_path / "python"))
    with pytest.raises(ConfigError, match=r"--python nothing/here: there is no such program"):
        job_python("nothing/here")


def test_python_without_a_script_is_refused(dpsim: Dpsim, tmp_path: Path) -> None:
    assert dpsim("reproduce", "--python", "python3")[0] == 2
    code, _, err = dpsim("profile", "--python", "python3", "--output", tmp_path / "w.json")
    assert code == 2 and "--python without --torch-script" in err
