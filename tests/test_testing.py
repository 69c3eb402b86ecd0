"""``dpsim.testing`` and pytest's plug-in, with a program in dpsim's place that answers at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpsim.testing import TrainingDiffers, assert_same_training

POINT: dict[str, Any] = {
    "run": "2 devices",
    "steps": 8,
    "global_batch": 32,
    "largest_difference_over_rounding": 1.1e6,
    "finding": {"step": 3, "tensor": "2.bias", "line": "train.py:12"},
}
MISTAKE = {"verdict": "Not rounding: 50% of it.", "comparable": True, "text": "the table\n", "first": "1 device"}
SAME = MISTAKE | {"verdict": "The difference is rounding in all 8 steps."}
TEST = "from dpsim.testing import assert_same_training\n\n\ndef test_same():\n    assert_same_training('train.py')\n"


@pytest.fixture
def answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that puts a program with an answer and an exit code in dpsim's place; returns its arguments."""

    def answer(summary: dict[str, Any], code: int = 0, points: list[Any] | None = None, before: str = "") -> Path:
        program, told = tmp_path / "program", tmp_path / "arguments"
        text = json.dumps({"summary": summary, "points": points if points is not None else [POINT]})
        (tmp_path / "answer").write_text(text)
        program.write_text(f'#!/bin/sh\n{before}\necho "$@" >>{told}\ncat {tmp_path}/answer\nexit {code}\n')
        program.chmod(0o755)
        monkeypatch.setenv("DPSIM_PYTHON", str(program))
        return told

    return answer


def run_pytest(folder: Path, *arguments: str, text: str = TEST, **variables: str) -> tuple[int, str]:
    """Run pytest on a test in a folder; returns its exit code and what it printed."""
    (folder / "test_it.py").write_text(text)
    (folder / "train.py").write_text("")
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("GITHUB", "PYTEST"))}
    done = subprocess.run(
        command, cwd=folder, env=env | variables, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_it_loads_next_to_nothing_when_pytest_starts() -> None:
    code = "import sys, pytest\nold = set(sys.modules)\nimport dpsim.testing\nprint(*set(sys.modules) - old)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = set(printed.split())
    assert {each for each in loaded if each.startswith("dpsim")} == {"dpsim", "dpsim.installation", "dpsim.testing"}
    assert not loaded & {"json", "subprocess", "numpy", "ctypes", "torch"}


def test_what_ranks_cannot_import_is_refused() -> None:
    def closure() -> None: ...

    for training in (lambda: None, closure, self_made.method, print):
        with pytest.raises(TrainingDiffers, match="cannot be imported in the ranks"):
            assert_same_training(training)


class self_made:
    def method(self) -> None: ...


def test_a_function_is_named_by_its_file_and_all_options_reach_dpsim(answering: Callable[..., Path]) -> None:
    told = answering(SAME)
    assert_same_training(
        run_pytest, "--lr", "1", devices=(1, 2), accumulate=(1, 2), bucket_caps=("1MiB", 7), dtype="bfloat16", steps=3,
        may_write=True, resume_on=1,
    )  # fmt: skip
    first, second = told.read_text().splitlines()
    common = (
        f"-m dpsim reproduce --torch-script {os.path.relpath(__file__)}::run_pytest --python {sys.executable} --steps 3"
    )
    common += " --json --script-may-write "
    rest = "--devices 1,2 --accumulate 1,2 --bucket-cap 1MiB,7 --set compute_dtype=bfloat16"
    assert first.startswith(common + rest) and first.endswith("-- --lr 1")
    assert second == common + "--devices 2 --resume-on 1 -- --lr 1"


@pytest.mark.parametrize(
    ("summary", "code", "words"),
    [
        (MISTAKE, 1, "the table"),
        (SAME | {"comparable": False}, 0, "seed what draws them"),
        (SAME | {"differs_from_baseline": True}, 1, "--dpsim-update"),
    ],
)
def test_what_is_not_the_same_fails(summary: dict[str, Any], code: int, words: str, answering: Any) -> None:
    answering(summary, code)
    with pytest.raises(TrainingDiffers, match=words):
        assert_same_training("train.py")


def test_an_error_of_dpsim_is_shown_as_it_is(answering: Callable[..., Path]) -> None:
    answering(SAME, 2, before="echo 'dpsim: no such file' >&2; echo '  allowed: a file' >&2; exit 2")
    with pytest.raises(TrainingDiffers, match=r"dpsim: no such file\n  allowed: a file$"):
        assert_same_training("train.py")
    answering(SAME, 0, before="echo 'power flow converged'; exit 0")
    with pytest.raises(TrainingDiffers, match="gave no answer"):
        assert_same_training("train.py")


def test_without_dpsim_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TrainingDiffers, match="DPSIM_PYTHON"):
        assert_same_training("train.py")
    monkeypatch.setenv("DPSIM_PYTHON", str(tmp_path / "nowhere"))
    with pytest.raises(TrainingDiffers, match="does not start: No such file"):
        assert_same_training("train.py")


def test_a_training_that_does_not_end_is_ended(answering: Callable[..., Path], tmp_path: Path) -> None:
    answering(SAME, before=f"echo $$ >{tmp_path}/pid; echo step 7 >&2; exec sleep 60")
    with pytest.raises(TrainingDiffers, match=r"had not ended after 1 s(?s:.)*step 7"):
        assert_same_training("train.py", timeout_s=1)
    assert not Path(f"/proc/{int((tmp_path / 'pid').read_text())}").exists()


def test_no_process_is_left_when_pytest_is_killed(answering: Callable[..., Path], tmp_path: Path) -> None:
    answering(SAME, before=f"echo $$ >{tmp_path}/pid; exec sleep 60")
    code = f"from dpsim.testing import assert_same_training\nassert_same_training({str(tmp_path)!r})"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not Path(f"/proc/{int((tmp_path / 'pid').read_text())}").exists())


def wait_for(condition: Callable[[], object]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it did not happen")


def test_processes_never_hold_more_cores_than_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processes want one to four cores each, many times; each notes how many it holds while it holds them."""
    code = f"""
import os, sys, tempfile
tempfile.tempdir = {str(tmp_path)!r}
os.sched_getaffinity = lambda _: range(3)
from dpsim.testing import _cores
for turn in range(20):
    wanted = min(3, 1 + (turn + int(sys.argv[1])) % 4)
    with _cores(wanted):
        with open({str(tmp_path / "log")!r}, "a", buffering=1) as log:
            log.write(f"{{wanted}}\\n")
        with open({str(tmp_path / "log")!r}, "a", buffering=1) as log:
            log.write(f"-{{wanted}}\\n")
"""
    processes = [subprocess.Popen([sys.executable, "-c", code, str(number)]) for number in range(4)]
    assert [process.wait(60) for process in processes] == [0] * 4
    held, most = 0, 0
    for change in map(int, (tmp_path / "log").read_text().split()):
        held += change
        most = max(most, held)
    assert held == 0 and most <= 3


def test_a_baseline_is_written_beside_the_test_and_then_compared(
    answering: Callable[..., Path], tmp_path: Path
) -> None:
    told = answering(SAME)
    assert run_pytest(tmp_path)[0] == 0
    assert "against" not in told.read_text() and "output" not in told.read_text()
    assert run_pytest(tmp_path, "--dpsim-update")[0] == 0
    path = "dpsim_baselines/test_it.test_same.json"
    assert f"--output {path}" in told.read_text() and (tmp_path / path).parent.is_dir()
    (tmp_path / path).write_text("{}")
    assert run_pytest(tmp_path)[0] == 0
    assert told.read_text().splitlines()[-1].endswith(f"--against {path} --")
    answering(SAME | {"baseline": "Bits are not compared: PyTorch 1 there, 2 here."})
    assert "dpsim: train.py: Bits are not compared: PyTorch 1 there, 2 here." in run_pytest(tmp_path)[1]


def test_tests_of_a_file_have_baselines_of_their_own(answering: Callable[..., Path], tmp_path: Path) -> None:
    told = answering(SAME)
    text = """
import pytest
from dpsim.testing import assert_same_training

@pytest.mark.parametrize("lr", ["a/b", "a.b", "a-b"])
class TestOne:
    def test_same(self, lr):
        assert_same_training("train.py")
        assert_same_training("train.py")

class TestOther(TestOne):
    pass
"""
    assert run_pytest(tmp_path, "--dpsim-update", text=text)[0] == 0
    paths = [line.partition("--output ")[2].split()[0] for line in told.read_text().splitlines()]
    assert len(paths) == len(set(paths)) == 12 and "dpsim_baselines/test_it.TestOne.test_same-a-b-" in paths[0]


def test_a_marked_test_is_the_training(answering: Callable[..., Path], tmp_path: Path) -> None:
    told = answering(MISTAKE, 1)
    text = "import pytest\n\n@pytest.mark.same_training(devices=(1, 2))\ndef test_it():\n    raise RuntimeError\n"
    code, printed = run_pytest(tmp_path, "--strict-markers", text=text)
    assert code == 1 and "the table" in printed and "RuntimeError" not in printed
    assert "--torch-script test_it.py::test_it " in told.read_text()


def test_github_gets_a_table_and_a_line(answering: Callable[..., Path], tmp_path: Path) -> None:
    answering(MISTAKE, 1)
    summary = tmp_path / "summary.md"
    variables = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary)}
    _, printed = run_pytest(tmp_path, "-n", "1", **variables)
    line = "::error file=train.py,line=12,title=dpsim::Not rounding: 50%25 of it."
    assert line in printed.splitlines()
    text = summary.read_text()
    assert "| 2 devices | 8 | 32 | 1.1e+06 | step 3, 2.bias |" in text and MISTAKE["verdict"] in text
    answering(SAME, 0, [])
    command = [sys.executable, "-m", "dpsim.testing", "train.py", "--devices", "1,2"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "::error" not in done.stdout
    assert ":white_check_mark:" in summary.read_text()
    answering(SAME | {"comparable": False}, 0, [])
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "::error file=train.py,line=1," in done.stdout
    answering(SAME, 0, [{"devices": 4}])  # as of a script that is resumed
    assert subprocess.run(command, cwd=tmp_path, env=os.environ | variables, check=False).returncode == 0
    answering({"pairs": []}, 0, [])  # as of --explain-bits
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
