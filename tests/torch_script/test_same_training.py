"""``dpsim.testing`` with real trainings, as docs/testing.md shows it, and the steps of the workflow for GitHub."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
BASELINE = "dpsim_baselines/test_same.test_training.json"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the files of the page."""
    for text in re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
        (tmp_path / text.partition("\n")[0].removeprefix("# ")).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def run(folder: Path, *command: str, **variables: str) -> tuple[int, str]:
    """Run a command; returns its exit code and what it printed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("GITHUB", "PYTEST"))}
    done = subprocess.run(
        command, cwd=folder, env=env | variables, capture_output=True, text=True, timeout=380, check=False
    )
    return done.returncode, done.stdout + done.stderr


def run_pytest(folder: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    return run(folder, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *arguments, **variables)


def changed(folder: Path, before: str, after: str) -> None:
    text = (folder / "train.py").read_text()
    assert before in text
    (folder / "train.py").write_text(text.replace(before, after))


def test_the_test_of_the_page_passes_and_its_baseline_notices_what_changes(project: Path) -> None:
    code, printed = run_pytest(project, "--dpsim-update")
    assert code == 0, printed
    assert (project / BASELINE).is_file()
    test = project / "test_same.py"
    test.write_text(test.read_text().replace("(1, 2, 4)", "(1, 2)"))
    code, printed = run_pytest(project)
    assert code == 0, printed
    changed(project, "AdamW(model.parameters())", "AdamW(model.parameters(), lr=2e-3)")
    code, printed = run_pytest(project)
    assert code == 1 and "The training is not that of the baseline: the loss of step 2" in printed, printed
    assert "--dpsim-update" in printed
    changed(project, "lr=2e-3", "lr=1.000001e-3")
    code, printed = run_pytest(project)
    assert code == 1 and "Its bits are others from step 2 on, in an equal environment" in printed, printed
    text = (project / BASELINE).read_text()
    (project / BASELINE).write_text(re.sub(r'"PyTorch": ?"[^"]*"', '"PyTorch":"1.0"', text))
    code, printed = run_pytest(project)
    assert code == 0, printed


def test_a_mistake_fails_with_its_class_and_the_line_of_the_sampler(project: Path) -> None:
    changed(project, "DistributedSampler(data)", "RandomSampler(data)")
    changed(project, "DistributedSampler, ", "RandomSampler, ")
    code, printed = run_pytest(project, "-n", "1", GITHUB_ACTIONS="true")
    assert code == 1 and "class: a sampler that repeats" in printed, printed
    lines = (project / "train.py").read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "RandomSampler(data)" in text)
    assert f"The sampler is made in train.py:{line}." in printed
    assert f"::error file=train.py,line={line},title=dpsim::Not rounding" in printed


def test_the_steps_of_the_workflow_run_as_a_runner_would(project: Path, tmp_path: Path) -> None:
    """Installing is tried in ``tests/test_wheels.py``; here is what it leaves."""
    action = (ROOT / "action.yml").read_text(encoding="utf-8")
    _, compare = re.findall(r"^      run: \|\n((?:^        .*\n|^\n)+)", action, re.MULTILINE)
    summary = tmp_path / "summary"
    binaries = str(Path(sys.executable).parent)
    variables = {
        "DPSIM_PYTHON": sys.executable,
        "TESTS": "test_same.py",
        "SCRIPT": "train.py::train --devices 1,2",
        "GITHUB_ACTIONS": "true",
        "GITHUB_STEP_SUMMARY": str(summary),
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
    }
    code, printed = run(project, "bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", compare, **variables)
    assert code == 0, printed
    assert summary.read_text().count(":white_check_mark: dpsim: `train.py::train`") == 2
    changed(project, "backward()", "mul(distributed.get_world_size()).backward()")
    code, printed = run(
        project, "bash", "-eo", "pipefail", "-c", compare, **variables | {"TESTS": "", "SCRIPT": variables["SCRIPT"]}
    )
    assert code == 1 and "::error file=train.py,line=" in printed and "a sum in place of a mean" in printed, printed


def test_a_function_that_is_marked_in_bfloat16_with_accumulation_is_the_same(project: Path) -> None:
    (project / "test_same.py").write_text(
        "import pytest\nfrom train import train\n\n\n"
        "@pytest.mark.same_training(devices=(2,), accumulate=(1, 2), dtype='bfloat16', steps=4)\n"
        "def test_training():\n    train()\n"
    )
    code, printed = run_pytest(project)
    assert code == 0, printed


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        ("raise RuntimeError('no data')", "raised RuntimeError on rank 0 of 1: no data"),
        ("import time; time.sleep(600)", "had not ended after 20 s"),
        ("pass", "without a step of an optimizer"),
    ],
)
def test_a_function_that_does_not_train_gets_one_message(loop: str, words: str, project: Path) -> None:
    (project / "train.py").write_text(f"def train():\n    {loop}\n")
    (project / "test_same.py").write_text(
        "from dpsim.testing import assert_same_training\nfrom train import train\n\n\n"
        "def test_training():\n    assert_same_training(train, devices=(1, 2), timeout_s=20)\n"
    )
    code, printed = run_pytest(project)
    assert code == 1 and words in printed and "Traceback" not in printed, printed
