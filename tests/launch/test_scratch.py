"""Temporary folders, and what was started for them: gone afterwards, whatever becomes of the process that made them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from process_tree import command_of

from dpsim.errors import CommunicationError, ConfigError
from dpsim.launch import scratch_keeper
from dpsim.launch.resident_job import Job, Processes
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


def test_shared_memory_of_mpich_that_nobody_has_open_is_removed_and_the_rest_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch_keeper, "_SHARED_FOLDER", str(tmp_path))
    monkeypatch.setattr(scratch_keeper, "_MPICH_FILE", scratch_keeper.re.compile(rf"{tmp_path}/mpich_sh\w+"))
    left, used, other = tmp_path / "mpich_shm_left", tmp_path / "mpich_shm_used", tmp_path / "others"
    for path in (left, used, other):
        path.write_bytes(b"x")
    with used.open("rb"):
        scratch_keeper.end(str(tmp_path / "no folder"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mpich_shm_used", "others"]


def test_a_folder_in_shared_memory_goes_with_its_temporary_folder_and_nothing_else_there_does(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = temporary / "memory"
    memory.mkdir()
    monkeypatch.setattr(scratch_keeper, "_SHARED_FOLDER", str(memory))
    of_another = memory / "ucx_shm_posix_1b2c"
    of_another.touch()
    with scratch("test") as folder:
        shared = shared_folder(folder)
        assert shared is not None
        (shared / "ucx_shm_posix_3d4e").touch()
    assert list(memory.iterdir()) == [of_another]
    monkeypatch.setattr(scratch_keeper, "_SHARED_FOLDER", str(memory / "missing"))
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


class Interrupted(Processes):
    """Processes during whose start somebody presses Ctrl-C."""

    def alive(self) -> bool:
        raise KeyboardInterrupt


def test_ranks_that_are_interrupted_as_they_start_end_at_once(temporary: Path) -> None:
    ranks: list[Interrupted] = []

    def start(_: str) -> Interrupted:
        variables: Mapping[str, str] = os.environ
        ranks.append(Interrupted("sleepers", [["sleep", "600"]] * 2, temporary, variables))
        return ranks[0]

    with pytest.raises(KeyboardInterrupt):
        Job("sleepers", 2, temporary, start)
    assert not scratch_keeper.started_for(str(temporary))


def test_while_ranks_are_awaited_those_of_another_open_job_are_missed_and_their_signal_is_named(
    temporary: Path,
) -> None:
    connecting = "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])"
    says_hello = f"""{connecting}; s.sendall(b'{{"rank": 0}}\\n'); time.sleep(600)"""
    ranks: list[Processes] = []

    def start(address: str) -> Processes:
        program = ["sleep", "600"] if ranks else [sys.executable, "-c", says_hello, address]
        place = temporary / str(len(ranks))
        ranks.append(Processes(place.name, [program], place, os.environ))
        if len(ranks) == 2:
            ranks[0]._processes[0].kill()
        return ranks[-1]

    for number in range(2):
        (temporary / str(number)).mkdir()
    first = Job("first", 1, temporary / "0", start)
    try:
        with pytest.raises(CommunicationError, match="0 ended with SIGKILL: it printed nothing"):
            Job("second", 1, temporary / "1", start)
    finally:
        first.close()
    assert not scratch_keeper.started_for(str(temporary))


def test_a_temporary_folder_whose_path_is_too_long_for_a_socket_is_refused(temporary: Path) -> None:
    folder = temporary / ("x" * 110)
    folder.mkdir()
    with pytest.raises(ConfigError, match="short path"):
        Job("sleepers", 1, folder, lambda _: Interrupted("sleepers", [], folder, {}))


def test_a_process_of_a_folder_within_a_scratch_folder_ends_with_it() -> None:
    with scratch("test") as folder:
        started = subprocess.Popen(["sleep", "600"], env=os.environ | environment(folder / "a"))
        deadline = time.monotonic() + 60
        while not Path(f"/proc/{started.pid}/environ").read_bytes():  # it has none while its program is being loaded
            assert time.monotonic() < deadline
        assert scratch_keeper.started_for(str(folder)) == [started.pid]
        assert scratch_keeper.started_for(str(folder)[:-1]) == []
    assert started.wait(5) == -signal.SIGKILL


def test_hydras_files_go_that_no_process_has_open(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch_keeper, "_TOPOLOGY_FOLDER", str(temporary))
    left, used, other = (temporary / f"hydra_hwloc_xmlfile_{name}" for name in ("a1B2c3", "Zz09xY", "toolong"))
    for path in (left, used, other):
        path.touch()
    with used.open("wb") as file, subprocess.Popen(["sleep", "600"], stdout=file) as proxy:
        try:
            file.close()
            assert scratch_keeper.abandoned_topologies() == {str(left)}
            with scratch("test"):
                pass
            assert used.exists() and other.exists() and not left.exists()
        finally:
            proxy.kill()
    assert scratch_keeper.abandoned_topologies() == {str(used)}


def test_a_file_that_its_owner_removes_meanwhile_hides_no_other(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch_keeper, "_TOPOLOGY_FOLDER", str(temporary))
    paths = [temporary / f"hydra_hwloc_xmlfile_{name}" for name in ("aaaaaa", "bbbbbb", "cccccc")]
    for path in paths:
        path.touch()
    listed = {entry.path: entry for entry in scratch_keeper.entries(str(temporary))}
    paths[0].unlink()
    listed = {str(path): listed[str(path)] for path in paths}
    monkeypatch.setattr(
        scratch_keeper, "entries", lambda folder: [*listed.values()] if folder == str(temporary) else []
    )
    assert scratch_keeper.abandoned_topologies() == {str(path) for path in paths[1:]}


def test_a_folder_that_cannot_be_read_has_no_entries(temporary: Path) -> None:
    assert scratch_keeper.entries(str(temporary / "gone")) == []
