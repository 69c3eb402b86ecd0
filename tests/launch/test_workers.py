"""Processes that compute for a command end with it, however it ends."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import Executor
from pathlib import Path

import pytest

from dpsim.errors import ConfigError
from dpsim.launch.workers import executor, in_order

_COMMAND = """
import os, sys, time
from dpsim.launch.workers import executor

if __name__ == "__main__":
    with executor("2") as pool:
        print(*{pool.submit(os.getpid).result() for _ in range(20)}, flush=True)
        pool.submit(time.sleep, 600).result()
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


FACTORIES = """
import os
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

class Dies(ProcessPoolExecutor):
    sent = 0

    def submit(self, function, *arguments):
        self.sent += 1
        return super().submit(os._exit, 1) if self.sent > 3 else super().submit(function, *arguments)

class Refuses(ThreadPoolExecutor):
    sent = 0

    def submit(self, function, *arguments):
        self.sent += 1
        if self.sent > 3:
            raise OSError("handle is closed")
        return super().submit(function, *arguments)

def dies():
    return Dies(1)

def refuses():
    return Refuses(1)

def number():
    return 3

def unlicensed():
    raise RuntimeError("no license")
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(FACTORIES)
    return path


@pytest.mark.parametrize(
    "token", ["2", "concurrent.futures:ThreadPoolExecutor", "concurrent.futures:ProcessPoolExecutor"]
)
def test_results_come_in_the_order_of_the_items(token: str) -> None:
    with executor(token) as held:
        assert isinstance(held, Executor)
        assert list(in_order(held, math.factorial, range(150), chunk=4)) == [*map(math.factorial, range(150))]
        with pytest.raises(ConfigError, match="not this one"):
            list(in_order(held, _refuse, range(3)))


def test_one_process_is_this_one() -> None:
    with executor("1") as held:
        assert held is None
        assert [*in_order(held, lambda _: os.getpid(), range(2))] == [os.getpid()] * 2


def test_processes_of_a_rank_are_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "1")
    with executor("2") as held:
        assert [*in_order(held, os.getenv, ["PMI_RANK", "PATH"])] == [None, os.environ["PATH"]]


def _refuse(number: int) -> int:
    raise ConfigError(f"{number}: not this one")


@pytest.mark.parametrize(
    ("factory", "reason"), [("dies", "BrokenProcessPool"), ("refuses", "OSError: handle is closed")]
)
def test_what_is_finished_is_kept_when_an_executor_fails_which_is_said_once(
    factory: str, reason: str, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with executor(f"{own}:{factory}") as held:
        results = [list(in_order(held, _with_process, range(20), chunk=4)) for _ in range(2)]
    assert [[number for number, _ in each] for each in results] == [[*range(20)]] * 2
    kept = sum(process != os.getpid() for _, process in results[0])
    said = capsys.readouterr().err
    assert said.count("the executor failed") == 1 and reason in said and "to do:" in said
    if factory == "dies":
        assert kept == 12 and "12 of 20 results are finished and kept" in said
        assert {process for _, process in results[1]} == {os.getpid()}


def _with_process(number: int) -> tuple[int, int]:
    return number, os.getpid()


@pytest.mark.parametrize(
    ("token", "words"),
    [
        ("0", "--executor is 0"),
        ("two", "--executor is two"),
        ("9" * 5000, "--executor is 999"),
        ("nowhere:pool", "there is no module 'nowhere'"),
        ("concurrent.futures:NoPool", "has no function 'NoPool'"),
        ("{own}:number", "gives a int"),
        ("{own}:unlicensed", "own.py, line 31: RuntimeError: no license"),
        ("missing.py:pool", "there is no such file"),
    ],
)
def test_what_is_no_executor_is_a_mistake(token: str, words: str, own: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as raised, executor(token.format(own=own)):
        pass
    assert raised.value.allowed and raised.value.remedy
