"""Scripts that leave things behind or change what dpsim uses: nothing stays, and each ends as any other would."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from dpsim import workload as workloads
from dpsim.launch import protection

Dpsim = Callable[..., tuple[int, str, str]]
PREAMBLE = """
import os, subprocess, sys, tempfile, time, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def train():
    dist.init_process_group("gloo")
    ddp = DDP(torch.nn.Linear(8, 4))
    data = torch.utils.data.DataLoader(torch.randn(4000, 8), batch_size=4, num_workers=WORKERS)
    for batch in data:
        ddp(batch).sum().backward()
"""
FORGING = """
path = sys.orig_argv[-1]
open(path, "w").write("{}")
os._exit(0)
"""
pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for temporary files. Its path is short, so that those of sockets below it are short enough."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def profile(dpsim: Dpsim, folder: Path, text: str, *flags: str, workers: int = 0) -> tuple[int, str, Path]:
    script, output = folder / "hostile.py", folder / "w.json"
    script.write_text(PREAMBLE.replace("WORKERS", str(workers)) + text)
    code, _, err = dpsim("profile", "--torch-script", script, "--steps", "6", "--output", output, *flags)
    return code, err, output


def test_what_data_loaders_leave_is_removed(dpsim: Dpsim, tmp_path: Path, temporary: Path) -> None:
    code, err, _ = profile(dpsim, tmp_path, "train()", workers=2)
    assert code == 0, err
    assert list(temporary.iterdir()) == []


def test_a_daemon_of_the_script_is_ended(dpsim: Dpsim, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    text = f"started = subprocess.Popen(['sleep', '600'], start_new_session=True)\nopen({str(note)!r}, 'w')"
    code, err, _ = profile(dpsim, tmp_path, text + ".write(str(started.pid))\ntrain()", "--script-may-write")
    assert code == 0, err
    pid = int(note.read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_killed_profile_leaves_nothing(tmp_path: Path, temporary: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text("import time\nprint('ready', flush=True)\ntime.sleep(600)")
    command = [sys.executable, "-m", "dpsim", "profile", "--torch-script", str(script), "--output", str(tmp_path / "w")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while not any("ready" in path.read_text() for path in temporary.glob("*/printed.txt")):
            assert process.poll() is None
            time.sleep(0.02)
        process.kill()
    deadline = time.monotonic() + 30
    while list(temporary.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert list(temporary.iterdir()) == []


def test_data_loaders_find_room_for_their_sockets_below_a_long_path(
    dpsim: Dpsim, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = temporary / ("x" * 110)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    code, err, _ = profile(dpsim, tmp_path, "train()", workers=2)
    assert code == 0, err
    assert list(long.iterdir()) == []


def test_an_endless_recursion_ends_with_its_innermost_calls(dpsim: Dpsim, tmp_path: Path) -> None:
    text = "sys.setrecursionlimit(10**5)\ndef again(number):\n    again(number + 1)\nagain(0)"
    code, err, _ = profile(dpsim, tmp_path, text)
    assert code == 2 and "the script raised RecursionError" in err and err.count(" in again: ") == 8


def test_a_clock_that_the_script_replaces_is_not_dpsims(dpsim: Dpsim, tmp_path: Path) -> None:
    code, err, output = profile(dpsim, tmp_path, "time.perf_counter = lambda: 0.0\ntrain()")
    assert code == 0, err
    assert all(layer.forward_s[0] > 0 and layer.backward_s[0] > 0 for layer in workloads.read(output).layers)


WRITING = """
import shutil
import numpy as np

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        open("worker.txt", "w").write("changed")
        return torch.randn(8)

if __name__ == "__main__":
    torch.save("mine", "ck.pt")
    np.save("array.npy", np.zeros(3))
    shutil.rmtree("runs")
    subprocess.run("echo changed > shell.txt; rm replaced.txt", shell=True, check=True)
    os.replace("shell.txt", "replaced.txt")
    assert torch.load("ck.pt") == "mine" and np.load("array.npy").size == 3 and not os.path.exists("runs")
    dist.init_process_group("gloo")
    ddp = DDP(torch.nn.Linear(8, 4))
    for context in ("fork", "spawn"):
        loader = torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=1, multiprocessing_context=context)
        for _, batch in zip(range(8), loader):
            ddp(batch).sum().backward()
        assert open("worker.txt").read() == "changed"
    while True:
        ddp(batch).sum().backward()
"""


@pytest.fixture
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[Path, str]:
    """Files of the user's in the working directory, and what is in them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    names = ("ck.pt", "array.npy", "runs/best.pt", "shell.txt", "replaced.txt", "worker.txt")
    files = {tmp_path / name: f"original {name}" for name in names}
    for path, text in files.items():
        path.write_text(text)
    return files


def test_what_a_script_writes_changes_no_file(dpsim: Dpsim, tmp_path: Path, own_files: dict[Path, str]) -> None:
    if protection.mode(("namespace",)) is None:
        pytest.skip("this system forbids mount namespaces")
    code, err, output = profile(dpsim, tmp_path, WRITING)
    assert code == 0, err
    assert {path: path.read_text() for path in own_files} == own_files
    assert {path.name for path in tmp_path.iterdir()} == {path.relative_to(tmp_path).parts[0] for path in own_files} | {
        "hostile.py",
        output.name,
    }


@pytest.mark.parametrize("text", ["torch.save('mine', 'ck.pt')", "open('ck.pt', 'w')"])
def test_without_namespaces_a_script_ends_with_the_file_that_it_would_change(
    text: str, dpsim: Dpsim, tmp_path: Path, own_files: dict[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if protection.mode(("landlock",)) is None:
        pytest.skip("this system has no Landlock")
    monkeypatch.setattr(protection, "MODES", ("landlock",))
    code, err, output = profile(dpsim, tmp_path, text)
    assert (code, output.exists()) == (2, False)
    assert "hostile.py:" in err and "'ck.pt'" in err and "--script-may-write" in err and "Traceback" not in err
    assert {path: path.read_text() for path in own_files} == own_files


ENDLESS = """
dist.init_process_group("gloo")
ddp = DDP(torch.nn.Linear(8, 4))
while True:
    try:
        ddp(torch.randn(4, 8)).sum().backward()
    except BaseException:
        pass
"""


def test_a_script_that_catches_what_ends_it_is_profiled_and_ended(dpsim: Dpsim, tmp_path: Path) -> None:
    code, err, output = profile(dpsim, tmp_path, ENDLESS)
    assert code == 0, err
    assert workloads.read(output).local_batches == (4,)


def test_a_script_that_no_rank_of_a_measurement_could_end_is_refused(dpsim: Dpsim, tmp_path: Path) -> None:
    script, output = tmp_path / "endless.py", tmp_path / "report"
    script.write_text(PREAMBLE.replace("WORKERS", "0") + ENDLESS)
    code, _, err = dpsim("sweep", "--torch-script", script, "--budget", "1s", "--output", output)
    assert code == 2 and "endless.py trains on after dpsim has ended it" in err and "in place of BaseException" in err
    assert not (output / "predictions.json").exists()


@pytest.mark.parametrize(
    ("text", "given"),
    [
        (
            "child = os.fork()\nif child: os.waitpid(child, 0)\ntrain()",
            "trains in a process that it has started itself",
        ),
        ("class Odd(Exception):\n    def __str__(self): return 1 / 0\nraise Odd", "raised Odd"),
        (FORGING, "has changed the file"),
    ],
    ids=["a fork that trains", "an exception without a text", "a forged outcome"],
)
def test_it_ends_with_one_message(text: str, given: str, dpsim: Dpsim, tmp_path: Path) -> None:
    code, err, output = profile(dpsim, tmp_path, text)
    assert (code, output.exists()) == (2, False)
    assert err.startswith("dpsim: ") and given in err and "Traceback" not in err
