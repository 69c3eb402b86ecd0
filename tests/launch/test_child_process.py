"""Processes that end with their time limit, their caller and their parent, together with what they have started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from python_path import extended_path

from dpsim.errors import CommunicationError, ConfigError
from dpsim.launch import child_process, resident_job, scratch_keeper
from dpsim.launch.resident_job import Job, run_commands

ROOT = Path(__file__).parents[2]
SLEEPS = "import time; time.sleep(600)"
HANGS = f"""
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", {SLEEPS!r}]).pid, flush=True)
time.sleep(600)
"""
PARENT = f"""
import sys, time
from dpsim.launch import child_process
with child_process.child([sys.executable, "-c", {SLEEPS!r}]) as process:
    print(process.pid, flush=True)
    time.sleep(600)
"""
SAYS_HELLO = """
import os, signal, sys, time
from multiprocessing.connection import Client
connection = Client(sys.argv[1], "AF_UNIX")
connection.send({"rank": 0})
command = connection.recv()
connection.send({"the answer to": command})
os.kill(os.getpid(), signal.SIGKILL)
"""


def ends(pid: int) -> bool:
    """Return whether a process ends within some seconds."""
    deadline_s = time.monotonic() + 50
    while time.monotonic() < deadline_s:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_what_a_command_prints_and_its_exit_code_are_returned() -> None:
    program = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    done = child_process.run([sys.executable, "-c", program], timeout_s=60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")


def test_after_its_time_a_command_is_killed_with_what_it_started(tmp_path: Path) -> None:
    output = tmp_path / "output"
    with output.open("w") as file, child_process.child([sys.executable, "-c", HANGS], stdout=file) as process:
        while not output.read_text().endswith("\n"):
            time.sleep(0.02)
        started = int(output.read_text())
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
    assert process.returncode < 0 and ends(started)
    with pytest.raises(subprocess.TimeoutExpired):
        child_process.run([sys.executable, "-c", SLEEPS], timeout_s=0.2)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a child that its parent has ended")
def test_a_command_ends_when_its_parent_is_killed() -> None:
    environment = os.environ | {"PYTHONPATH": extended_path(ROOT)}
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
        assert ends(pid)


def commands(folder: Path, *words: list[str]) -> Callable[[str], None]:
    """Return what runs these commands as the ranks of a job, with the address of its socket as their last word."""
    return lambda address: run_commands(folder.name, [[*each, address] for each in words], folder, os.environ)


def test_ranks_answer_and_those_that_a_signal_ended_are_missed_while_another_job_is_awaited(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    first = Job("first", 1, folders[0], commands(folders[0], [sys.executable, "-c", SAYS_HELLO]))
    try:
        assert first.ask({"do": "it"}) == [{"the answer to": {"do": "it"}}]
        with pytest.raises(CommunicationError, match="first ended with SIGKILL: it printed nothing"):
            Job("second", 1, folders[1], commands(folders[1], ["sh", "-c", "sleep 600"]))
        with pytest.raises(CommunicationError, match="first ended with SIGKILL"):
            first.ask({"do": "more"})
    finally:
        first.close()
    assert not scratch_keeper.started_for(str(tmp_path))


def test_commands_that_fail_say_why_and_the_others_end(tmp_path: Path) -> None:
    failing, sleeping = ["sh", "-c", "echo the reason; exit 7"], ["sh", "-c", "sleep 600"]
    with pytest.raises(CommunicationError, match="ended with exit code 7: the reason"):
        Job("two", 2, tmp_path, commands(tmp_path, failing, sleeping))
    assert not scratch_keeper.started_for(str(tmp_path))


def test_ranks_that_are_interrupted_as_they_start_end_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        while len(scratch_keeper.started_for(str(tmp_path))) < 2:
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(resident_job, "wait", interrupted)
    sleeping = ["sh", "-c", "exec sleep 600"]
    with pytest.raises(KeyboardInterrupt):
        Job("sleepers", 2, tmp_path, commands(tmp_path, sleeping, sleeping))
    assert not scratch_keeper.started_for(str(tmp_path))


def test_a_temporary_folder_whose_path_is_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 110)
    folder.mkdir()
    with pytest.raises(ConfigError, match="short path"):
        Job("sleepers", 1, folder, print)
