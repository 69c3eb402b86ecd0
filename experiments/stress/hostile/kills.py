"""Kills and stops processes of a training run at random moments: all must end, leave nothing and name the cause.

A run whose process was stopped is ended by killing or terminating its launcher, as a user would.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from dpsim.experiments.stress.hostile.tally import Outcome
from dpsim.experiments.stress.rounds import is_running
from dpsim.launch import scratch_keeper

_ROOT = str(Path(str(importlib.resources.files("dpsim"))).resolve().parent)
_TRAIN = ("train", "--model", "mlp:6", "--epochs", "100000", "--devices", "2", "--stall-after", "1")
_TARGETS = ("rank", "launcher", "mpiexec", "proxy")
_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP)
_GIVE_UP = (signal.SIGKILL, signal.SIGTERM)
_STARTING_S, _TRAINING_S, _STOPPED_S, _GONE_WITHIN_S = 1.5, 0.5, 3.0, 10.0


@dataclass(frozen=True, kw_only=True)
class _Blow:
    """A signal to one process of a run."""

    target: str
    number: signal.Signals
    process: psutil.Process
    rank: int | None


def case(number: int, seed: int, folder: Path) -> Outcome:
    """One run, one of whose processes is killed or stopped."""
    moments = random.Random(f"{seed} {number}")
    place, output = folder / str(number), folder / f"{number}.txt"
    place.mkdir()
    shared = _files_of_mpich()
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "dpsim", *_TRAIN],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, "PYTHONPATH": _ROOT, "TMPDIR": str(place)},
            start_new_session=True,
        )
    target, sent = _TARGETS[number % 4], _SIGNALS[number // 4 % 4]
    training = moments.random() < 0.6
    _wait(process, output, training, moments)
    blow = _struck(process, target, sent, moments)
    family = _family(process)
    name = f"{number}: {sent.name} to {target}, {'training' if training else 'starting'}"
    ignored = False
    if blow is None:  # a run that starts may not have that process yet
        process.kill()
    elif sent != signal.SIGKILL:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOPPED_S if training or sent != signal.SIGSTOP else 0)
        if ignored := process.poll() is None:
            process.send_signal(signal.SIGKILL if target == "launcher" else moments.choice(_GIVE_UP))
    wrong = _left(process, family, place, shared)
    text = output.read_text(encoding="utf-8", errors="replace")
    traceback = "Traceback (most recent call last)" in text
    early = traceback and (target, sent) == ("launcher", signal.SIGINT) and f"{_ROOT}/dpsim" not in text
    if not wrong and traceback and not early:  # early: in Python's own start, before a line of dpsim
        wrong = f"traceback: {text.strip().splitlines()[-1][:200]}"
    if not wrong and blow is not None and not early:
        wrong = _misnamed(blow, text, training=training, ignored=ignored)
    if not wrong:
        output.unlink()
    became = "nothing to kill yet" if blow is None else f"{sent.name} to {target}"
    became += ", ignored" * (ignored and sent != signal.SIGSTOP)
    return Outcome(case=name, became=became, wrong=wrong)


def _wait(process: subprocess.Popen[bytes], output: Path, training: bool, moments: random.Random) -> None:
    """Wait until a random moment of the start, or of the training."""
    if not training:
        time.sleep(moments.uniform(0, _STARTING_S))
        return
    until = time.monotonic() + 60
    while b"epoch" not in output.read_bytes() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(moments.uniform(0, _TRAINING_S))


def _family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(process.pid)
        return [parent, *parent.children(recursive=True)]
    return []


def _struck(
    process: subprocess.Popen[bytes], target: str, number: signal.Signals, moments: random.Random
) -> _Blow | None:
    """Send the signal; None where the run has no such process (yet)."""
    with contextlib.suppress(psutil.Error):
        members = _family(process)
        ranks = [
            member
            for member in members
            if "dpsim.launch.worker" in (command := member.cmdline()) and command[:1] == [sys.executable]
        ]
        candidates = {
            "rank": ranks,
            "launcher": members[:1],
            "mpiexec": [member for member in members if member.name() == "mpiexec"],
            "proxy": [member for member in members if member.name().startswith("hydra")],
        }[target]
        if candidates:
            chosen = moments.choice(candidates)
            rank = int(chosen.environ()["PMI_RANK"]) if target == "rank" else None
            chosen.send_signal(number)
            return _Blow(target=target, number=number, process=chosen, rank=rank)
    return None


def _left(process: subprocess.Popen[bytes], family: list[psutil.Process], place: Path, shared: set[str]) -> str:
    """What a run has left behind when it should be gone; empty: nothing."""
    until = time.monotonic() + _GONE_WITHIN_S
    left = ["not checked"]
    while left and time.monotonic() < until:
        time.sleep(0.05)
        process.poll()
        left = [f"{member.name()} ({member.status()})" for member in family if is_running(member)]
        left += [path.name for path in place.iterdir()]
        left += sorted(_files_of_mpich() - shared)
    if left:
        for member in family:
            with contextlib.suppress(psutil.Error):
                member.kill()
    process.wait()
    return f"left after {_GONE_WITHIN_S:.0f} s: {', '.join(left)}" if left else ""


def _files_of_mpich() -> set[str]:
    """mpich's files that no process has open or will read; so files of other running jobs do not count."""
    return scratch_keeper.unused_shared_files() | scratch_keeper.abandoned_topologies()


def _misnamed(blow: _Blow, text: str, *, training: bool, ignored: bool) -> str:
    """What is wrong with a run's last message; empty where it names the process and the signal."""
    last = [line for line in text.splitlines() if line.startswith("dpsim: ")][-1:] or [""]
    if blow.target == "launcher":
        return "" if blow.number != signal.SIGINT or last == ["dpsim: interrupted"] else f"it said {last}"
    if blow.number == signal.SIGSTOP:
        named = blow.target != "rank" or not training or re.search(rf"rank {blow.rank}\b", text)
        return "" if named else f"rank {blow.rank} is not named: {text[-300:]}"
    if ignored:  # by mpiexec's own processes
        return "" if blow.target == "proxy" else "it was ignored"
    expected = {
        "rank": rf"(rank {blow.rank} of 2|one of 2 ranks) was killed by {blow.number.name}",
        "mpiexec": rf"(mpiexec|rank \d of 2) was killed by {blow.number.name}",  # it hands on all but SIGKILL
        "proxy": r"hydra_pmi_proxy",
    }[blow.target]
    return "" if re.search(expected, last[0]) else f"it said {last[0]!r}"


def run(first: int, last: int, seed: int, folder: Path, add: Callable[[Outcome], None]) -> None:
    """Cases ``first`` to ``last``."""
    for number in range(first, last):
        add(case(number, seed, folder))
