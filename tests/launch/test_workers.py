"""Processes that compute for a command end with it, however it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dpsim.errors import DpsimError
from dpsim.launch.workers import workers

_COMMAND = """
import os, sys, time
from dpsim.launch.workers import workers

if __name__ == "__main__":
    with workers(2) as executor:
        print(*{executor.submit(os.getpid).result() for _ in range(20)}, flush=True)
        executor.submit(time.sleep, 600).result()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_and_their_semaphores_go_with_the_command(number: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "command.py"
    script.write_text(_COMMAND)
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as command:
        assert command.stdout is not None and command.stderr is not None
        pids = [int(pid) for pid in command.stdout.readline().split()]
        assert pids
        semaphores = {name for pid in pids for name in _semaphores(pid)}
        assert semaphores
        os.kill(command.pid, number)
        command.wait(60)
        said = command.stderr.read()
    until = time.monotonic() + 60
    while (left := [pid for pid in pids if _runs(pid)] + [name for name in semaphores if Path(name).exists()]) and (
        time.monotonic() < until
    ):
        time.sleep(0.05)
    assert not left
    assert said.count("Traceback") == (number == signal.SIGINT), "that of the interrupted script alone"


def _semaphores(pid: int) -> set[str]:
    return set(re.findall(r"/dev/shm/sem\.mp-\w+", Path(f"/proc/{pid}/maps").read_text()))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("fault", "raised"), [("handle is closed", DpsimError), ("No space left", OSError)])
def test_a_pool_that_breaks_while_it_is_handed_work_is_told_as_one_that_broke(
    fault: str, raised: type[Exception]
) -> None:
    with pytest.raises(raised, match="one of 2 processes ended" if raised is DpsimError else fault), workers(2):
        raise OSError(fault)
