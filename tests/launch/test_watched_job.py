"""The environment of a watched job, and what Python loads in it before anything else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpsim.errors import ConfigError
from dpsim.launch import watched_job


@pytest.mark.parametrize("command", [(), ("no-such-command-of-dpsim", "x")])
def test_a_command_that_cannot_be_started_is_refused(command: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        watched_job.check_command(command)


def in_job(folder: Path, code: str, **environment: str) -> str:
    given = watched_job.environment(folder, 30) | environment
    paths = given["PYTHONPATH"].split(os.pathsep)[:1] + list(filter(None, [environment.get("PYTHONPATH")]))
    given["PYTHONPATH"] = os.pathsep.join(paths)
    return subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True).stdout


def test_the_jobs_own_sitecustomize_is_loaded_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.of_the_job = 1\n", encoding="utf-8")
    shown = in_job(
        tmp_path,
        "import sys, sitecustomize; print(sys.of_the_job, sitecustomize.__file__)",
        PYTHONPATH=str(tmp_path),
    )
    assert shown.split() == ["1", str(tmp_path / "sitecustomize.py")]


def test_the_job_can_import_nothing_that_watches(tmp_path: Path) -> None:
    shown = in_job(
        tmp_path,
        "import importlib.util as u, sys; print(u.find_spec('watched'), any('startup' in p for p in sys.path))",
    )
    assert shown.split() == ["None", "False"]


def test_a_process_of_the_job_knows_that_it_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(watched_job.VARIABLE, raising=False)
    assert not watched_job.is_watched()
    monkeypatch.setenv(watched_job.VARIABLE, watched_job.environment(tmp_path, 30)[watched_job.VARIABLE])
    assert watched_job.is_watched()
