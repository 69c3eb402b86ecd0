"""Temporary folders, and what was started for them: gone afterwards, whatever becomes of the process that made them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from process_tree import command_of

from dpsim.errors import ConfigError
from dpsim.launch import scratch_keeper
from dpsim.launch.scratch import environment, scratch, shared_folder, short_path

ROOT = Path(__file__).parents[2]
SLEEPING = """
import subprocess, sys, time, os
from dpsim.launch.scratch import environment, scratch
with scratch("test") as folder:
    (folder / "file").write_text("x")
    started = subprocess.Popen(["sleep", "600"], env=os.environ | environment(folder), stdout=-3)
    print(folder, started.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def maker(temporary: Path) -> tuple[subprocess.Popen[str], Path, psutil.Process, psutil.Process]:
    """A process that has made a scratch folder: itself, the folder, what it started for it, and the folder's keeper."""
    variables = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    process = subprocess.Popen([sys.executable, "-c", SLEEPING], env=variables, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    folder, started = process.stdout.readline().split()
    return process, Path(folder), psutil.Process(int(started)), keeper_of(process.pid)


def keeper_of(pid: int) -> psutil.Process:
    """Return the keeper that a process has started, once it runs its own program."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in psutil.Process(pid).children():
            if scratch_keeper.__file__ in command_of(child):
                return child
        time.sleep(0.01)
    raise TimeoutError("no keeper was started")


def gone(folder: Path, *processes: psutil.Process) -> bool:
    _, left = psutil.wait_procs(processes, timeout=10)
    deadline = time.monotonic() + 10
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not left and not folder.exists()


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_maker_leaves_nothing_behind(ending: signal.Signals, temporary: Path) -> None:
    process, folder, started, keeping = maker(temporary)
    started.suspend()
    process.send_signal(ending)
    process.communicate()
    assert gone(folder, started, keeping)
    assert list(temporary.iterdir()) == []


def test_what_a_killed_keeper_could_not_clear_the_next_one_does_and_nothing_else(temporary: Path) -> None:
    process, folder, started, keeping = maker(temporary)
    other, in_use, at_work, _ = maker(temporary)
    strangers = [temporary / "dpsim-job-abcdefgh", temporary / "dpsim-job-abcdefgh.scratch.old"]
    for stranger in strangers:
        stranger.mkdir()
    (temporary / "dpsim-job-linktome.scratch").symlink_to(strangers[0])
    keeping.kill()
    process.kill()
    process.communicate()
    assert folder.exists()
    with scratch("test") as mine:
        assert not folder.exists()
        assert {path.name for path in temporary.iterdir()} == {
            mine.name,
            in_use.name,
            "dpsim-job-linktome.scratch",
            *(stranger.name for stranger in strangers),
        }
    assert gone(folder, started)
    assert at_work.is_running()
    other.kill()
    other.communicate()
    assert gone(in_use, at_work)


def test_a_stopped_keeper_holds_nobody_up_and_goes_with_its_folder(temporary: Path) -> None:
    with scratch("test") as mine:
        own = keeper_of(os.getpid())
        own.suspend()
    assert gone(mine, own)
    process, folder, started, keeping = maker(temporary)
    keeping.suspend()
    process.kill()
    process.communicate()
    with scratch("test"):
        assert gone(folder, started, keeping)


def test_a_folder_in_shared_memory_goes_with_its_temporary_folder_and_nothing_else_there_does(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = temporary / "memory"
    memory.mkdir()
    monkeypatch.setattr(scratch_keeper, "SHARED_FOLDER", str(memory))
    of_another = memory / "ucx_shm_posix_1b2c"
    of_another.touch()
    with scratch("test") as folder:
        shared = shared_folder(folder)
        assert shared is not None
        (shared / "ucx_shm_posix_3d4e").touch()
    assert list(memory.iterdir()) == [of_another]
    monkeypatch.setattr(scratch_keeper, "SHARED_FOLDER", str(memory / "missing"))
    assert shared_folder(folder) is None


def test_a_folder_with_a_long_path_has_a_short_one_too_that_goes_with_it(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = temporary / ("x" * 110)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with scratch("test") as folder:
        path = short_path(folder, folder)
        assert path != folder and path.samefile(folder) and len(str(path)) <= 64
        assert short_path(folder, path) == path
    assert not path.is_symlink() and list(long.iterdir()) == []


def test_where_no_temporary_folder_can_be_made_the_error_says_what_to_set(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "missing"))
    with pytest.raises(ConfigError, match="TMPDIR=FOLDER"), scratch("test"):
        pass


def test_a_process_of_a_folder_within_a_scratch_folder_ends_with_it() -> None:
    with scratch("test") as folder:
        started = subprocess.Popen(["sleep", "600"], env=os.environ | environment(folder / "a"))
        deadline = time.monotonic() + 60
        while not Path(f"/proc/{started.pid}/environ").read_bytes():  # it has none while its program is being loaded
            assert time.monotonic() < deadline
        assert scratch_keeper.started_for(str(folder)) == [started.pid]
        assert scratch_keeper.started_for(str(folder)[:-1]) == []
    assert started.wait(5) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("folder", "prefix"), [("_HYDRA_FOLDER", "hydra_hwloc_xmlfile_"), ("SHARED_FOLDER", "mpich_sh")]
)
def test_files_of_mpich_go_that_no_process_has_open_also_while_others_remove_theirs(
    folder: str, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch_keeper, "SHARED_FOLDER", str(tmp_path / "none"))
    monkeypatch.setattr(scratch_keeper, folder, str(tmp_path))
    removed, used, *left = (tmp_path / f"{prefix}{name}" for name in ("aaaaaa", "Zz09xY", "bbbbbb", "cccccc"))
    for path in (removed, used, *left, other := tmp_path / f"other_{prefix}"):
        path.touch()
    listed = scratch_keeper.entries(str(tmp_path))
    removed.unlink()
    with used.open("wb") as file, subprocess.Popen(["sleep", "600"], stdout=file) as process:
        try:
            file.close()
            with pytest.MonkeyPatch.context() as patch:
                actual = scratch_keeper.entries
                patch.setattr(scratch_keeper, "entries", lambda of: listed if of == str(tmp_path) else actual(of))
                assert scratch_keeper.abandoned_files() == {str(path) for path in left}
            with scratch("test"):
                pass
            assert sorted(path for path in tmp_path.iterdir() if path.is_file()) == sorted([used, other])
        finally:
            process.kill()
    assert scratch_keeper.abandoned_files() == {str(used)}


def test_a_folder_that_cannot_be_read_has_no_entries(temporary: Path) -> None:
    assert scratch_keeper.entries(str(temporary / "gone")) == []
