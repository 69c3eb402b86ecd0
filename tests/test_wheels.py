"""The wheel and the source distribution of ``make dist``, in fresh environments outside of the checkout."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "train_ddp.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def run(*command: str | Path, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, with no compiler, and nothing of the environment that the tests run in."""
    own = {"PYTHONPATH", "VIRTUAL_ENV", "DPSIM_CACHE_DIR", "NUMBA_CACHE_DIR"}
    kept = {name: value for name, value in os.environ.items() if name not in own}
    env = kept | {"CC": "false", "CXX": "false", "DPSIM_CACHE_DIR": str(folder / "cache")} | variables
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=1000, check=False)


def succeeded(*command: str | Path, folder: Path, **variables: str) -> str:
    done = run(*command, folder=folder, **variables)
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    succeeded("make", "-C", ROOT, "dist", f"DIST={folder}", f"VENV={sys.prefix}", folder=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    [built] = dist.glob("dpsim_train-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(dist: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of a fresh environment, into which the wheel was installed."""
    folder = tmp_path_factory.mktemp("installed")
    succeeded(Path(sys.base_prefix) / "bin" / "python3", "-m", "venv", folder / "env", folder=folder)
    pip = (folder / "env" / "bin" / "python", "-m", "pip", "--quiet", "--quiet", "install")
    succeeded(*pip, f"{wheel}[mpich]", folder=folder)
    return folder / "env" / "bin"


def packaged(names: list[str]) -> set[str]:
    return {name for name in names if name.startswith("dpsim/") and not name.endswith("/")}


def test_both_have_every_file_of_the_package_and_no_test(dist: Path, wheel: Path) -> None:
    assert wheel.stat().st_size <= 3e6
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    links = {"experiments/": "dpsim/experiments/", "kernels/": "dpsim/kernels/"}
    places = [
        next((to + name.removeprefix(at) for at, to in links.items() if name.startswith(at)), name) for name in tracked
    ]
    expected = packaged(places) - {"dpsim/experiments", "dpsim/kernels"}
    assert packaged(zipfile.ZipFile(wheel).namelist()) == expected
    [source] = dist.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = [member.name.partition("/")[2] for member in archive if member.isfile()]
    assert packaged(names) == expected
    assert not [name for name in names if "test" in name and not name.startswith("dpsim/")]


def test_the_source_distribution_installs_what_the_wheel_has(dist: Path, wheel: Path, installed: Path) -> None:
    [source] = dist.glob("*.tar.gz")
    pip = (installed / "python", "-m", "pip", "--quiet", "--quiet", "install", "--no-deps", "--no-compile")
    succeeded(*pip, "--target", dist / "from-source", source, folder=dist)
    archive = zipfile.ZipFile(wheel)
    for name in packaged(archive.namelist()):
        assert (dist / "from-source" / name).read_bytes() == archive.read(name), name


def test_commands_run_without_a_checkout_and_without_a_compiler(installed: Path, tmp_path: Path) -> None:
    dpsim = installed / "dpsim"
    assert "ok" in succeeded(dpsim, "doctor", folder=tmp_path)
    assert "index.html" in succeeded(
        dpsim, "sweep", "fusion-threshold", "--budget", "5s", "--output", "sweep", folder=tmp_path
    )
    succeeded(dpsim, "report", "sweep", folder=tmp_path)
    assert "</html>" in (tmp_path / "sweep" / "index.html").read_text()
    succeeded(dpsim, "predict", "--page", "page.html", folder=tmp_path)
    assert "</html>" in (tmp_path / "page.html").read_text()
    assert "identical" in succeeded(dpsim, "reproduce", "--devices", "1,2", "--steps", "2", folder=tmp_path)


def test_the_plug_in_is_one_file_that_needs_nothing(dist: Path) -> None:
    [plug_in] = dist.glob("dpsim_pytest-*.whl")
    archive = zipfile.ZipFile(plug_in)
    files = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert files == ["dpsim/testing/__init__.py", "dpsim/testing/__main__.py"]
    metadata = next(name for name in archive.namelist() if name.endswith("METADATA"))
    text = archive.read(metadata).decode()
    assert "Requires-Dist" not in text and "Requires-Python: >=3.9" in text


def test_the_workflow_for_github_installs_dpsim_and_the_plug_in(tmp_path: Path) -> None:
    """The step as a runner runs it, but for what dpsim needs, which other tests fetch."""
    action, job = tmp_path / "action", tmp_path / "job"
    succeeded("git", "clone", "--quiet", ROOT, action, folder=tmp_path)
    succeeded(Path(sys.base_prefix) / "bin" / "python3", "-m", "venv", job, folder=tmp_path)
    step = re.findall(r"^      run: \|\n((?:^        .*\n)+)", (ROOT / "action.yml").read_text(), re.MULTILINE)[0]
    variables = {
        "RUNNER_TEMP": str(tmp_path),
        "GITHUB_ACTION_PATH": str(action),
        "GITHUB_ENV": str(tmp_path / "variables"),
        "PATH": f"{job / 'bin'}{os.pathsep}{Path(sys.base_prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PIP_NO_DEPS": "1",
    }
    succeeded("bash", "-eo", "pipefail", "-c", step, folder=tmp_path, **variables)
    name, _, python = (tmp_path / "variables").read_text().strip().partition("=")
    assert name == "DPSIM_PYTHON"
    assert succeeded(python, "-c", "import dpsim; print(dpsim.__version__)", folder=tmp_path)
    code = "import dpsim.testing, importlib.util as u; print(u.find_spec('dpsim.cli'), dpsim.testing.__all__)"
    assert "None ['TrainingDiffers'" in succeeded(job / "bin" / "python", "-c", code, folder=tmp_path)


@pytest.mark.torch
def test_a_job_of_another_environment_is_explained(installed: Path, tmp_path: Path) -> None:
    explained(installed / "dpsim", folder=tmp_path)


@pytest.mark.torch
def test_uvx_explains_a_job_of_the_active_environment(wheel: Path, installed: Path, tmp_path: Path) -> None:
    """What pip fetches packages with is handed to uv at run time: index, folders of wheels, certificates."""
    pip = (installed / "python", "-m", "pip", "--quiet", "--quiet")
    if run(*pip, "install", "uv", folder=tmp_path).returncode:
        pytest.skip("uv cannot be installed here")
    told = run(*pip, "config", "list", folder=tmp_path).stdout
    values = {
        name.rpartition(".")[2]: value.strip("'")
        for name, _, value in (each.partition("=") for each in told.splitlines())
    }
    names = {"UV_DEFAULT_INDEX": "index-url", "SSL_CERT_FILE": "cert", "UV_FIND_LINKS": "find-links"}
    handed = {variable: values[name] for variable, name in names.items() if name in values}
    uvx = (installed / "uvx", "--no-config", "--python", sys.executable, "--from", wheel, "dpsim")
    explained(*uvx, folder=tmp_path, UV_CACHE_DIR=str(tmp_path / "uv"), UV_PYTHON_DOWNLOADS="never", **handed)


def explained(*dpsim: str | Path, folder: Path, **variables: str) -> None:
    """``dpsim explain -- torchrun`` with the tests' environment active, which has PyTorch: the job sees it alone."""
    own = folder / "job.py"
    own.write_text(
        "import os, runpy, sys\n"
        f"assert os.environ['VIRTUAL_ENV'] == sys.prefix == {sys.prefix!r}, sys.prefix\n"
        "assert not any(each.endswith('site-packages') for each in os.environ.get('PYTHONPATH', '').split(':'))\n"
        f"sys.argv = [{str(EXAMPLE)!r}, '--epochs', '20', '--width', '64']\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    active = {"VIRTUAL_ENV": sys.prefix, "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
    job = ("torchrun", "--nproc-per-node", "2", own)
    output = succeeded(*dpsim, "explain", "--steps", "8", "--", *job, folder=folder, **active, **variables)
    assert "exposed" in output or "was not computed within" in output  # the latter beside many other processes
