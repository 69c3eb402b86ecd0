"""Senseless and damaged command lines: an explanation and an exit code, never a traceback, nor a change of a file."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from damage import HANG_S, MEMORY_BYTES, attacked, damaged, limited
from hypothesis import event, given
from hypothesis import strategies as st

from dpsim.cli import app
from dpsim.experiments.command import ROOT
from dpsim.experiments.stress import running

CODES = (0, 1, 2, 3, 130)
"""0: done; 1: a rank failed, or a check did; 2: a mistake that was explained; 3: of another model; 130: interrupted."""
PROGRAMS = ("launch", "explain")
"""Commands that become another program: each runs in a process of its own, as one in ten of the others does."""
WORD_BYTES = 100_000
"""The kernel allows 128 KiB."""

_PREDICT = "predict --workload w.toml --machine m.toml --devices 2,4 --global-batch 64"
COMMANDS = (
    f"{_PREDICT} --fusion-threshold 0,32KiB,inf --json",
    f"{_PREDICT} --fusion-rule horovod --algorithm ring --set overlap=off",
    f"{_PREDICT} --output out.json",
    "report sweep --output again",
    "report sweep --json",
    "report sweep --trace --output trace.json",
    "calibrate --from nccl.txt --output machine.json",
    "calibrate --from osu.txt --devices 2 --output machine.json",
    "launch slurm --devices 2x4 --time 00:30:00 --dry-run -- train --model mlp",
    "launch pbs --devices 8 --queue short --dry-run -- own.py --lr 0.1",
    "launch local --devices 1 -- missing.py",
    "train --model mlp:4 --dataset synthetic:4x4x1,classes=3,train=8,test=8 --steps 1",
    "train --resume run --devices 1 --epochs 1",
    "train --hostfile hosts.txt --steps 1 --model mlp:4 --global-batch 4",
    "sweep fusion-threshold --model mlp:4 --budget 1ms --devices x --output s",
    "profile --model mlp:4 --local-batch 0 --output w.json",
    "bench allreduce --devices 0 --min 4B --max 8B",
    "reproduce --model mlp:4 --devices 1 --steps 1 --set leaves=x",
    "profile --workload w.toml --from-steps devices=1,local_batch=64,step_s=392ms --output fitted",
    "explain --measured 1:0.4s,16:0.6s --parameters 100000000 --json",
    "predict --workload w.toml --machine m.toml --devices 4 --rank strategy",
    "tune --workload w.toml --machine m.toml --devices 4",
    "predict --workload w.toml --machine m.toml --page page.html",
    "report sweep sweep --output compared",
    "calibrate --compare m.toml,m.toml --json",
    "calibrate --merge m.toml,m.toml --output merged.json",
    "sweep --torch-script missing.py --devices 2 --output m",
    "doctor --help",
    "--version",
)
COMPILING = 5
"""So many of the commands, as they stand, do all the compiling there is, which may take longer than a case may."""
_WRITTEN = ("--output", "--checkpoint", "--predictions", "--plot", "--record")
_STRANGE = (
    *("", "9" * 5000, "é" * 300, "a" * 300, "\ud800", "\x1b[31m"),
    *("-1", "0", "99999999999999999999", "nan", "inf", "-inf", "1e999", "2x", "x2", "1,,2", "%n", "$(id)"),
    *("--json", "--", "--output", "--output=.", "--checkpoint=.", ".", "w.toml", "sweep", "data", "reports", ".."),
    *("/dev/null", "/dev/zero/x", "/proc/self/mem", "npz:/dev/zero", "mlp:99999999999", "resnet99999999999999"),
    "synthetic:99999x99999x3,classes=10",
)
_FILES = {
    "w.toml": "experiments/machines/googlenet_k80.toml",
    "m.toml": "experiments/machines/k80_10gbe.toml",
    "nccl.txt": "experiments/machines/benchmarks/nccl_a100.txt",
    "osu.txt": "experiments/machines/benchmarks/osu_2_nodes.txt",
    **{f"sweep/{name}.json": f"reports/devices/{name}.json" for name in ("predictions", "results", "drift")},
}


def prepare(folder: Path) -> None:
    """Write the files that the commands name into ``folder``."""
    (folder / "sweep").mkdir()
    for name, source in _FILES.items():
        shutil.copyfile(ROOT / source, folder / name)
    (folder / "hosts.txt").write_text("localhost:2\n", encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for folders of the cases, once what they compile is compiled."""
    prepare(whole := tmp_path_factory.mktemp("whole"))
    for line in COMMANDS[:COMPILING]:
        variables, words = os.environ | {"PYTHONPATH": str(ROOT)}, [sys.executable, "-m", "dpsim", *line.split()]
        subprocess.run(words, cwd=whole, env=variables, capture_output=True, check=True)
    return tmp_path_factory.mktemp("cases")


@st.composite
def damaged_commands(draw: st.DrawFn) -> list[str]:
    """Draw a command with one to three words exchanged, damaged, removed, doubled or inserted."""
    words = draw(st.sampled_from(COMMANDS)).split()
    for _ in range(draw(st.sampled_from((1, 1, 2, 3)))):
        at = draw(st.integers(0, len(words)))
        match draw(st.sampled_from(("exchange", "exchange", "damage", "lose", "double", "insert"))):
            case "exchange":
                words[at : at + 1] = [draw(st.sampled_from(_STRANGE))]
            case "damage" if at < len(words):
                words[at] = draw(damaged(_bytes(words[at]))).decode("utf-8", "surrogateescape")
            case "lose":
                del words[at : at + 1]
            case "double":
                words[at:at] = words[at : at + 2]
            case _:
                words[at:at] = [draw(st.sampled_from(_STRANGE))]
    return [_bytes(word).replace(b"\0", b"")[:WORD_BYTES].decode("utf-8", "surrogateescape") for word in words]


def _bytes(word: str) -> bytes:
    return word.encode("utf-8", "surrogatepass")


def outputs(words: list[str]) -> set[str]:
    """Return what a command line names as the file or folder to write, which may then be there already."""
    named = {word for flag, word in pairwise(words) if flag in _WRITTEN}
    named |= {word.partition("=")[2] for word in words if word.startswith(tuple(f"{flag}=" for flag in _WRITTEN))}
    return {os.path.normpath(word).partition("/")[0] for word in named}


def called(words: list[str]) -> int:
    """Run a command in this process and return its exit code; what a user would see as a traceback is raised."""
    try:
        with limited(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return app.run(words)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1


def started(words: list[str], run: running.Run) -> int:
    """Run a command in a process of its own and return its exit code. The kernel ends it after so much computing."""
    at_start = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    run.start(["dpsim", *words])
    try:
        psutil.Process(run.process.pid).rlimit(psutil.RLIMIT_CPU, (HANG_S, HANG_S))
        code = run.process.wait(120)
    finally:
        run.end()
    assert run.traceback() == ""
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert largest == at_start or largest * 1024 < MEMORY_BYTES
    return code


@pytest.mark.slow
@attacked(few=20)
@given(data=st.data())
def test_a_senseless_command_line_ends_in_words_and_changes_no_file(data: st.DataObject, folder: Path) -> None:
    words = data.draw(damaged_commands() | st.sampled_from(COMMANDS).map(str.split), "command")
    with tempfile.TemporaryDirectory(dir=folder) as name:
        run = running.Run(Path(name) / "case")
        prepare(run.folder)
        if words in [line.split() for line in COMMANDS]:  # then one of its files is damaged
            path = data.draw(st.sampled_from(sorted(path for path in run.folder.rglob("*") if path.is_file())))
            path.write_bytes(data.draw(damaged(path.read_bytes())))
        before = running.contents(run.folder)
        if words[:1] in ([each] for each in PROGRAMS) or data.draw(st.integers(0, 9)) == 9:
            code = started(words, run)
        else:
            with contextlib.chdir(run.folder):
                code = called(words)
        assert code in CODES
        assert running.changes(before, run.folder, outputs(words)) == ""
    event(f"exit code {code}")
