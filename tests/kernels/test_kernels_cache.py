"""Machine code is compiled once, kept on disk, and never out of date."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpsim.kernels import cache, elementwise

PROGRAM = """
import numpy as np
from dpsim.kernels import cache, elementwise
x = np.arange(-50, 50, dtype=np.float32)
elementwise.relu(x, x, np.zeros(100, bool))
assert x[0] == 0 and x[99] == 49
print(cache.counts.compiled, cache.counts.read)
"""
Python = Callable[..., subprocess.CompletedProcess[str]]


def counted(python: Python, folder: Path, **env: str) -> str:
    done = python("-c", PROGRAM, env={"DPSIM_CACHE_DIR": str(folder), **env})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_of_the_ranks_of_a_node_one_compiles_each_kernel_and_the_next_job_finds_everything(
    on_ranks: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPSIM_CACHE_DIR", str(tmp_path))
    first = on_ranks("ranks_kernels:compiled", devices=2)
    kept = len(list((tmp_path / "kernels").glob("*.o")))
    assert 5 < kept == sum(compiled for compiled, _, _ in first), "none is compiled twice"
    assert all(actual > 0 for _, actual, _ in first)
    again = on_ranks("ranks_kernels:compiled", devices=2)
    assert [actual[0] for actual in again] == [0, 0]
    assert [late for _, _, late in first + again] == [0] * 4, "nothing is first met in a step"


def test_a_process_finds_what_another_one_compiled(python: Python, tmp_path: Path) -> None:
    assert counted(python, tmp_path) == "1 0"
    assert counted(python, tmp_path) == "0 1"


CALLS_THE_C_LIBRARY = """
import numpy as np
from dpsim.kernels import conv, elementwise
x, grad, out = (np.ones(shape, np.float32) for shape in ((1, 4, 4, 8), (1, 4, 4, 16), (3, 3, 8, 16)))
conv.conv2d_weight_gradient(x, grad, (0, 1), 1, out, out[:0])
for dtype in (np.float32, np.float64):
    x = np.random.default_rng(0).standard_normal(1000).astype(dtype)
    mask, y = np.zeros(1000, bool), np.empty_like(x)
    elementwise.relu(x, y, mask)
    assert (mask == (x > 0)).all() and (y == np.maximum(x, 0)).all(), dtype
"""


def test_constants_of_a_kernel_stay_its_own_after_one_that_calls_the_c_library(python: Python, tmp_path: Path) -> None:
    done = python("-c", CALLS_THE_C_LIBRARY, env={"DPSIM_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert any(b"memset" in file.read_bytes() for file in (tmp_path / "kernels").glob("weight_gradient-*"))


def test_a_damaged_file_is_compiled_again(python: Python, tmp_path: Path) -> None:
    counted(python, tmp_path)
    (file,) = (tmp_path / "kernels").iterdir()
    for damaged in (file.read_bytes()[:-100], file.read_bytes()[:-1] + b"!", b""):
        file.write_bytes(damaged)
        assert counted(python, tmp_path) == "1 0"
    assert counted(python, tmp_path) == "0 1"


def test_an_edited_kernel_is_compiled_again(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    shutil.copytree(root / "dpsim", tmp_path / "dpsim", symlinks=True)
    shutil.copytree(root / "kernels", tmp_path / "kernels")

    def actual() -> str:
        environment = os.environ | {"PYTHONPATH": str(tmp_path), "DPSIM_CACHE_DIR": str(tmp_path / "cache")}
        command = [sys.executable, "-P", "-c", PROGRAM]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout.strip()

    assert [actual(), actual()] == ["1 0", "0 1"]
    source = tmp_path / "kernels" / "vector.py"
    source.write_text(source.read_text() + "\n# a word more\n")
    assert [actual(), actual()] == ["1 0", "0 1"]


def test_without_a_folder_to_write_to_kernels_still_run(python: Python, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", Path("/proc/none")):
        assert counted(python, folder) == "1 0"


def test_what_was_not_used_for_months_is_removed_and_nothing_of_the_user_s(python: Python, tmp_path: Path) -> None:
    key = "0123456789abcdef" * 2
    own = (f"relu-{key}.o", f"choices-{key}.json", f"choices-{key}.lock", f".relu-{key}.o.a_b1.partial")
    users = ("mine.cu", "mine.o", "relu-0.o", f"{key}.o", f"notes-{key}.txt")
    young = f"relu-{key[::-1]}.o"
    (tmp_path / "kernels").mkdir()
    for name in (*own, *users, young):
        file = tmp_path / "kernels" / name
        file.write_text("")
        os.utime(file, (time.time() - (1 if name == young else 100) * 86_400,) * 2)
    counted(python, tmp_path)
    left = {path.name for path in (tmp_path / "kernels").iterdir()}
    assert left > {*users, young} and not left & {*own}


def test_arrays_that_are_not_dense_are_refused() -> None:
    x, mask = np.ones((4, 4), np.float32), np.zeros((4, 4), bool)
    with pytest.raises((TypeError, ValueError)):
        elementwise.relu(x.T[1:], x[1:], mask[1:])


def test_arrays_that_may_not_be_written_are_read() -> None:
    x, out, mask = np.ones(4, np.float32), np.empty(4, np.float32), np.zeros(4, bool)
    x.flags.writeable = False
    elementwise.relu(x, out, mask)
    assert (out == 1).all() and mask.all()


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPSIM_CACHE_DIR", "/a")
    assert cache.folder() == Path("/a/kernels")
    monkeypatch.delenv("DPSIM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache.folder() == Path("/b/dpsim/kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache.folder() == Path.home() / ".cache/dpsim/kernels"


@pytest.mark.slow
def test_where_nothing_can_be_written_every_process_compiles_for_itself_and_commands_work(tmp_path: Path) -> None:
    """An installation of another user's, and a user without a home."""
    root = Path(__file__).parents[2]
    program = (
        "import sys\n"
        "from numba.core import caching\n"
        "caching.CompileResultCacheImpl._locator_classes = []\n"
        "from dpsim.cli import main\n"
        "main(['predict', '--devices', '2', '--global-batch', '64', *sys.argv[1:]])\n"
    )
    files = [str(root / "experiments" / "machines" / name) for name in ("googlenet_k80.toml", "k80_10gbe.toml")]
    command = [sys.executable, "-c", program, "--workload", files[0], "--machine", files[1]]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "threshold" in done.stdout


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for variable in ("DPSIM_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert cache.folder() is None


def test_code_that_others_may_have_written_is_compiled_again(python: Python, tmp_path: Path) -> None:
    assert counted(python, tmp_path) == "1 0"
    (kept,) = (tmp_path / "kernels").iterdir()
    assert (kept.stat().st_mode & 0o077, kept.parent.stat().st_mode & 0o777) == (0, 0o700)
    kept.chmod(0o666)
    assert counted(python, tmp_path) == "1 0"
    assert counted(python, tmp_path) == "0 1"
    if os.getuid() == 0:
        os.chown(kept, 12345, -1)
        assert counted(python, tmp_path) == "1 0"
