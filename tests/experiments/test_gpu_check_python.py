"""gpu_check on a machine's own Python: an environment that finds its packages, and wheels that stay out of it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dpsim.experiments.gpu_check import machine_python

ROOT = Path(__file__).parents[2]
MODULE = "brought_by_a_wheel"


def wheel(folder: Path, name: str = MODULE) -> Path:
    """A wheel of one module."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": f"NAME = {name!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: nobody-has-this\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {path: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()) for path, text in files.items()}
    rows = [f"{path},sha256={digest.decode().rstrip('=')},{len(files[path])}" for path, digest in digests.items()]
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in {**files, f"{info}/RECORD": "\n".join([*rows, f"{info}/RECORD,,"])}.items():
            archive.writestr(inside, text)
    return path


def loaded_in(venv: Path, *modules: str) -> dict[str, str]:
    """Where the environment's Python finds modules."""
    program = f"import json, {', '.join(modules)}\nprint(json.dumps([{', '.join(f'{m}.__file__' for m in modules)}]))"
    done = subprocess.run(
        [str(venv / "bin" / "python"), "-I", "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(modules, json.loads(done.stdout), strict=True))


def test_the_environment_has_the_machines_packages_and_the_wheels(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels")
    venv = tmp_path / "venv"
    machine_python.make(venv, tmp_path / "wheels")
    found = loaded_in(venv, "msgspec", MODULE)
    assert found[MODULE].startswith(str(venv)) and not found["msgspec"].startswith(str(venv))
    assert machine_python.missing(venv) == []


def test_cuda_libraries_among_the_machines_packages_are_found_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.pathfinder", reason="cuda-pathfinder is not installed (pip install -e '.[dev]')")
    machine = tmp_path / "machine" / "site-packages"
    libraries = machine / "nvidia" / "cu13" / "lib"
    libraries.mkdir(parents=True)
    (libraries / "libnvrtc.so.13").touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(machine)])
    venv = tmp_path / "venv"
    machine_python.make(venv, None)
    find = "from cuda.pathfinder._utils.find_sub_dirs import find_sub_dirs_all_sitepackages as find\n"
    program = f"{find}print(*find(('nvidia', 'cu13', 'lib')), sep=chr(10))"
    command = [str(venv / "bin" / "python"), "-I", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert str(libraries) in done.stdout.splitlines()


def test_the_same_things_make_the_environment_once_and_others_make_it_anew(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    machine_python.make(venv, None)
    mark = venv / "mark"
    mark.touch()
    machine_python.make(venv, None)
    assert mark.exists()
    wheel(tmp_path / "wheels")
    machine_python.make(venv, tmp_path / "wheels")
    assert not mark.exists() and MODULE in loaded_in(venv, MODULE)


def test_paths_of_the_caller_are_extended_and_never_replaced(tmp_path: Path) -> None:
    before = {"PYTHONPATH": f"/a{os.pathsep}/b", "PATH": "/bin", "CUDA_HOME": "/cuda"}
    after = machine_python.environment(tmp_path, before)
    assert after["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "/a", "/b"]
    assert after["PATH"].split(os.pathsep) == ["/bin", str(Path(sys.executable).parent)]
    assert after["CUDA_HOME"] == "/cuda"
    assert machine_python.environment(tmp_path, after) == after


@pytest.mark.parametrize("wheels_first", [True, False])
def test_it_becomes_gpu_check_in_the_environment(wheels_first: bool, tmp_path: Path) -> None:
    calls: list[tuple[str, list[str], dict[str, str]]] = []
    wheel(tmp_path / "wheels")
    venv, wheels = [str(tmp_path / "venv")], ["--wheels", str(tmp_path / "wheels")]
    own = [*wheels, *venv] if wheels_first else [*venv, *wheels]
    machine_python.main([*own, "--", "--output", "x"], lambda *call: calls.append(call))
    ((python, command, variables),) = calls
    assert python == str(tmp_path / "venv" / "bin" / "python")
    assert command == [python, "-m", "dpsim.experiments.gpu_check", "--output", "x"]
    assert variables["PYTHONPATH"].startswith(str(ROOT))


def test_a_package_that_nobody_has_is_named_with_how_to_bring_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine_python, "NEEDED", ("numpy", "nobody-has-this"))
    with pytest.raises(SystemExit) as ending:
        machine_python.main([str(tmp_path / "venv")], lambda *call: None)
    given, remedy = capsys.readouterr().err.splitlines()
    assert ending.value.code == 2 and given.startswith("gpu-check: ") and "has no nobody-has-this" in given
    assert "pip download" in remedy and remedy.endswith("WHEELS=FOLDER")


@pytest.mark.parametrize("folder", ["empty", "absent"])
def test_a_folder_without_wheels_is_refused_in_words(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as ending:
        machine_python.main([str(tmp_path / "venv"), "--wheels", str(tmp_path / folder)], lambda *call: None)
    assert ending.value.code == 2 and "WHEELS=FOLDER" in capsys.readouterr().err


def test_make_gpu_check_writes_its_record_where_it_is_told_to() -> None:
    command = ["make", "-n", "--no-print-directory", "-C", str(ROOT), "gpu-check", f"GPU_PYTHON={sys.executable}"]
    done = subprocess.run([*command, "GPU_OUTPUT=a b"], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.rstrip().endswith('-- --output "a b"')


def test_make_gpu_check_with_a_python_needs_no_network_and_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    command = ["make", "--no-print-directory", "-C", str(ROOT), "gpu-check", f"GPU_PYTHON={sys.executable}"]
    variables = os.environ | {"CUDA_VISIBLE_DEVICES": "", "NUMBA_ENABLE_CUDASIM": "0", "no_proxy": "*"}
    done = subprocess.run(
        [*command, f"VENV={tmp_path / 'venv'}"], capture_output=True, text=True, env=variables, check=False, timeout=100
    )
    assert done.returncode == 2
    assert "gpu-check: there is no GPU to check here: " in done.stderr and "Traceback" not in done.stderr
