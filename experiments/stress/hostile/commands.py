"""Senseless and damaged command lines: an explanation and an exit code, never a traceback, a hang or a memory leak."""

from __future__ import annotations

import contextlib
import io
import os
import random
import resource
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from dpsim import codec
from dpsim.cli import app
from dpsim.experiments.command import ROOT
from dpsim.experiments.stress import running
from dpsim.experiments.stress.hostile import readers
from dpsim.experiments.stress.hostile.readers import HANG_S, IDLE_S, MEMORY_BYTES, damaged
from dpsim.experiments.stress.running import Run
from dpsim.experiments.stress.tally import Outcome

_LOOK_S = 0.02
_CODES = (0, 1, 2, 3, 130)
"""0: done; 1: a rank failed, or a check did; 2: a mistake that was explained; 3: of another model; 130: interrupted."""
_A_PROCESS_EACH = 10
"""Each case of this number, and of commands that become another program, has a process of its own."""
_PROGRAMS = ("launch", "explain")

_PREDICT = "predict --workload w.toml --machine m.toml --devices 2,4 --global-batch 64"
_COMMANDS = (
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
_WRITTEN = ("--output", "--checkpoint", "--predictions", "--plot", "--record")
_COMPILING = 5
"""So many of the commands, as they stand, do all the compiling there is."""
_STRANGE = (
    "",
    *("9" * 5000, "é" * 300, "a" * 300, "\ud800", "\x1b[31m"),
    *("-1", "0", "99999999999999999999", "nan", "inf", "-inf", "1e999", "2x", "x2", "1,,2", "%n", "$(id)"),
    *(
        "--json",
        "--",
        "--output",
        "--output=.",
        "--checkpoint=.",
        ".",
        "w.toml",
        "sweep",
        "data",
        "reports",
        "/dev/null",
        "/dev/zero/x",
        "..",
        "/proc/self/mem",
        "npz:/dev/zero",
    ),
    *("mlp:99999999999", "resnet99999999999999", "synthetic:99999x99999x3,classes=10"),
)


def prepared(folder: Path) -> None:
    """Write the files that the commands name into ``folder``."""
    for source, name in (
        ("experiments/machines/googlenet_k80.toml", "w.toml"),
        ("experiments/machines/k80_10gbe.toml", "m.toml"),
        ("experiments/machines/benchmarks/nccl_a100.txt", "nccl.txt"),
        ("experiments/machines/benchmarks/osu_2_nodes.txt", "osu.txt"),
    ):
        shutil.copyfile(ROOT / source, folder / name)
    (folder / "sweep").mkdir(exist_ok=True)
    for name in ("predictions.json", "results.json", "drift.json"):
        shutil.copyfile(ROOT / "reports/devices" / name, folder / "sweep" / name)
    (folder / "hosts.txt").write_text("localhost:2\n", encoding="utf-8")


def _command(moments: random.Random) -> list[str]:
    """Return a command with one to three words exchanged, damaged, removed, doubled or inserted."""
    words = moments.choice(_COMMANDS).split()
    for _ in range(moments.choice((1, 1, 2, 3))):
        at = moments.randrange(len(words) + 1)
        match moments.choice(("exchange", "exchange", "damage", "lose", "double", "insert")):
            case "exchange":
                words[at : at + 1] = [moments.choice(_STRANGE)]
            case "damage" if at < len(words):
                data = damaged(words[at].encode("utf-8", "surrogatepass"), moments)
                words[at] = data.decode("utf-8", "surrogateescape")
            case "lose":
                del words[at : at + 1]
            case "double":
                words[at:at] = words[at : at + 2]
            case _:
                words[at:at] = [moments.choice(_STRANGE)]
    limit = 100_000  # of one word; the kernel allows 128 KiB
    return [
        word.encode("utf-8", "surrogatepass").replace(b"\0", b"")[:limit].decode("utf-8", "surrogateescape")
        for word in words
    ]


def _damage_a_file(folder: Path, moments: random.Random) -> None:
    path = moments.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    path.write_bytes(damaged(path.read_bytes(), moments))


def case(number: int, seed: int, folder: Path) -> Outcome:
    """Run one command in a folder of its own; for every fourth a file there is damaged instead."""
    moments, run = random.Random(f"{seed} {number}"), Run(folder / str(number))
    prepared(run.folder)
    words = _command(moments)
    if number % 4 == 0:
        _damage_a_file(run.folder, moments)
        words = moments.choice(_COMMANDS).split()
    if number % _A_PROCESS_EACH == 0 or words[:1] in ([each] for each in _PROGRAMS):
        run.start(["dpsim", *words])
        wrong = _watched(run.process)
        run.end()
        code, wrong = run.process.returncode, wrong or run.traceback() or run.changes(_outputs(words))
    else:
        before = running.contents(run.folder)
        code, wrong = _called(words, run.folder)
        wrong = wrong or running.changes(before, run.folder, _outputs(words))
    wrong = wrong or ("" if code in _CODES else f"exit code {code}")
    shutil.rmtree(run.marked)
    shown = " ".join(word if len(word) < 60 else f"{word[:40]!r}... ({len(word)})" for word in words)
    became = "went wrong" if wrong else f"exit code {code}"
    return Outcome(case=f"{number}: {shown}".encode("utf-8", "replace").decode(), became=became, wrong=wrong)


def _called(words: list[str], folder: Path) -> tuple[int, str]:
    """Run a command in this process and that folder: its exit code, and the exception that a user would see."""
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return app.run(words), ""
    except SystemExit as error:
        return (error.code if isinstance(error.code, int) else 1), ""
    except Exception as error:  # what a user would see as a traceback
        place = traceback.extract_tb(error.__traceback__)[-1]
        return 1, f"{type(error).__name__}: {str(error)[:200]} ({Path(place.filename).name}:{place.lineno})"
    finally:
        os.chdir(folder.parent.parent)


def _outputs(words: list[str]) -> set[str]:
    """Return what a command line names as the file or folder to write, which may then be there already."""
    given = {word for flag, word in pairwise(words) if flag in _WRITTEN}
    given |= {word.partition("=")[2] for word in words if word.startswith(tuple(f"{flag}=" for flag in _WRITTEN))}
    return {os.path.normpath(word).partition("/")[0] for word in given}


def _watched(process: subprocess.Popen[bytes]) -> str:
    """Say what is wrong with how a process runs, which is killed then; empty for one that ends."""
    until, measured = time.monotonic() + IDLE_S, psutil.Process(process.pid)
    while process.poll() is None:
        try:
            memory_bytes, computed_s = measured.memory_info().rss, measured.cpu_times().user
        except psutil.Error:
            continue
        wrong = ""
        if computed_s > HANG_S or time.monotonic() > until:
            wrong = f"no end after {computed_s:.0f} s of computing"
        elif memory_bytes > MEMORY_BYTES:
            wrong = f"{memory_bytes / 1e9:.1f} GB"
        if wrong:
            process.kill()
            process.wait()
            return wrong
        time.sleep(_LOOK_S)
    return ""


def run(first: int, last: int, seed: int, folder: Path) -> Iterator[Outcome]:
    """Run the cases once what they compile is compiled: that may take longer than a case may."""
    whole = folder / "whole"
    whole.mkdir()
    prepared(whole)
    for line in _COMMANDS[:_COMPILING]:
        variables, words = {**os.environ, "PYTHONPATH": str(ROOT)}, [sys.executable, "-m", "dpsim", *line.split()]
        subprocess.run(words, cwd=whole, env=variables, capture_output=True, check=True)
    yield from readers.run(first, last, seed, folder, _serve)


def _serve(first: int, last: int, seed: int, folder: str, connection: Connection) -> None:
    for number in range(first, last):
        outcome = case(number, seed, Path(folder))
        connection.send((codec.to_builtins(outcome), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
