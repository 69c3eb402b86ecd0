"""Commands that end with their time limit, their caller and their parent, together with what they have started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dpsim.launch import child_process

ROOT = Path(__file__).parents[2]
HANGS = """
import subprocess, sys, time
started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(started.pid, flush=True)
time.sleep(600)
"""
PARENT = """
import sys, time
from dpsim.launch import child_process
with child_process.child([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
    print(process.pid, flush=True)
    time.sleep(600)
"""


def ends(pid: int) -> bool:
    """Whether a process ends within some seconds."""
    deadline_s = time.monotonic() + 10
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


def test_running_a_command_ends_at_its_time_limit() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        child_process.run([sys.executable, "-c", "import time; time.sleep(600)"], timeout_s=0.2)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a child that its parent has ended")
def test_a_command_ends_when_its_parent_is_killed() -> None:
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": paths}
    )
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        assert ends(pid)
